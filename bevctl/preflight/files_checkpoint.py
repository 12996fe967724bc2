"""Checks of the checkpoints that a run starts from; `bevctl checkpoint verify` finds the same with the same ids."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bevctl.config import foreign_facts
from bevctl.config.document import display
from bevctl.errors import BevctlError
from bevctl.finding import CheckStatus, Finding, Severity
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, warned
from bevctl.preflight.compatibility import satisfies
from bevctl.preflight.environment import read_environment
from bevctl.preflight.gpu_selection import gpus_in_use
from bevctl.preflight.plan import is_foreign_run

if TYPE_CHECKING:
    from bevctl.engine.checkpoint import Checkpoint
    from bevctl.engine.checkpoint_report import CheckpointReport
    from bevctl.engine.load_report import LoadReport

AUTO = "auto"
_STATUS = {Severity.FAIL: CheckStatus.FAIL, Severity.WARN: CheckStatus.WARN, Severity.INFO: CheckStatus.PASS}
_REMOTE = ("http://", "https://", "torchvision://", "open-mmlab://", "mmcls://", "jhu://", "s3://", "openmmlab://")

Judge = Callable[[Context, "CheckpointReport"], Outcome]


class NothingToResume(Exception):
    """The run starts afresh; the text says why."""


def resumed_report(context: Context) -> CheckpointReport:
    """What the file that the run continues from is worth. Raises NothingToResume."""
    return context.once(_resumed)[0]


def _resumed(context: Context) -> tuple[CheckpointReport, list[CheckpointReport]]:
    """The report of the file that is resumed, and of those that `auto` passes over because they cannot be read."""
    paths = _resumed_paths(context)  # before torch is imported, which is for nothing where there is no file
    from bevctl.engine.checkpoint_report import inspect_checkpoint

    reports: list[CheckpointReport] = []
    for path in paths:
        reports.append(inspect_checkpoint(path))
        if reports[-1].checkpoint is not None:
            return reports[-1], reports[:-1]
    return reports[0], []


def _resumed_paths(context: Context) -> list[Path]:
    """The file that --resume, or resume_from of an mmcv config, means; for `auto` those of work_dir, best first."""
    name = context.resume
    if name is None:
        given = context.foreign.get("resume_from") if context.foreign is not None else None
        if not isinstance(given, str) or not given:
            raise NothingToResume("nothing is resumed")
        return [Path(given)]
    if name != AUTO:
        inside = context.work_dir / name
        return [inside if not os.path.lexists(name) and os.path.lexists(inside) else Path(name)]
    from bevctl.engine.checkpoint import newest_checkpoints

    found = newest_checkpoints(context.work_dir) if context.work_dir.is_dir() else []
    if not found:
        raise NothingToResume(f"--resume auto: no checkpoint in {display(context.work_dir)}, the run starts afresh")
    return found


def _of_resumed(judge: Judge) -> Callable[[Context], Outcome]:
    """A check of the file that is resumed; skipped where there is none, or it could not be opened at all."""

    @functools.wraps(judge)
    def check(context: Context) -> Outcome:
        try:
            report = context.once(resumed_report)
        except NothingToResume as error:
            return skipped(str(error))
        if report.checkpoint is None and judge is not complete and judge is not plain_data:
            return skipped(f"{display(report.path)} cannot be opened, see FILE003 and FILE004")
        return judge(context, report)

    return check


def _from_findings(findings: list[Finding], otherwise: str) -> Outcome:
    if not findings:
        return passed(otherwise)
    worst = max(findings, key=lambda finding: finding.severity.rank)
    evidence = "; ".join(f"{e.where}: {e.what}" for e in worst.evidence[:4])
    found = f"{worst.title} {evidence}" if len(worst.evidence) > 1 else worst.title
    return Outcome(_STATUS[worst.severity], found, worst.fix or "")


def complete(context: Context, report: CheckpointReport) -> Outcome:
    """FILE003: the file is there, whole, and its checksums are right."""
    if report.of("FILE004") and report.checkpoint is None:
        return skipped("the file was not opened, see FILE004")
    whole = f"{display(report.path)}: {report.size_bytes / 1e6:,.1f} MB, checksums right"
    passed_over = context.once(_resumed)[1]
    if passed_over:
        said = " ".join(other.findings[0].title for other in passed_over)
        return warned(f"{whole}; passed over: {said}", "Delete what is broken, and find out what broke it.")
    return _from_findings(report.of("FILE003"), whole)


def plain_data(context: Context, report: CheckpointReport) -> Outcome:
    """FILE004: the file names no code, and the program that resumes it will agree to load it."""
    if report.checkpoint is None and not report.of("FILE004"):
        return skipped("the file is broken, see FILE003")
    findings = report.of("FILE004")
    if findings and report.checkpoint is not None and is_foreign_run(context):
        torch = context.once(read_environment).versions.get("torch")
        if satisfies(torch, ">=2.6"):
            return failed(f"{findings[0].title} This run has torch {torch}.", findings[0].fix or "")
    return _from_findings(findings, "plain data, loads under weights_only")


def finite(_: Context, report: CheckpointReport) -> Outcome:
    """FILE005: no NaN and no infinity in weights, BatchNorm statistics and optimizer state."""
    assert report.checkpoint is not None
    return _from_findings(report.of("FILE005"), f"{len(report.checkpoint.state_dict)} entries, all finite")


def fits_model(context: Context, report: CheckpointReport) -> Outcome:
    """FILE006: the entries are those of the config's model, in name and shape."""
    if not _is_our_model(context):
        return skipped("the model of another project is not built here")
    try:
        loaded = _load(context, report)
    except BevctlError as error:
        return failed(error.message, error.hint)
    return _fit_outcome(loaded)


