"""Numbers that are not finite, told from log, config, checkpoints and source alone; of any project's run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from bevctl.diagnose.checkpoint_scan import Scan, scan_checkpoints
from bevctl.diagnose.learning_rate import unscaled
from bevctl.diagnose.log_lines import TellingLine, telling_lines
from bevctl.diagnose.onset import Onset, onset_of, order_of_tasks
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, status_of
from bevctl.diagnose.signatures import Clues, suspects
from bevctl.diagnose.source import Passage, scan_source
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.engine.nonfinite import BENIGN
from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms.scale import FLOOR
from bevctl.monitor.view import Alarm, View
from bevctl.preflight.half_weights import find as find_half_calls
from bevctl.runs.records import EventRecord

NAMED, SAMPLES, NOTED = "NAN115", "NAN116", "NAN117"
SYMPTOMS = {
    "NAN001": 0.4,
    "NAN002": 0.9,
    "NAN003": 0.4,
    "NAN004": 0.5,
    "NAN005": 0.9,
    "NAN006": 0.9,
    "SCALE001": 0.4,
    "SCALE002": 0.5,
    "SCALE003": 0.4,
}
"""Alarms that tell of numbers that are not finite → how sure the cause is that they give."""
LAST_RECORD = "last record"


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """What a run's files tell of numbers that are not finite: the symptoms first, then suspects by confidence.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = read_subject(request)
    scan = scan_checkpoints(subject.checkpoints, subject.setting.half, request.say, request.checkpoint)
    lines = telling_lines(subject.report.log) if subject.report is not None else []
    onset = onset_of(subject.view, subject.setting) if subject.view is not None else None
    symptoms = [*_symptoms(subject, onset, scan), *_named(lines), *_samples(subject)]
    in_trouble = status_of([*symptoms, *scan.findings]) is Status.FOUND
    passages, looked = _source(request)
    half_calls = find_half_calls(request.source) if request.source is not None and request.source.is_dir() else []
    clues = Clues(subject, onset, passages, half_calls, in_trouble)
    causes = sorted([*suspects(clues), *_learning_rate(subject, in_trouble)], key=lambda f: -f.confidence)
    findings = [*symptoms, *scan.findings, *causes]
    looked_at = [*subject.looked_at, *scan.looked_at, *looked, *_not_told(subject, in_trouble, causes)]
    return Diagnosis(_status(subject, scan, findings), findings, looked_at)


def _status(subject: Subject, scan: Scan, findings: Sequence[DiagnoseFinding]) -> Status:
    """Clear only where there is something that would show the trouble."""
    if status_of(findings) is Status.FOUND:
        return Status.FOUND
    history = subject.view.history if subject.view is not None else None
    shows = history is not None and subject.has_records and ("loss" in history or "grad_norm" in history)
    return Status.CLEAR if shows or scan.last_clean is not None else Status.INCONCLUSIVE


def _symptoms(subject: Subject, onset: Onset | None, scan: Scan) -> Iterator[DiagnoseFinding]:
    """The log's alarms, with what the onset adds to the first of them."""
    more = list(_onset_evidence(subject, onset))
    for alarm in subject.alarms(*SYMPTOMS):
        added = [item for item in more if not _is_told(item, alarm.evidence)] if alarm.severity.rank else []
        yield from_alarm(alarm, SYMPTOMS[alarm.id], _remedies(subject, alarm, scan), added)
        more = [] if added else more
    if all(alarm.severity is Severity.INFO for alarm in subject.alarms(*SYMPTOMS)):
        yield from _noted(subject, more)
        yield from _sunken_scale(subject)


def _is_told(evidence: Evidence, told: Sequence[Evidence]) -> bool:
    """Whether the alarm says the same; of the same record it may name fewer numbers."""
    return evidence.what in [item.what for item in told] or (
        evidence.what.startswith(LAST_RECORD)
        and any(item.where == evidence.where and item.what.startswith(LAST_RECORD) for item in told)
    )


def _onset_evidence(subject: Subject, onset: Onset | None) -> Iterator[Evidence]:
    view = subject.view
    if view is None or not len(view.history):
        return
    yield from _recorded(view)
    if onset is not None:
        yield from onset.evidence(view)
        order = order_of_tasks(view)
        if order is not None:
            yield order
    yield from _last_good(view, onset.iter if onset is not None else math.inf)


def _noted(subject: Subject, more: Sequence[Evidence]) -> Iterator[DiagnoseFinding]:
    """Steps that the run itself calls failures, where the log alone could be a start-up."""
    events = _failed_steps(subject.view) if subject.view is not None else []
    if events:
        yield DiagnoseFinding(
            NOTED,
            Severity.WARN,
            0.6,
            f"{len(events)} steps were not finite, and not for the loss scale's sake",
            tuple(more),
            "The run tells the search for a loss scale from failures, step by step; these are failures.",
            (Remedy({}, "`--replay` on the incident that was kept, if one was: it names the operation"),),
        )


