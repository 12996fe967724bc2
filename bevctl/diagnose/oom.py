"""Memory that ran out, of the GPU or of the host: what was where, why, and what to turn down."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bevctl.diagnose.memory_knobs import Need, comparison, remedies
from bevctl.diagnose.memory_savings import Savings, predicted_savings
from bevctl.diagnose.oom_samples import samples_of_step
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, Table, status_of
from bevctl.diagnose.shortage import Shortage, shortages
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.finding import Evidence, Severity
from bevctl.monitor.facts import against_fragments
from bevctl.monitor.history import History
from bevctl.monitor.view import View
from bevctl.runs.readers.events import FAILURES
from bevctl.runs.records import EventRecord

GIB = 2**30
FRAGMENTED, OTHERS, TOO_LARGE, RARE_SAMPLES, IN_EVALUATION, SMALL_BATCH, SILENT_END = (
    *("MEM101", "MEM102", "MEM103", "MEM104", "MEM105", "MEM106", "MEM107"),
)
EARLY_ITERS = 50
"""A run that gets no further than this never fitted."""
_EVALUATING = re.compile(
    r"\b(?:single_gpu_test|multi_gpu_test|evaluat\w*|val_step|test_step|simple_test|post_center)\b"
)
_STATE_BYTES = 16
"""A trainable parameter in FP32: weight, gradient, two averages of AdamW."""
_NO_POOLS = Remedy(
    {}, "train.cuda_graphs=false: recorded parts have pools of their own, with gaps of their own; it costs time"
)


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Which memory ran out, and why, by log and config.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = read_subject(request)
    found = shortages(subject.view.log.events) if subject.view is not None else []
    need = _need(subject, found, request)
    savings = _savings(subject, request) if found else Savings()
    findings = [*_of_gpu(subject, found, need, savings), *_of_host(subject), *_growth(subject), *_silent_end(subject)]
    findings = sorted(findings, key=lambda finding: (-finding.severity.rank, -finding.confidence))
    status, said = _status(subject, findings)
    tables = [_figures(found[0]), comparison(savings)] if found else []
    return Diagnosis(status, findings, [*subject.looked_at, *said], [table for table in tables if table.rows])


def _status(subject: Subject, findings: Sequence[DiagnoseFinding]) -> tuple[Status, list[str]]:
    """The answer, and what to add where it is not FOUND."""
    status, view = status_of(findings), subject.view
    if status is Status.FOUND or view is None:
        return (status, []) if view is not None else (Status.INCONCLUSIVE, ["There is no log to look at."])
    peak = view.history.finite("memory_gib")[1]
    said = [f"Peak of GPU memory in tensors: {peak.max():.2f} GiB."] if len(peak) else []
    if not subject.has_records and not view.events("failure"):
        return Status.INCONCLUSIVE, [*said, "The log has no training record and tells of no failure."]
    if any(finding.id == SILENT_END for finding in findings):
        return Status.INCONCLUSIVE, said
    if view.events("failure"):
        said.append(f"What the log tells of is no want of memory: {view.events('failure')[0].message[:160]}")
    return Status.CLEAR, said


def _of_gpu(subject: Subject, found: Sequence[Shortage], need: Need, savings: Savings) -> Iterator[DiagnoseFinding]:
    """What ran out of the GPU's memory, and why."""
    alarms = subject.alarms("MEM002")
    view = subject.view
    if not alarms or not found or view is None:
        return
    first = found[0]
    knobs = tuple(remedies(subject, need, savings))
    told = [evidence for evidence in alarms[0].evidence if evidence.where != "memory"]  # MEM101 tells it better
    when = (Evidence("when", _moment(view, first)), *samples_of_step(view, first.event.message))
    yield DiagnoseFinding("MEM002", Severity.FAIL, 0.95, _title(first), (*told, *when), alarms[0].cause, knobs)
    yield from (*_fragmented(view, first), *_others(first), *_when(view, first))
    if subject.setting.batch is not None and need.gib is not None and subject.setting.batch > 1:
        yield _least(need, subject.setting.batch)


def _title(shortage: Shortage) -> str:
    if shortage.tried is None or shortage.free is None:
        return "The GPU's memory ran out"
    of = f" of {shortage.capacity:.1f}" if shortage.capacity is not None else ""
    return f"The GPU's memory ran out: {shortage.tried:.2f} GiB were asked for, {shortage.free:.2f}{of} were free"


