"""Half precision that brings no speed: what takes the time, and how much there is to gain at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bevctl.diagnose import fp16_inactive
from bevctl.diagnose.bench_limits import read_pair
from bevctl.diagnose.gpu_models import GpuModel, gpu_model
from bevctl.diagnose.odd_channels import odd_channels
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, Table, status_of
from bevctl.diagnose.setting import Setting
from bevctl.diagnose.speed_bench import AMDAHL, by_parts, part_table
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.diagnose.throttling import held_back, is_here
from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms.precision import LEAST_RECORDS, SAME, Comparison, compare
from bevctl.monitor.facts import half_of
from bevctl.monitor.progress import evaluation_lengths
from bevctl.monitor.view import Alarm, View

if TYPE_CHECKING:
    from bevctl.diagnose.speed_rehearsal import Rehearsed

NO_WORKERS, EXPECTED, SMALL_BATCH, ODD_CHANNELS, SLOW_SWITCHES, EVALUATIONS = (
    *("SPEED101", "SPEED102", "SPEED103", "SPEED104", "SPEED105", "SPEED106"),
)
SLOW = {"LOAD001": 0.85, "TIME001": 0.6, "TIME002": 0.7}
"""Alarms that tell of lost time → how sure it is that the time goes there."""
SMALL = 2
"""Samples a GPU up to which a step is bound by launches on a fast card, as measured on BEVFusion."""
USUAL_GAIN = 1.5
"""Of the computing, on a card whose FP32 convolutions use TF32."""
EVALUATION_SHARE = 0.25
NO_WAIT = 0.05
"""Share of waiting for data that says nothing."""
_MOST = 6


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """What keeps half precision from being faster, by logs, configs and benchmarks.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = _subject(request)
    pair = read_pair(request.bench) if request.bench else None
    view = subject.view
    compared = compare(view) if view is not None and not subject.alarms("TASK002") else None
    slower = compared is not None and compared.time[0] >= SAME
    findings = [
        *_precision(subject, request),
        *_lost_time(subject),
        *_no_workers(subject),
        *_small_batch(subject.setting, compared),
        *_odd(subject, slower),
        *_switches(subject),
        *_evaluations(view),
        *_expected(subject, compared),
        *(held_back(view.config) if view is not None and view.config is not None and is_here(view) else ()),
        *(by_parts(pair) if pair is not None else ()),
    ]
    tables, said, gain = [*_time_table(view), *part_table(pair)], [], ""
    if request.profile is not None:
        rehearsed = _profiled(request, subject, request.profile)
        findings, tables = [*findings, *rehearsed.findings], [*tables, *rehearsed.tables]
        said, gain = rehearsed.looked_at, rehearsed.gain
    findings.sort(key=lambda finding: (-finding.severity.rank, -finding.confidence))
    status = status_of(findings)
    if status is Status.CLEAR and compared is None and pair is None and request.profile is None:
        status = Status.INCONCLUSIVE
        given = f"the run of --against cannot be compared ({LEAST_RECORDS} iteration times of each, warm-up left out)"
        wanted = given if request.against is not None else "give the FP32 run with --against, --bench, or --profile N"
        said.append(f"Whether half precision is faster is not known: {wanted}.")
    answer = gain or _gain(findings, compared) if status is Status.CLEAR else ""
    return Diagnosis(status, findings, [*subject.looked_at, *said], tables, said=answer)


def _gain(findings: Sequence[DiagnoseFinding], compared: Comparison | None) -> str:
    """What half precision gives a run without a fault, by a benchmark or beside another run."""
    known = (AMDAHL, EXPECTED) if compared is not None else (AMDAHL,)
    return next((finding.title for finding in findings if finding.id in known), "")


def _profiled(request: DiagnoseRequest, subject: Subject, steps: int) -> Rehearsed:
    from bevctl.diagnose.speed_rehearsal import rehearse_speed

    return rehearse_speed(request, subject, steps)


def _subject(request: DiagnoseRequest) -> Subject:
    """What is known of the run in half precision, also where the two were given the other way round."""
    if request.bench and (request.run, request.config, request.source, request.checkpoint) == (None,) * 4:
        return Subject(None, Setting())
    subject = read_subject(request)
    against = subject.view.against if subject.view is not None else None
    if against is not None and half_of(against) and subject.setting.precision == "fp32":
        return read_subject(dataclasses.replace(request, run=request.against, against=request.run, config=None))
    return subject


