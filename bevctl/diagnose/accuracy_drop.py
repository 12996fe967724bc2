"""Half precision that scores lower: by how much, in which task and class, since when, and which part is sensitive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bevctl.config.load import from_dict, load
from bevctl.config.schema import Config
from bevctl.console import Console
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, Table, status_of
from bevctl.diagnose.scores import Comparison, Scores, compare, parted_at, scores_of_document, scores_of_log
from bevctl.diagnose.sensitivity import Deviation, deviations
from bevctl.diagnose.setting import Setting, setting_of
from bevctl.engine.checkpoint import Checkpoint, newest_checkpoints, read_checkpoint
from bevctl.engine.dist import World, select_device
from bevctl.engine.precision import Precision, resolve_precision
from bevctl.errors import BevctlError
from bevctl.evaluate.job import evaluate_checkpoint
from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import History, history_of
from bevctl.runs.source import open_source

DROP, OTHERWISE, SENSITIVE = "ACC101", "ACC102", "ACC103"
NORMAL = 0.003
"""Half precision costs 0.1 to 0.3 points (hundredths of mAP, NDS or mIoU); two runs in one format differ as much."""
GRAVE = 0.01
NOTABLE = 0.02
"""Relative deviation of the held-out losses from FP32's that is worth a word."""
_WEIGHTS = (".pth", ".pt", ".ckpt")
_CLASSES = 5
_SETTINGS = {
    "samples a step": "global_batch",
    "learning rate": "lr",
    "warm-up": "warmup",
    "gradient clipping": "clip",
    "heads": "tasks",
}
"""What two runs should share → the field of `Setting`."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    path: Path
    scores: dict[int, Scores]
    """By epoch; of a checkpoint alone under 0."""
    setting: Setting = field(default_factory=Setting)
    history: History | None = None
    """None of a checkpoint alone."""

    def sentence(self) -> str:
        precision = f" ({self.setting.precision.upper()})" if self.setting.precision else ""
        epochs = ", ".join(map(str, self.scores)) or "none"
        return f"{self.path}{precision}: " + (
            "evaluated here" if self.history is None else f"evaluated epochs: {epochs}"
        )


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Compares a run (or checkpoint) in half precision with the one in FP32 that `--against` names.

    Without one, only the parts of its newest checkpoint are looked at.

    Raises:
        BevctlError: one of them is not named or cannot be read.
    """
    path = request.checkpoint if request.run is None else request.run
    if path is None:
        raise BevctlError("Nothing to look at.", "Name the run in half precision, and with --against the one in FP32.")
    sides = [_side(p, request) for p in (request.against, path)] if request.against is not None else []
    if sides and sides[0].setting.half and sides[1].setting.precision == "fp32":
        sides.reverse()  # given the other way round
    comparison = compare(sides[0].scores, sides[1].scores, NORMAL) if sides else None
    parts, told = _sensitivity(request, path)
    looked_at = [*(side.sentence() for side in sides), told]
    if comparison is None:
        missing = "No epoch was evaluated by both with a score above zero" if sides else "There is no run --against it"
        looked_at.append(f"{missing}: whether accuracy was lost in training is not known.")
    findings = [*(_of_scores(comparison, *sides) if comparison is not None else ()), *_of_parts(parts, comparison)]
    decided = comparison is not None or bool(parts and not sides)
    status = status_of(findings) if decided else Status.INCONCLUSIVE
    return Diagnosis(status, findings, looked_at, [*_score_table(comparison), *_part_table(parts)])


def _side(path: Path | None, request: DiagnoseRequest) -> Side:
    assert path is not None
    if path.suffix not in _WEIGHTS:
        log = open_source(path).read()
        return Side(path, scores_of_log(log), setting_of(log, None), history_of(log.steps, log.interval))
    config = dataclasses.replace(_config_of(read_checkpoint(path), request), device=request.device)
    request.say(f"Evaluating {path}")
    evaluation = evaluate_checkpoint(config, path, World(), Console(quiet=True)).evaluation
    return Side(path, {0: scores_of_document(evaluation.document())})


def _config_of(checkpoint: Checkpoint, request: DiagnoseRequest) -> Config:
    if request.config is not None:
        return load(request.config).config
    config = checkpoint.meta.get("config")
    if checkpoint.origin == "bevctl" and isinstance(config, dict):
        return from_dict(config)
    raise BevctlError(f"{checkpoint.path} does not say which model it is of.", "Give the model's --config.")


def _of_scores(comparison: Comparison, base: Side, other: Side) -> Iterator[DiagnoseFinding]:
    worst = comparison.main[0]
    drop = comparison.drop(worst)
    evidence = tuple(_points(comparison, name) for name in comparison.main)
    if drop <= NORMAL:
        title = f"{worst} is {100 * drop:.2f} points lower, which is normal" if drop > 0 else "No main score is lower"
        cause = "0.1 to 0.3 points are what half precision costs, and what two runs in one format differ by anyway."
        yield DiagnoseFinding(DROP, Severity.INFO, 0.9, title, evidence, cause)
        return
    differing = tuple(_differences(base.setting, other.setting))
    yield DiagnoseFinding(
        DROP,
        Severity.FAIL if drop > GRAVE else Severity.WARN,
        0.4 if differing else 0.6,
        f"{worst} is {100 * drop:.2f} points lower than without half precision",
        (*evidence, *_where_lost(comparison), *_when_lost(comparison, base, other)),
        "That is more than half precision alone costs (0.1 to 0.3 points): a part of the model is sensitive to it, or "
        "the runs differ in something else.",
    )
    if differing:
        yield DiagnoseFinding(
            OTHERWISE,
            Severity.WARN,
            0.7,
            "The runs differ in more than the number format",
            differing,
            "The drop may come from that as well.",
            (Remedy({}, "compare with a run that differs in precision.dtype alone"),),
        )