def _fragmented(view: View, shortage: Shortage) -> Iterator[DiagnoseFinding]:
    if not shortage.fragmented:
        return
    train = (view.config or {}).get("train")
    recorded = isinstance(train, Mapping) and train.get("cuda_graphs") is True
    yield DiagnoseFinding(
        FRAGMENTED,
        Severity.WARN,
        0.85,
        f"{shortage.idle:.1f} GiB lay idle in pieces too small for {shortage.tried:.2f} GiB",
        tuple(Evidence(shortage.event.where or "log", said) for said in shortage.sentences()),
        "PyTorch's memory is fragmented: blocks of many sizes (point clouds differ from sample to sample) leave gaps.",
        (
            Remedy({}, against_fragments(view.log)),
            *((_NO_POOLS,) if recorded else ()),
            Remedy({}, "fewer sizes: points, voxels and boxes padded or cut to fixed numbers"),
        ),
    )


def _others(shortage: Shortage) -> Iterator[DiagnoseFinding]:
    if shortage.of_others <= 0:
        return
    yield DiagnoseFinding(
        OTHERS,
        Severity.WARN,
        0.8,
        f"Other processes hold about {shortage.of_others:.1f} GiB of the GPU",
        tuple(Evidence(shortage.event.where or "log", said) for said in shortage.sentences()),
        "Another job, or what is left of a run that was killed, shares the card.",
        (Remedy({}, "`bevctl preflight --reap` lists what is left of dead runs; nvidia-smi shows the rest"),),
    )


def _when(view: View, shortage: Shortage) -> Iterator[DiagnoseFinding]:
    """What the moment says: never fitted, a rare sample, or the evaluation."""
    where = (Evidence(shortage.event.where or "log", _moment(view, shortage)),)
    frames = " ".join(map(str, shortage.event.data.get("frames", [])))
    if _EVALUATING.search(frames):
        yield DiagnoseFinding(
            IN_EVALUATION,
            Severity.WARN,
            0.7,
            "Memory ran out in the evaluation",
            where,
            "The evaluation's batch or its outputs, which stay on the GPU, come on top of the training's memory.",
            (Remedy({}, "evaluate with batch 1, without gradients, and move outputs to the host sample by sample"),),
        )
        return
    before = _records_before(view, shortage)
    if not len(before):
        yield _too_large(shortage, where)
        return
    peak = before.finite("memory_gib")[1]
    if shortage.fragmented or not len(peak):
        return
    usual = float(np.median(peak))
    yield DiagnoseFinding(
        RARE_SAMPLES,
        Severity.WARN,
        0.5,
        f"The run fitted for {before.iters[-1]:.0f} iterations, then a step needed more",
        (*where, Evidence("memory_gib", f"peaks before: median {usual:.2f}, highest {peak.max():.2f} GiB")),
        "Samples differ: more points, voxels or boxes than in any step before; a margin of a tenth is usual.",
        (Remedy({}, "a bound on points, voxels and boxes a sample, or one sample less a GPU"),),
    )


def _too_large(shortage: Shortage, where: tuple[Evidence, ...]) -> DiagnoseFinding:
    need = f"; at least {shortage.needed:.1f} GiB in tensors" if shortage.needed is not None else ""
    return DiagnoseFinding(
        TOO_LARGE,
        Severity.WARN,
        0.8 if not shortage.fragmented else 0.5,
        f"The run never fitted on this GPU{need}",
        where,
        "No training record precedes it: the model with this batch needs more than the card has.",
    )


def _records_before(view: View, shortage: Shortage) -> History:
    """Training records before the failure."""
    last = shortage.event.iter
    return view.history.rows(view.history.iters <= (last if last is not None else 0))


def _moment(view: View, shortage: Shortage) -> str:
    before = _records_before(view, shortage)
    if not len(before):
        return "before the first training record"
    last = float(before.iters[-1])
    since = view.starts[-1] if view.starts else 0.0
    return f"after {view.where(last)}, {last - since:.0f} iterations after the last start"


def _least(need: Need, batch: int) -> DiagnoseFinding:
    least = need.at_batch(1, batch)
    bound = "About" if need.fixed_gib is not None else "At least"
    fixed = f"{need.fixed_gib:.2f} GiB do not depend on the batch; " if need.fixed_gib is not None else ""
    return DiagnoseFinding(
        SMALL_BATCH,
        Severity.INFO,
        0.6,
        f"{bound} {least:.1f} GiB in tensors are needed at batch 1",
        (Evidence("memory_gib", f"{fixed}{need.gib:.2f} GiB in all at batch {batch}"),),
        "Reserved memory and CUDA's context come on top: a third more is usual.",
    )