def _is_our_model(context: Context) -> bool:
    """Whether the run's model is of this package."""
    return context.config is not None and context.config.model.mmdet3d is None


def _load(context: Context, report: CheckpointReport) -> LoadReport:
    from bevctl.engine.checkpoint import load_state
    from bevctl.models.build import build_model

    assert context.config is not None
    assert report.checkpoint is not None
    return load_state(build_model(context.config), report.checkpoint)


def _fit_outcome(loaded: LoadReport) -> Outcome:
    said = "; ".join(loaded.sentences())
    if loaded.mismatched:
        return failed(said, "Use the config that the checkpoint was made with: its sizes differ from this one's.")
    if loaded.missing or loaded.unexpected:
        fix = "If that is not wanted, use the config that the checkpoint was made with."
        return warned(f"{said}. Missing entries keep their initial values, unexpected ones are left out", fix)
    return passed(said)


def resumable(context: Context, report: CheckpointReport) -> Outcome:
    """FILE007: epoch, optimizer and loss scaler are in the file; what is not, is listed."""
    from bevctl.engine.checkpoint_report import lost_on_resume

    assert report.checkpoint is not None
    lost = lost_on_resume(report.checkpoint, half=_runs_in_fp16(context))
    if _is_our_model(context) and _optimizer_is_another(report.checkpoint):
        lost["optimizer state of these weights"] = "the file's does not match its entries, AdamW starts anew"
    where = f"{report.layout}, epoch {report.checkpoint.epoch}, iteration {report.checkpoint.iteration}"
    if not lost:
        return passed(f"{where}: everything is there")
    said = f"{where}; {'; '.join(f'no {what}: {then}' for what, then in lost.items())}"
    if list(lost) == ["data order and random state"]:
        return passed(said)
    return warned(said, "Take a checkpoint that has them, or expect the loss to rise for a while.")


def _runs_in_fp16(context: Context) -> bool:
    """Whether the run has a loss scale; `auto` is FP16 on GPUs of capability 7.x only."""
    dtype = context.config.precision.dtype if context.config is not None else context.precision
    if dtype != "auto":
        return dtype == "fp16"
    capabilities = [gpu.capability for gpu in context.once(gpus_in_use).used]
    return any(isinstance(capability, tuple) and capability[0] == 7 for capability in capabilities)


def _optimizer_is_another(checkpoint: Checkpoint) -> bool:
    """Whether the optimizer's state in a file of another project cannot be assigned to the file's own weights."""
    from bevctl.engine.resume import foreign_parameter_states

    optimizer = checkpoint.content.get("optimizer")
    has_state = isinstance(optimizer, Mapping) and bool(optimizer.get("state"))
    return has_state and checkpoint.origin != "bevctl" and not foreign_parameter_states(checkpoint)


def loss_scale_sound(_: Context, report: CheckpointReport) -> Outcome:
    """FILE008: the saved loss scale lets steps be taken."""
    if report.loss_scaler is None:
        return skipped("the file holds no loss scaler")
    return _from_findings(report.of("FILE008"), f"loss scale {report.loss_scaler['scale']}")


