"""FP16 that is asked for and not in effect, or whose saving is something else: a lost head, say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from bevctl.diagnose.gpu_models import gpu_model
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, status_of
from bevctl.diagnose.source import IN_FP16, KEPT_FP32, Passage, scan_source
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms import tasks
from bevctl.monitor.alarms.nonfinite import overflows
from bevctl.monitor.alarms.precision import LEAST_MATMULS, SAME, Comparison, compare
from bevctl.monitor.view import View

NOT_ASKED, NO_TENSOR_CORES, PARTS_IN_FP32, UNMARKED, TF32, NOT_FASTER = (
    *("PREC101", "PREC102", "PREC103", "PREC104", "PREC105", "PREC106"),
)
HALF = ("fp16", "bf16")
MOST_IN_HALF = 0.9
"""Share of matrix products in half precision from which the rest is not worth a word of warning."""
_MOST = 6


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Whether half precision is in effect, and what its gain consists of.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = read_subject(request)
    findings = findings_of(subject, request)
    proof = _in_effect(subject)
    status = status_of(findings)
    if status is Status.CLEAR and proof is None and subject.setting.precision != "fp32":
        missing = "Nothing here shows whether half precision has an effect: give the FP32 run with --against."
        return Diagnosis(Status.INCONCLUSIVE, findings, [*subject.looked_at, missing])
    return Diagnosis(status, findings, [*subject.looked_at, *([proof] if proof is not None else [])])


def findings_of(subject: Subject, request: DiagnoseRequest) -> list[DiagnoseFinding]:
    """Everything about the number format, the worst first."""
    passages = scan_source(request.source) if request.source is not None else []
    findings = [
        *_lost_tasks(subject),
        *(from_alarm(alarm, 0.85) for alarm in subject.alarms("PREC001")),
        *_not_asked(subject),
        *_gpu(subject),
        *_parts(subject, passages),
        *_unmarked(subject, request, passages),
        *_not_faster(subject),
    ]
    return sorted(findings, key=lambda finding: (-finding.severity.rank, -finding.confidence))


def _in_effect(subject: Subject) -> str | None:
    """The sentence for what shows that half precision computes; None where nothing does."""
    view = subject.view
    if view is None or subject.setting.precision == "fp32":
        return None
    share = _share(view)
    if share is not None and share >= LEAST_MATMULS:
        return f"{share:.0%} of the matrix products run in half precision, by the run's own count."
    compared = None if subject.alarms("TASK002") else compare(view)  # a run that lacks a head does not compare
    if compared is not None and compared.memory is not None and max(compared.memory[0], compared.time[0]) < SAME:
        return f"Against the FP32 run: memory x {compared.memory[0]:.2f}, time x {compared.time[0]:.2f}."
    found = overflows(view) if subject.setting.half else None
    if found is not None and not found.is_frequent and not found.no_step_taken:
        return "Gradients overflowed now and then, as they only do where a loss scale is at work: FP16 is in effect."
    return None


def _share(view: View) -> float | None:
    """The run's own count of its matrix products in half precision."""
    shares = [event.data.get("share") for event in view.events("precision")]
    return float(shares[-1]) if shares and isinstance(shares[-1], int | float) else None


def _lost_tasks(subject: Subject) -> Iterator[DiagnoseFinding]:
    """A head whose losses are missing: by the config (another project's too), or against the other run."""
    view = subject.view
    if view is None:
        return
    for alarm in subject.alarms("TASK002"):
        yield from_alarm(alarm, 0.95, more=tuple(_dropped_weights(view)))
    if view.config is not None or not subject.setting.tasks or not len(view.history):
        return
    heads: dict[str, dict[str, object]] = {task: {} for task in subject.setting.tasks}
    for trouble in tasks.missing(dataclasses.replace(view, config={"model": heads}, against=None)):
        evidence = (*trouble.evidence, Evidence(subject.setting.where, "builds this head"), *_dropped_weights(view))
        fix = (Remedy({}, trouble.fix),) if trouble.fix else ()
        yield DiagnoseFinding("TASK002", trouble.severity, 0.8, trouble.title, evidence, trouble.cause, fix)