def _need(subject: Subject, found: Sequence[Shortage], request: DiagnoseRequest) -> Need:
    """Peak of memory in tensors, by the log and by the failed allocation."""
    peak = subject.view.history.finite("memory_gib")[1] if subject.view is not None else np.empty(0)
    known = [float(peak.max())] if len(peak) else []
    known += [shortage.needed for shortage in found if shortage.needed is not None]
    return Need(max(known), _fixed_gib(subject, request) if found else None) if known else Need(None)


def _savings(subject: Subject, request: DiagnoseRequest) -> Savings:
    """Predicted for a run of bevctl."""
    if subject.view is None or subject.view.config is None:
        return Savings()
    request.say("Predicting what each knob saves")
    return predicted_savings(subject.view.config, subject.setting)


def _fixed_gib(subject: Subject, request: DiagnoseRequest) -> float | None:
    """Weights, gradients and optimizer of a run of bevctl; by two batches where --against has another one."""
    compared = _by_two_batches(subject)
    if compared is not None:
        return compared
    view = subject.view
    if view is None or view.config is None:
        return None
    from bevctl.config.load import from_dict
    from bevctl.errors import BevctlError
    from bevctl.measure.parameters import count_parameters

    request.say("Counting the model's parameters")
    try:
        return _STATE_BYTES * count_parameters(from_dict(view.config)).trainable / GIB
    except BevctlError:
        return None


def _by_two_batches(subject: Subject) -> float | None:
    """Where two runs differ in their batch, what their memory has in common."""
    view = subject.view
    if view is None or view.against is None or subject.setting.batch is None:
        return None
    from bevctl.diagnose.setting import setting_of

    other = setting_of(view.against, None)
    ours, theirs = view.history.finite("memory_gib")[1], view.other.finite("memory_gib")[1]
    same = other.precision == subject.setting.precision and other.batch not in (None, subject.setting.batch)
    if not same or other.batch is None or not len(ours) or not len(theirs):
        return None
    slope = (float(ours.max()) - float(theirs.max())) / (subject.setting.batch - other.batch)
    return max(float(ours.max()) - slope * subject.setting.batch, 0.0)


def _of_host(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Host memory, and the shared memory of the loading processes."""
    setting = subject.setting
    for alarm in subject.alarms("MEM003", "LOAD002"):
        fewer = setting.workers // 2 if setting.workers else None
        told = f"{fewer} instead of {setting.workers} loading processes a GPU" if fewer is not None else "fewer workers"
        settings = {"train__workers": fewer} if fewer is not None else {}
        yield from_alarm(alarm, 0.85 if alarm.id == "MEM003" else 0.75, (subject.remedy(told, **settings),))


def _growth(subject: Subject) -> Iterator[DiagnoseFinding]:
    for alarm in subject.alarms("MEM001"):
        yield from_alarm(alarm, 0.7)


def _silent_end(subject: Subject) -> Iterator[DiagnoseFinding]:
    """A run that just stops: the kernel's out-of-memory killer leaves no word in the log."""
    if subject.view is None or not all(map(_is_dragged, subject.view.events("failure"))):
        return
    for alarm in subject.alarms("RUN005", "RUN004", "RUN003")[:1]:
        yield DiagnoseFinding(
            SILENT_END,
            Severity.INFO,
            0.2 if alarm.id == "RUN003" else 0.5,
            "The log does not say what ended the run first",
            alarm.evidence,
            "A process that the kernel kills because the host's memory ran out leaves no word in its own log; neither "
            "does one that was stopped by a signal, nor a log that was copied while the run went on. Other ranks only "
            "notice that it is gone.",
            (
                Remedy({}, "`dmesg -T | grep -i 'killed process'`, and the launcher's output (exit code -9 or 137)"),
                Remedy({}, "in a container, memory.events of its control group counts oom_kill"),
            ),
        )


def _is_dragged(event: EventRecord) -> bool:
    """Whether a failure only follows from that of another process."""
    failure = FAILURES.get(str(event.data.get("cause")))
    return failure is not None and failure.dragged


def _figures(shortage: Shortage) -> Table:
    rows = [
        (name, round(value, 2))
        for name, value in (
            ("asked for", shortage.tried),
            ("in tensors (allocated)", shortage.allocated),
            ("reserved, in no tensor", shortage.idle),
            ("outside of PyTorch", shortage.elsewhere),
            ("free", shortage.free),
            ("the GPU has", shortage.capacity),
        )
        if value is not None
    ]
    return Table("memory", "The GPU's memory when the allocation failed", ("what", "GiB"), rows)
