"""What of a healthy run FP16 could not hold, or only just: measured on some steps, with the settings that help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bevctl.batch import AnyBatch
from bevctl.config.load import load
from bevctl.data.split import open_split
from bevctl.diagnose.bundle import Moment, config_of, moment_of, steps_after
from bevctl.diagnose.evidence import where_of
from bevctl.diagnose.headroom import headroom
from bevctl.diagnose.rehearsal import rehearse
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, status_of
from bevctl.engine.checkpoint import newest_checkpoints, read_checkpoint
from bevctl.engine.dist import World, select_device
from bevctl.errors import BevctlError
from bevctl.finding import Evidence, Severity
from bevctl.numerics.forecast import MARGIN, Forecast, Risk, forecast
from bevctl.numerics.place import Place

CLOSE, SCALE, ALREADY = "NAN211", "NAN212", "NAN213"
STEPS = 4
"""Training steps that are watched."""
_EVIDENCE = 8


def diagnose_forecast(request: DiagnoseRequest) -> Diagnosis:
    """Runs some steps from the run's newest checkpoint under instruments; nothing of the run is changed.

    Raises:
        BevctlError: there is no checkpoint of bevctl's, or the training data are not here.
    """
    moment = _moment(request)
    steps = list(itertools.islice(steps_after(moment, open_split(moment.config, "train")), STEPS))
    assert moment.checkpoint is not None
    request.say(f"Watching {len(steps)} steps after {moment.checkpoint.path} on {moment.device}")
    seen = _watched(moment, steps, {})
    looked_at = [
        f"{moment.checkpoint.path}: {len(steps)} steps, judged for FP16 at a loss scale of {seen.loss_scale:g}; "
        f"every magnitude may grow by {MARGIN:g} before it counts as safe"
    ]
    findings = list(_findings(moment, steps, seen))
    watched = "float16" if moment.setting.precision == "fp16" else "bfloat16"
    table = headroom(seen.ranges, "Largest half-precision results (FP16's limit is 65504)", watched)
    scales = {"highest_loss_scale": seen.highest_scale, "lowest_loss_scale": seen.lowest_scale}
    return Diagnosis(status_of(findings) if steps else Status.INCONCLUSIVE, findings, looked_at, [table], scales)


def _moment(request: DiagnoseRequest) -> Moment:
    """The newest checkpoint of the run, or the one that is given."""
    path = request.checkpoint or _newest(request.run)
    checkpoint = read_checkpoint(path)
    if checkpoint.origin != "bevctl":
        raise BevctlError(f"{path} was not written by bevctl.", "A forecast needs a run that can be continued.")
    config = load(request.config).config if request.config is not None else config_of(checkpoint)
    ranks = int(checkpoint.meta.get("setting", {}).get("world", 1))
    return moment_of(config, checkpoint, World(0, ranks), select_device(request.device))


def _newest(run: Path | None) -> Path:
    found = newest_checkpoints(run) if run is not None and run.is_dir() else []
    if not found:
        raise BevctlError(f"No checkpoint is in {run}.", "Name the folder of a bevctl run, or give --checkpoint.")
    return found[0]


def _watched(moment: Moment, steps: Sequence[Sequence[AnyBatch]], changes: Mapping[str, Any]) -> Forecast:
    """The forecast for FP16 with config values changed.

    A run in another format is watched in BF16, where the same operations are in half precision and nothing overflows.
    """
    if moment.setting.precision != "fp16" and "precision.dtype" not in changes:
        changes = {**changes, "precision.dtype": "bf16"}
    rehearsal = rehearse(moment, changes)
    scaler, config = rehearsal.state.scaler, moment.config.precision
    fixed = None if config.loss_scale == "dynamic" else float(config.loss_scale)
    measured = float(scaler.value)
    planned = measured if rehearsal.precision.is_half else float(fixed or config.init_scale)

    def gradients(batches: Sequence[AnyBatch]) -> None:
        rehearsal.step.gradients(batches)
        rehearsal.step.discard()

    return forecast(rehearsal.state.model, steps, gradients, planned, measured)


def _findings(moment: Moment, steps: Sequence[Sequence[AnyBatch]], seen: Forecast) -> Iterator[DiagnoseFinding]:
    if seen.culprit is not None:
        record = seen.culprit.record
        yield DiagnoseFinding(
            ALREADY,
            Severity.FAIL,
            0.95,
            f"The run is not healthy: {record.op} in {record.module or 'the model itself'} is not finite already",
            (Evidence(where_of(record.place), seen.culprit.verdict.what),),
            "A forecast is for a run that is finite; this one is not.",
            (Remedy({}, "find the cause: bevctl diagnose nan --replay"),),
        )
        return
    forward = [risk for risk in seen.risks if risk.phase == "forward"]
    backward = [risk for risk in seen.risks if risk.phase == "backward"]
    settings = _settings(moment, seen)
    if forward:
        yield _close(forward, _proven(moment, steps, settings, "precision.fp32_modules"))
    if backward:
        fixed = moment.config.precision.loss_scale != "dynamic"
        key = "precision.loss_scale" if fixed else "precision.init_scale"
        yield _scale(backward, seen, fixed, _proven(moment, steps, settings, key))


def _close(risks: Sequence[Risk], fix: tuple[Remedy, ...]) -> DiagnoseFinding:
    least = min(risk.headroom for risk in risks)
    name = risks[0].module or "The model itself"
    return DiagnoseFinding(
        CLOSE,
        Severity.FAIL if least < 1 else Severity.WARN,
        0.9 if least < 1 else 0.7,
        f"{name} does not fit FP16" if least < 1 else f"{name} comes within a factor of {least:.3g} of FP16's limit",
        tuple(_in_words(risk) for risk in risks[:_EVIDENCE]),
        "Numbers of other samples and of later epochs are larger than those seen.",
        fix,
    )


def _scale(risks: Sequence[Risk], seen: Forecast, fixed: bool, fix: tuple[Remedy, ...]) -> DiagnoseFinding:
    """A fixed loss scale may lie outside of what the gradients allow; a dynamic one finds its way."""
    beyond = any(risk.headroom < 1 for risk in risks)
    severity = Severity.INFO if not fixed else Severity.FAIL if beyond else Severity.WARN
    kind = "fixed" if fixed else "dynamic"
    return DiagnoseFinding(
        SCALE,
        severity,
        0.8,
        f"Gradients allow a loss scale of {seen.lowest_scale:g} to {seen.highest_scale:g}; "
        f"the {kind} one is {seen.loss_scale:g}",
        tuple(_in_words(risk) for risk in risks[:_EVIDENCE]),
        f"Above, they come within a factor of {MARGIN:g} of FP16's limit; below, more than 1 % of them round to zero."
        + ("" if fixed else " A dynamic scale goes there by itself, with some skipped steps."),
        fix,
    )


def _in_words(risk: Risk) -> Evidence:
    file, _, line = risk.place.rpartition(":")
    where = where_of(Place(risk.module, file, int(line) if line.isdigit() else 0))
    if risk.kind == "underflow":
        return Evidence(where, f"{risk.phase}: {risk.lost:.0%} of the non-zero numbers round to zero")
    room = f"{risk.headroom:.3g} times below the limit" if risk.headroom >= 1 else "beyond the limit"
    scaled = ", the loss scale included" if risk.phase == "backward" else ""
    return Evidence(where, f"{risk.phase} {risk.op}: up to {risk.largest:.5g}{scaled}, {room}")


def _settings(moment: Moment, seen: Forecast) -> dict[str, Any]:
    """What keeps the model inside FP16, by config key."""
    precision = moment.config.precision
    settings = seen.patch(dynamic=precision.loss_scale == "dynamic")
    if "precision.fp32_modules" in settings:
        settings["precision.fp32_modules"] = [*precision.fp32_modules, *seen.fp32_modules]
    return settings


def _proven(
    moment: Moment, steps: Sequence[Sequence[AnyBatch]], settings: Mapping[str, Any], key: str
) -> tuple[Remedy, ...]:
    """The setting of a key, and whether the same steps in FP16 with it (and the others) are safe."""
    if key not in settings:
        return ()
    after = _watched(moment, steps, {"precision.dtype": "fp16", **settings})
    phase = "forward" if key == "precision.fp32_modules" else "backward"
    safe = after.culprit is None and not any((risk.phase, risk.kind) == (phase, "overflow") for risk in after.risks)
    return (Remedy({key: settings[key]}, f"in FP16 with it, all stays {MARGIN:g} times below the limit", safe),)