def start_weights(context: Context) -> Outcome:
    """FILE009: pretrained backbones and load_from exist, are whole, and fit."""
    sources = list(_sources(context))
    if not sources and _keeps_initial_statistics(context):
        return warned(
            "model.camera.norm_eval keeps the statistics of BatchNorms, but these are of no pretrained weights: "
            "the image backbone hardly normalises",
            "Give model.camera.pretrained or model.load_from, or set model.camera.norm_eval to false.",
        )
    if not sources:
        return skipped("the run starts from no pretrained weights")
    outcomes = [_judge_source(context, key, name) for key, name in sources]
    order = (CheckStatus.FAIL, CheckStatus.WARN, CheckStatus.PASS)
    worst = min(outcomes, key=lambda outcome: order.index(outcome.status))
    return Outcome(worst.status, "; ".join(outcome.found for outcome in outcomes), worst.fix)


def _keeps_initial_statistics(context: Context) -> bool:
    camera = None if context.config is None else context.config.model.camera
    return context.resume is None and camera is not None and camera.norm_eval


def _sources(context: Context) -> Iterator[tuple[str, str]]:
    """(key, file name) of what the config starts from."""
    if context.config is not None:
        camera = context.config.model.camera
        if camera is not None and camera.pretrained:
            yield "model.camera.pretrained", camera.pretrained
        for name in context.config.model.load_from if context.resume is None else ():
            inside = context.work_dir / name
            yield "model.load_from", str(inside) if not os.path.lexists(name) and os.path.lexists(inside) else name
        return
    foreign = context.foreign
    for key, (name, _) in foreign_facts.checkpoints(foreign).items() if foreign is not None else ():
        if key != "resume_from":
            yield key, name if name.startswith(_REMOTE) else str(context.base / name)


def _judge_source(context: Context, key: str, name: str) -> Outcome:
    from bevctl.engine.checkpoint_report import inspect_checkpoint

    if name.startswith(_REMOTE):
        fix = "Download it before and give the path: a machine without network does not start."
        return warned(f"{key}: {name} is downloaded at the start", fix)
    report = inspect_checkpoint(Path(name))
    if report.is_broken:
        return failed(f"{key}: {report.findings[0].title}", report.findings[0].fix or "")
    assert report.checkpoint is not None
    if context.config is None:
        return passed(f"{key}: {name}, {len(report.checkpoint.state_dict)} entries")
    try:
        loaded = _load(context, report)
    except BevctlError as error:
        return failed(f"{key}: {error.message}", error.hint)
    if loaded.mismatched:
        return warned(f"{key}: {'; '.join(loaded.sentences())}", "Entries of another shape are not loaded.")
    return passed(f"{key}: {name}, {len(loaded.loaded)} entries fit ({loaded.layout} layout)")


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec(
        "FILE003",
        "checkpoint complete",
        _of_resumed(complete),
        required="a whole file with right checksums",
        why="a truncated copy ends the run when it is resumed, or later with garbage in its weights",
        at_start=False,  # the trainer reads and judges the file itself
    ),
    CheckSpec(
        "FILE004",
        "checkpoint holds data only",
        _of_resumed(plain_data),
        required="tensors and plain values",
        why="a pickle can run code when it is loaded, and torch 2.6 and newer refuse objects of other projects",
        at_start=False,
    ),
    CheckSpec(
        "FILE005",
        "checkpoint finite",
        _of_resumed(finite),
        required="no NaN, no infinity",
        why="one non-finite weight, statistic or average makes every loss NaN from the first step",
        at_start=False,
    ),
    CheckSpec(
        "FILE006",
        "checkpoint fits the model",
        _of_resumed(fits_model),
        why="entries that do not fit are left out silently by most programs, and that part starts from random values",
        at_start=False,
    ),
    CheckSpec(
        "FILE007",
        "checkpoint can be continued",
        _of_resumed(resumable),
        required="epoch, optimizer state, loss scale",
        why="what is missing starts anew, which shows as a jump in the loss",
        at_start=False,
    ),
    CheckSpec(
        "FILE008",
        "saved loss scale",
        _of_resumed(loss_scale_sound),
        required="finite, 128 or more",
        why="with a scale near zero gradients vanish, with a non-finite one no step is ever taken",
        at_start=False,
    ),
    CheckSpec(
        "FILE009",
        "pretrained weights",
        start_weights,
        required="whole files that fit",
        why="a missing backbone ends the start, one that does not fit costs accuracy and says nothing",
    ),
)