def _sunken_scale(subject: Subject) -> Iterator[DiagnoseFinding]:
    """A loss scale below 1 in messages about skipped steps, which apex and DeepSpeed print."""
    events = [] if subject.view is None else subject.view.events("skipped_step")
    scales = [(event, scale) for event in events if isinstance(scale := event.data.get("loss_scale"), int | float)]
    if not scales or scales[-1][1] >= FLOOR:
        return
    shown = [scales[0], *([scales[-1]] if len(scales) > 1 else [])]
    yield DiagnoseFinding(
        "SCALE002",
        Severity.FAIL,
        SYMPTOMS["SCALE002"],
        f"The loss scale fell to {scales[-1][1]:g}",
        tuple(Evidence(event.where or "log", event.message) for event, _ in shown),
        "Every step overflows, so that the scale was halved until nothing was left of it: NaN comes from the forward "
        "pass, which no scale helps, or gradients diverge.",
        (Remedy({}, "resume from before the scale fell, in BF16 or FP32, or with the part that overflows in FP32"),),
    )


def _failed_steps(view: View) -> list[EventRecord]:
    return [event for event in view.events("nonfinite") if str(event.data.get("class")) not in BENIGN]


def _recorded(view: View) -> Iterator[Evidence]:
    """What a run of bevctl noted of its steps that were not finite."""
    events = _failed_steps(view)
    if events:
        kinds = Counter(str(event.data.get("class")) for event in events)
        yield Evidence("events.jsonl", "steps not finite: " + ", ".join(f"{kind} {n}" for kind, n in kinds.items()))
        yield Evidence("events.jsonl", events[0].message)


def _last_good(view: View, before: float) -> Iterator[Evidence]:
    """The last record whose loss and gradients are finite, and the last checkpoint, before an iteration."""
    history = view.history
    good = np.isfinite(history.column("loss")) & ~history.nonfinite("grad_norm") & (history.iters < before)
    if good.any():
        row = int(np.flatnonzero(good)[-1])
        values = {name: history.column(name)[row] for name in ("loss", "grad_norm", "lr", "loss_scale")}
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if np.isfinite(value))
        yield Evidence(view.where(history.iters[row]), f"{LAST_RECORD} in which all is finite: {shown}")
    saved = [event for event in view.events("checkpoint") if event.iter is not None and event.iter < before]
    if saved:
        where = saved[-1].where or view.where(saved[-1].iter or 0)
        yield Evidence(where, f"last checkpoint before: {saved[-1].message}")


def _remedies(subject: Subject, alarm: Alarm, scan: Scan) -> list[Remedy]:
    if alarm.severity is Severity.INFO:
        return []
    remedies = []
    if scan.last_clean is not None:
        remedies.append(Remedy({}, f"continue from {scan.last_clean}, the last clean checkpoint"))
    if alarm.id == "NAN005" and subject.setting.own:
        remedies.append(subject.remedy("the first epoch in FP32, then FP16", precision__dtype="fp32"))
    if subject.setting.half and subject.setting.may_use_bf16:
        remedies.append(subject.remedy("BF16, which has FP32's range and needs no loss scale", precision__dtype="bf16"))
    return remedies


def _named(lines: Sequence[TellingLine]) -> Iterator[DiagnoseFinding]:
    """Lines of the log that name the trouble themselves."""
    for line in lines:
        times = f" ({line.count} times)" if line.count > 1 else ""
        harmless = not line.telling.confidence
        yield DiagnoseFinding(
            NAMED,
            Severity.INFO if harmless else Severity.WARN,
            line.telling.confidence or 0.9,
            f"The log says: {line.first.what}{times}",
            (line.first,),
            line.telling.meaning,
        )


def _samples(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Samples that were in several bad steps of a run of bevctl."""
    if subject.view is None:
        return
    events = [*subject.view.events("skipped_step"), *_failed_steps(subject.view)]
    steps = [tokens for event in events if isinstance(tokens := event.data.get("tokens"), list)]
    counts = Counter(str(token) for tokens in steps for token in set(map(str, tokens)))
    often = [(token, count) for token, count in counts.most_common(4) if count > 1 and count > len(steps) / 2]
    if len(steps) > 2 and often:
        yield DiagnoseFinding(
            SAMPLES,
            Severity.WARN,
            0.6,
            f"Sample {often[0][0]} was in {often[0][1]} of {len(steps)} steps that were not finite",
            tuple(Evidence("events.jsonl", f"{token}: {count} of {len(steps)} bad steps") for token, count in often),
            "The data of this sample: NaN or infinite points or pixels, a huge box, a degenerate calibration matrix.",
            (subject.remedy("leave the sample out", data__skip_samples=[token for token, _ in often]),),
        )


def _source(request: DiagnoseRequest) -> tuple[list[Passage], list[str]]:
    if request.source is None:
        return [], []
    passages = scan_source(request.source)
    kinds = Counter(passage.kind for passage in passages)
    told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "nothing that matters in FP16"
    return passages, [f"{request.source}: {told}"]


def _learning_rate(subject: Subject, in_trouble: bool) -> Iterator[DiagnoseFinding]:
    found = unscaled(subject.setting, in_trouble)
    if found is not None:
        yield found


def _not_told(subject: Subject, in_trouble: bool, causes: Sequence[DiagnoseFinding]) -> Iterator[str]:
    """What is missing for a better answer."""
    history = subject.view.history if subject.view is not None else None
    if history is not None and len(history) and "grad_norm" not in history:
        yield "The log has no gradient norms: NaN that only gradients have would not show."
    if history is not None and in_trouble and not any(finding.confidence >= 0.5 for finding in causes):
        yield "The files name no cause with certainty: only running the step again under instruments does."