def _precision(subject: Subject, request: DiagnoseRequest) -> Iterator[DiagnoseFinding]:
    """Half precision that is off or without effect; here it is the first reason that there is no speed-up."""
    for finding in fp16_inactive.findings_of(subject, request):
        off = finding.id == fp16_inactive.NOT_ASKED
        yield dataclasses.replace(finding, severity=Severity.WARN) if off else finding


def _lost_time(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Time that half precision does not touch, by the log's alarms."""
    for alarm in subject.alarms(*SLOW):
        yield from_alarm(alarm, SLOW[alarm.id], _remedies(subject, alarm), tuple(_limit(subject.view, alarm)))


def _limit(view: View | None, alarm: Alarm) -> Iterator[Evidence]:
    """Amdahl for the wait: what faster computing makes of an iteration."""
    share = _data_share(view)
    if alarm.id == "LOAD001" and share:
        faster = 1 / (share + (1 - share) / USUAL_GAIN)
        told = f"computing {USUAL_GAIN} times as fast makes an iteration {faster:.2f} times as fast"
        yield Evidence("ceiling", f"{told}, and no time at all for it {1 / share:.1f} times")


def _remedies(subject: Subject, alarm: Alarm) -> Sequence[Remedy]:
    workers = subject.setting.workers
    if alarm.id != "LOAD001" or workers is None:
        return ()
    more = max(2 * workers, 4)
    return (subject.remedy(f"{more} instead of {workers} loading processes a GPU", train__workers=more),)


def _data_share(view: View | None) -> float | None:
    """Share of an iteration that is spent waiting for data."""
    if view is None:
        return None
    data, total = view.warm.column("data_time_s"), view.warm.column("iter_time_s")
    kept = np.isfinite(data) & np.isfinite(total) & (total > 0)
    return float(np.median(data[kept] / total[kept])) if kept.any() else None


def _no_workers(subject: Subject) -> Iterator[DiagnoseFinding]:
    setting, share = subject.setting, _data_share(subject.view)
    if setting.workers != 0:
        return
    harmless = share is not None and share < NO_WAIT
    waited = (Evidence("data_time_s", f"{share:.0%} of an iteration"),) if share is not None else ()
    yield DiagnoseFinding(
        NO_WORKERS,
        Severity.INFO if harmless else Severity.WARN,
        0.9 if share else 0.6,
        "Samples are loaded by the training process itself: there are no loading processes",
        (Evidence(setting.where, "0 workers"), *waited),
        "Loading and computing take turns, so that the GPU rests while a batch is read.",
        (subject.remedy("4 loading processes a GPU", train__workers=4),),
    )


def _small_batch(setting: Setting, compared: Comparison | None) -> Iterator[DiagnoseFinding]:
    """Few samples a step, whose kernels are over before the host has launched the next."""
    fast = [name for name in setting.gpu_names if (model := gpu_model(name)) and model.capability >= (8, 0)]
    if setting.batch is None or setting.batch > SMALL or not fast or setting.precision == "fp32":
        return
    if compared is not None and compared.time[0] < SAME:
        return
    yield DiagnoseFinding(
        SMALL_BATCH,
        Severity.WARN if compared is not None else Severity.INFO,
        0.6 if compared is not None else 0.3,
        f"{setting.batch} samples a GPU are too few for half precision to show",
        (Evidence(setting.where, f"batch {setting.batch} on {fast[0]}"), *(compared.evidence() if compared else ())),
        "A step launches thousands of kernels; with few samples the host needs longer for that than the GPU for the "
        "arithmetic. BEVFusion in mmdet3d gains nothing from FP16 at batch 1 and 2 on an H200.",
        (
            Remedy(
                {}, f"a batch of {4 * setting.batch} with the memory that half precision frees, and its learning rate"
            ),
        ),
    )


def _odd(subject: Subject, slower: bool) -> Iterator[DiagnoseFinding]:
    """Widths that tensor cores cannot take as they are."""
    found = odd_channels(subject)
    if not found or subject.setting.precision == "fp32":
        return
    yield DiagnoseFinding(
        ODD_CHANNELS,
        Severity.WARN if slower else Severity.INFO,
        0.4,
        f"{len(found)} widths of the model are no multiple of 8",
        tuple(found[:_MOST]),
        "Tensor cores take FP16 in eights: other widths run padded, or by slower kernels.",
        (Remedy({}, "widths that are multiples of 8 (better 64); weights of other widths must be trained anew"),),
    )


def _switches(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Switches for debugging and for repeatable numbers, which cost time in every precision."""
    view, config = subject.view, subject.setting.config
    evidence = []
    train = (view.config or {}).get("train") if view is not None else None
    if isinstance(train, dict) and train.get("deterministic"):
        evidence.append(Evidence(subject.setting.where, "train.deterministic is on"))
    for key in ("detect_anomaly", "deterministic", "randomness.deterministic"):
        if config is not None and config.get(key) is True:
            evidence.append(Evidence(str(config.origin(key) or config.path), f"{key} is on"))
    env = (view.log.header.get("env") if view is not None else None) or {}
    if str(env.get("CUDA_LAUNCH_BLOCKING", "0")) == "1":
        evidence.append(Evidence("environment", "CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel"))
    if evidence:
        yield DiagnoseFinding(
            SLOW_SWITCHES,
            Severity.WARN,
            0.7,
            "A switch is on that costs time in every precision",
            tuple(evidence),
            "Deterministic algorithms and debugging keep the GPU from its fast kernels or make the host wait.",
            (subject.remedy("without it, unless the numbers must repeat", train__deterministic=False),),
        )


def _evaluations(view: View | None) -> Iterator[DiagnoseFinding]:
    """A large share of the run's time that goes to evaluations."""
    lengths = evaluation_lengths(view.log) if view is not None else []
    times = view.history.column("time") if view is not None else np.empty(0)
    known = times[np.isfinite(times)]
    if not lengths or len(known) < 2 or known[-1] <= known[0]:
        return
    share = min(sum(lengths) / float(known[-1] - known[0]), 1.0)
    if share < EVALUATION_SHARE:
        return
    yield DiagnoseFinding(
        EVALUATIONS,
        Severity.WARN,
        0.8,
        f"{share:.0%} of the time goes to evaluations",
        (Evidence("log", f"{len(lengths)} evaluations of {np.median(lengths) / 60:.1f} min (median)"),),
        "Half precision of the training step does not shorten them.",
        (Remedy({}, "evaluate less often, on a part of the samples, or with more loading processes"),),
    )


def _expected(subject: Subject, compared: Comparison | None) -> Iterator[DiagnoseFinding]:
    """What the card can be expected to give, beside what it gave."""
    models = {name: model for name in subject.setting.gpu_names if (model := gpu_model(name)) is not None}
    if subject.setting.precision == "fp32" or (compared is None and not models):
        return
    evidence = [Evidence("environment", f"{name}: {_usual(model)}") for name, model in models.items()]
    title = "What half precision usually gives on this card"
    if compared is not None:
        title = f"Half precision computes {1 / compared.time[0]:.2f} times as fast as the other run"
        evidence += compared.evidence()
    yield DiagnoseFinding(
        EXPECTED,
        Severity.INFO,
        0.8,
        title,
        tuple(evidence),
        "Whole runs gain less than single layers: waiting for data, evaluation, losses and sparse operators stay as "
        "they are. 10 to 15 % of a run's time is a usual gain at the same batch; a larger batch adds to it.",
    )


def _usual(model: GpuModel) -> str:
    if not model.tensor_cores:
        return "no tensor cores, no gain in time"
    return "1.1 to 1.5 times, as FP32 convolutions use TF32" if model.has_tf32 else "1.3 to 2 times FP32"


def _time_table(view: View | None) -> list[Table]:
    """Where an iteration's time goes."""
    if view is None:
        return []
    data, total = view.warm.column("data_time_s"), view.warm.column("iter_time_s")
    kept = np.isfinite(total)
    if not kept.any():
        return []
    whole = float(np.median(total[kept]))
    waiting = float(np.median(np.nan_to_num(data[kept])))
    rows = [("waiting for data", waiting, waiting / whole), ("computing", whole - waiting, 1 - waiting / whole)]
    return [Table("time", "An iteration", ("what", "seconds", "share"), rows)] if whole > 0 else []