def _points(comparison: Comparison, name: str) -> Evidence:
    base, other = comparison.base[name], comparison.other[name]
    return Evidence(name, f"{base:.4f} against {other:.4f}: {100 * (other - base):+.2f} points")


def _where_lost(comparison: Comparison) -> Iterator[Evidence]:
    """The classes that lose most, and the task if only one of two loses."""
    for name in comparison.classes[:_CLASSES]:
        if comparison.drop(name) > NORMAL:
            yield _points(comparison, name)
    drops = {name: comparison.drop(name) for name in ("mAP", "mIoU") if name in comparison.main}
    if len(drops) == 2 and min(drops.values()) <= NORMAL < max(drops.values()):
        yield Evidence("task", f"only the {'map' if drops['mIoU'] > drops['mAP'] else 'object'} head loses")


def _when_lost(comparison: Comparison, base: Side, other: Side) -> Iterator[Evidence]:
    if comparison.since is not None and comparison.epoch:
        yield Evidence("scores", f"lower since the evaluation of epoch {comparison.since}")
    if base.history is not None and other.history is not None:
        iteration = parted_at(base.history, other.history)
        if iteration is not None:
            yield Evidence("training loss", f"apart by more than 5 % from iteration {iteration:.0f} on")


def _differences(base: Setting, other: Setting) -> Iterator[Evidence]:
    for label, name in _SETTINGS.items():
        first, second = getattr(base, name), getattr(other, name)
        if first != second and first not in (None, ()) and second not in (None, ()):
            yield Evidence(label, f"{first} against {second}")


def _sensitivity(request: DiagnoseRequest, path: Path) -> tuple[list[Deviation], str]:
    """The parts of the newest checkpoint in FP32 one at a time, and what to say of it."""
    newest = newest_checkpoints(path)[:1] if path.is_dir() else []
    paths = [p for p in (request.checkpoint, path if path.suffix in _WEIGHTS else None, *newest) if p is not None]
    if not paths:
        return [], "No checkpoint is here: which part is sensitive cannot be tried."
    try:
        checkpoint = read_checkpoint(paths[0])
        config, device = _config_of(checkpoint, request), select_device(request.device)
        half = _half_of(checkpoint, device)
        request.say(f"Running parts of {paths[0]} in FP32, one at a time, on held-out samples")
        found = deviations(config, checkpoint, half, device, request.say)
    except BevctlError as error:
        return [], f"Which part is sensitive could not be tried: {error.message}"
    return found, f"{paths[0]}: held-out losses in {half.name.upper()} against FP32 on {device}"


def _half_of(checkpoint: Checkpoint, device: torch.device) -> Precision:
    """The run's half precision; FP16 for a run without one."""
    saved = checkpoint.meta.get("setting", {}).get("precision")
    return resolve_precision(saved if saved in ("fp16", "bf16") else "fp16", device)


def _of_parts(parts: Sequence[Deviation], comparison: Comparison | None) -> Iterator[DiagnoseFinding]:
    if len(parts) < 2:
        return
    whole, best = parts[0], parts[1]
    share = _share_taken(whole.relative, best.relative)
    dropped = comparison is not None and comparison.drop(comparison.main[0]) > NORMAL
    sensitive = share >= 0.5 and (dropped or whole.relative > NOTABLE)
    evidence = [Evidence("all in half precision", f"held-out losses deviate by {whole.relative:.2e} from FP32's")]
    evidence += [Evidence(f"{part.part} in FP32", f"{part.relative:.2e}") for part in parts[1:4]]
    why = f"{best.part} in FP32 takes {share:.0%} of the deviation away; training with it was not tried"
    yield DiagnoseFinding(
        SENSITIVE,
        Severity.WARN if sensitive else Severity.INFO,
        0.5 if sensitive else 0.7,
        f"{best.part} is the part most sensitive to half precision" if share >= 0.5 else "No single part is sensitive",
        tuple(evidence),
        "The trained weights are the same: what differs is the rounding alone.",
        (Remedy({"precision.fp32_modules": [best.part]}, why),) if share >= 0.5 else (),
    )


def _share_taken(whole: float, rest: float) -> float:
    """Which share of a deviation is gone."""
    if math.isinf(whole):
        return 0.0 if math.isinf(rest) else 1.0
    return 1 - rest / whole if whole else 0.0


def _score_table(comparison: Comparison | None) -> list[Table]:
    if comparison is None:
        return []
    names = [*comparison.main, *comparison.classes]
    rows = [
        (n, comparison.base[n], comparison.other[n], 100 * (comparison.other[n] - comparison.base[n])) for n in names
    ]
    return [Table("scores", "Scores, the largest loss first", ("score", "against", "run", "points"), rows)]


def _part_table(parts: Sequence[Deviation]) -> list[Table]:
    rows = [(part.part or "none", part.relative) for part in parts]
    title = "Held-out losses"
    return [Table("parts", title, ("part in FP32", "deviation from FP32"), rows)] if parts else []