def _dropped_weights(view: View) -> Iterator[Evidence]:
    """Weights of heads in a checkpoint that the model had no place for."""
    for event in view.events("checkpoint_mismatch"):
        unexpected = event.data.get("prefixes", {}).get("unexpected", {})
        heads = [f"{prefix} ({count})" for prefix, count in unexpected.items() if "head" in prefix]
        if heads:
            yield Evidence(event.where or "log", f"the checkpoint has weights of a head that was not built: {heads[0]}")


def _not_asked(subject: Subject) -> Iterator[DiagnoseFinding]:
    """FP32 by the config; a warning where the config means something else than it does."""
    setting = subject.setting
    if setting.precision != "fp32":
        return
    severity, title, cause, fix = (
        Severity.INFO,
        "FP16 is not asked for: the run is in FP32",
        "",
        "FP16, if it is wanted",
    )
    config = setting.config
    if config is not None and config.kind == "mmengine" and config.get("fp16"):
        severity, title = Severity.WARN, "FP16 is asked for in a place that has no effect"
        cause = "mmengine switches mixed precision on by the type of the optimizer wrapper alone."
        fix = "optim_wrapper of type AmpOptimWrapper"
    elif setting.asked in HALF:
        severity, title = Severity.WARN, f"The config asks for {setting.asked.upper()}, and the run trained in FP32"
        cause = "The run was started with another config, or an option overruled it."
        fix = "start it with this config"
    evidence = Evidence(setting.where or "log", setting.precision_told)
    remedy = subject.remedy(fix, precision__dtype="fp16")
    yield DiagnoseFinding(NOT_ASKED, severity, 0.9, title, (evidence,), cause, (remedy,))


def _gpu(subject: Subject) -> Iterator[DiagnoseFinding]:
    """Cards that compute FP16 no faster than FP32."""
    if subject.setting.precision == "fp32":
        return
    for name in dict.fromkeys(subject.setting.gpu_names):
        model = gpu_model(name)
        if model is None or model.tensor_cores:
            continue
        slow = "a small fraction of" if model.slow_half else "at most twice"
        yield DiagnoseFinding(
            NO_TENSOR_CORES,
            Severity.WARN,
            0.95,
            f"{name} has no tensor cores: FP16 saves memory, and little or no time",
            (Evidence("environment", f"{name}, compute capability {model.capability[0]}.{model.capability[1]}"),),
            f"FP16 arithmetic runs at {slow} FP32's rate there; tensor cores come with capability 7.0 (Volta).",
            (Remedy({}, "FP16 for its memory only (a larger batch), or a newer card"),),
        )


def _parts(subject: Subject, passages: Sequence[Passage]) -> Iterator[DiagnoseFinding]:
    """Parts that are kept in FP32, and how much of the work they are."""
    setting, view = subject.setting, subject.view
    share = _share(view) if view is not None else None
    kept = [passage for passage in passages if passage.kind == KEPT_FP32]
    evidence = []
    if setting.fp32_modules:
        evidence.append(Evidence(setting.where, f"precision.fp32_modules: {', '.join(setting.fp32_modules)}"))
    if share is not None:
        evidence.append(Evidence("events", f"{1 - share:.0%} of the matrix products' work runs in FP32"))
    evidence += [Evidence(str(passage), passage.text) for passage in kept[:_MOST]]
    large = share is not None and LEAST_MATMULS <= share < MOST_IN_HALF
    if setting.precision == "fp32" or not (large or setting.fp32_modules or kept):
        return
    yield DiagnoseFinding(
        PARTS_IN_FP32,
        Severity.WARN if large else Severity.INFO,
        0.8 if share is not None else 0.4,
        f"{1 - share:.0%} of the work runs in FP32" if share is not None else "Parts of the model are kept in FP32",
        tuple(evidence),
        "What is kept in FP32 gains neither time nor memory; losses, geometry and voxelization belong there, backbones "
        "do not.",
        (Remedy({}, "keep in FP32 only what overflows: `bevctl diagnose nan` names it"),) if large else (),
    )


