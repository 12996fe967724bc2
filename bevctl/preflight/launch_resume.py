"""The check that a checkpoint and the config agree on where the run stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bevctl.preflight.checks import Context, Outcome, passed, skipped, unknown, warned
from bevctl.preflight.files_checkpoint import NothingToResume, resumed_report
from bevctl.preflight.plan import Plan, of_plan

if TYPE_CHECKING:
    from bevctl.config.schema import Config
    from bevctl.engine.checkpoint import Checkpoint

LR_JUMP = 2.0
"""Factor between the learning rates before and after a resume that shows in the loss."""


@of_plan
def check(context: Context, plan: Plan) -> Outcome:
    """LAUNCH006: epochs are left, and the learning rate goes on where it was."""
    try:
        checkpoint = context.once(resumed_report).checkpoint
    except NothingToResume as error:
        return skipped(str(error))
    if checkpoint is None:
        return skipped("the checkpoint cannot be opened, see FILE003 and FILE004")
    if checkpoint.epoch is None:
        return warned("the file names no epoch: training starts at epoch 1", "Take a checkpoint of a training run.")
    if plan.epochs is None:
        return unknown("the config's epochs could not be worked out", "Write the number out.")
    said = f"{checkpoint.epoch} of {plan.epochs} epochs done"
    counts_iterations = context.config is not None and context.config.train.schedule_iters is not None
    if checkpoint.epoch >= plan.epochs and not counts_iterations:
        return warned(f"{said}: nothing is left to train", "Raise --epochs, or resume an earlier checkpoint.")
    if context.config is None:
        return _goes_on_in_mmcv(checkpoint, plan, said)
    return _goes_on_here(context.config, checkpoint, plan, said)


def _goes_on_in_mmcv(checkpoint: Checkpoint, plan: Plan, said: str) -> Outcome:
    """mmcv computes the schedule from the `initial_lr` that the file's optimizer brings along."""
    initial = _largest(checkpoint, "initial_lr")
    if initial is not None and plan.lr is not None and not _alike(initial, plan.lr, 1.01):
        fix = "mmcv continues with the initial_lr of the file; its load_from starts with that of the config."
        return warned(f"{said}; the file's initial learning rate is {initial:g}, the config's {plan.lr:g}", fix)
    return passed(said)


def _goes_on_here(config: Config, checkpoint: Checkpoint, plan: Plan, said: str) -> Outcome:
    """Compares the last learning rate with that of the schedule at the same share of the run."""
    saved, coming = _largest(checkpoint, "lr"), _coming_lr(config, checkpoint, plan)
    if saved is None or coming is None:
        return passed(said)
    said = f"{said}; learning rate {saved:.3g} before, {coming:.3g} after"
    if _alike(saved, coming, LR_JUMP):
        return passed(said)
    fix = "Expected where batch, epochs or --lr changed on purpose; else resume with the config of the run."
    return warned(said, fix)


def _coming_lr(config: Config, checkpoint: Checkpoint, plan: Plan) -> float | None:
    """The learning rate of the next step, None where the file does not tell how long its epochs were."""
    from bevctl.engine.schedule import Schedule, peak_lr

    length = _epoch_length(checkpoint)
    if length is None or checkpoint.iteration is None or plan.epochs is None:
        return None
    total = config.train.schedule_iters or plan.epochs * length
    peak = peak_lr(config.optim, plan.global_batch)[0]
    return peak * Schedule(config.optim, total).lr_factor(checkpoint.iteration)


def _epoch_length(checkpoint: Checkpoint) -> int | None:
    """Iterations an epoch when the checkpoint was written."""
    setting = checkpoint.meta.get("setting")
    noted = setting.get("iters_per_epoch") if isinstance(setting, Mapping) else None
    if isinstance(noted, int) and noted > 0:
        return noted
    if checkpoint.epoch and checkpoint.iteration:
        return max(checkpoint.iteration // checkpoint.epoch, 1)
    return None


def _largest(checkpoint: Checkpoint, name: str) -> float | None:
    """The largest value that a parameter group of the file's optimizer has for `name`."""
    optimizer = checkpoint.content.get("optimizer")
    groups: Any = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    found = [g.get(name) for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else []
    return max((float(value) for value in found if isinstance(value, int | float)), default=None)


def _alike(a: float, b: float, factor: float) -> bool:
    return min(a, b) > 0 and max(a, b) / min(a, b) <= factor