def _unmarked(subject: Subject, request: DiagnoseRequest, passages: Sequence[Passage]) -> Iterator[DiagnoseFinding]:
    """mmcv's FP16 converts only methods that are marked with auto_fp16."""
    setting = subject.setting
    by_marks = setting.config is not None and setting.config.kind in ("mmcv", "torchpack") and setting.half
    if request.source is None or not by_marks or any(passage.kind == IN_FP16 for passage in passages):
        return
    yield DiagnoseFinding(
        UNMARKED,
        Severity.WARN,
        0.85,
        "No method of the model is marked for FP16",
        (
            Evidence(setting.where, setting.precision_told),
            Evidence(str(request.source), "no auto_fp16 and no autocast anywhere"),
        ),
        "mmcv's FP16 hook scales the loss, but only methods decorated with auto_fp16 (in modules with fp16_enabled) "
        "compute in FP16.",
        (Remedy({}, "auto_fp16 on the forward methods of the detector and its parts, or autocast around the model"),),
    )


def _not_faster(subject: Subject) -> Iterator[DiagnoseFinding]:
    """FP16 that saves memory and no time against the FP32 run, and what the baseline was."""
    view = subject.view
    compared = compare(view) if view is not None else None
    if view is None or compared is None or subject.setting.precision == "fp32" or compared.time[0] < SAME:
        return
    if (compared.is_smaller or compared.memory is None) and not subject.alarms("TASK002"):
        yield _slower(view, compared)
    yield from _tf32(subject, compared)


def _slower(view: View, compared: Comparison) -> DiagnoseFinding:
    ours, theirs = (history.finite("data_time_s")[1] for history in (view.warm, view.other))
    grown = []
    if len(ours) and len(theirs):
        told = f"waiting for data: {np.median(ours):.3g} s here, {np.median(theirs):.3g} s there"
        grown = [Evidence("data_time_s", told)]
    saves = (
        f"FP16 is in effect (memory x {compared.memory[0]:.2f}), but"
        if compared.memory is not None
        else "In half precision,"
    )
    return DiagnoseFinding(
        NOT_FASTER,
        Severity.WARN,
        0.6,
        f"{saves} computing takes x {compared.time[0]:.2f}",
        (*compared.evidence(), *grown),
        "The time goes where FP16 does not help: many small kernels that the host launches too slowly, operators "
        "without tensor cores (sparse convolutions, normalization, sampling), casts between formats.",
        (Remedy({}, "use the memory that is free for a larger batch, which FP16 speeds up more"),),
    )


def _tf32(subject: Subject, compared: Comparison) -> Iterator[DiagnoseFinding]:
    """An FP32 run that used tensor cores by itself."""
    models = {name: model for name in subject.setting.gpu_names if (model := gpu_model(name)) and model.has_tf32}
    for name, model in models.items():
        yield DiagnoseFinding(
            TF32,
            Severity.INFO,
            0.7,
            "The FP32 run computes its convolutions in TF32 already",
            (
                Evidence("environment", f"{name}, compute capability {model.capability[0]}.{model.capability[1]}"),
                *compared.evidence(),
            ),
            "From capability 8.0 on, PyTorch runs FP32 convolutions (and with torch 1.7 to 1.11 matrix products) on "
            "tensor cores in TF32: FP16 has twice that rate at best, in practice 1.1 to 1.5 times the speed.",
            (Remedy({}, "expect the gain in memory, and take a larger batch for it"),),
        )
