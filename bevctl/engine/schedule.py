"""Learning rate and momentum as pure functions of the iteration, and the rules that derive the peak from the batch.

An iteration is an attempted optimizer step: a step that the loss scaler skips still counts, as in mmcv, so that no
host has to ask the device whether it happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.config.schema import Config, OptimConfig
from bevctl.errors import BevctlError

_MOMENTUM_DIP = 0.85 / 0.95
"""Lowest beta1 of the cyclic schedule over its own start."""
_ROUNDING = 1e-9
"""Share of a run that is nothing."""


@dataclass(frozen=True)
class Schedule:
    """What the optimizer's settings are multiplied with before iteration 0 .. total - 1."""

    optim: OptimConfig
    total: int
    """Iterations of the whole run."""

    def lr_factor(self, iteration: int) -> float:
        """Learning rate over its peak (cyclic: over `optim.lr`) for the step after `iteration` attempted ones."""
        return self._shape(iteration) * self._warmup(iteration)

    def beta1_factor(self, iteration: int) -> float:
        """AdamW's first beta over its configured value."""
        if not self.optim.cyclic_momentum:
            return 1.0
        return _cycle(iteration / max(self.total, 1), self.optim.cyclic_up, _MOMENTUM_DIP, 1.0)

    def _shape(self, iteration: int) -> float:
        progress = iteration / max(self.total, 1)
        if self.optim.schedule == "cosine":
            steps = self.optim.cosine_steps
            # Whole numbers: a step must not begin one iteration late for rounding.
            reached = progress if steps is None else iteration * steps // max(self.total, 1) / steps
            return _anneal(1.0, self.optim.min_ratio, reached)
        if self.optim.schedule == "cyclic":
            return _cycle(progress, self.optim.cyclic_up, self.optim.cyclic_peak, self.optim.cyclic_end)
        if self.optim.schedule == "steps":
            # A step must not begin one iteration late for rounding.
            reached = sum(progress >= share - _ROUNDING for share in self.optim.steps)
            return float(self.optim.step_factor**reached)
        return 1.0

    def _warmup(self, iteration: int) -> float:
        if iteration >= self.optim.warmup:
            return 1.0
        return self.optim.warmup_ratio + (1.0 - self.optim.warmup_ratio) * iteration / self.optim.warmup


def _anneal(start: float, end: float, progress: float) -> float:
    """Half a cosine from `start` to `end`."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def _cycle(progress: float, up: float, peak: float, end: float) -> float:
    """From 1 to `peak` in the first `up` of the run, then to `end`, each way half a cosine."""
    if progress < up:
        return _anneal(1.0, peak, progress / up)
    return _anneal(peak, end, (progress - up) / (1.0 - up))


def peak_lr(optim: OptimConfig, global_batch: int) -> tuple[float, str]:
    """The learning rate for `global_batch` samples a step, and the sentence that explains it.

    Raises:
        BevctlError: a scaling rule is on, but the config does not say what it scales from.
    """
    if optim.lr_scaling == "none":
        return optim.lr, f"learning rate {optim.lr:g} as configured (global batch {global_batch}, no scaling rule)"
    if optim.base_batch is None or optim.base_lr is None:
        raise BevctlError(
            f"optim.lr_scaling is {optim.lr_scaling}, but this config has no optim.base_batch and optim.base_lr.",
            "Set both (the learning rate base_lr belongs to base_batch samples a step), or use --lr.",
        )
    ratio = global_batch / optim.base_batch
    value = optim.base_lr * (ratio if optim.lr_scaling == "linear" else math.sqrt(ratio))
    return value, (
        f"learning rate {value:g}: {optim.lr_scaling} rule from {optim.base_lr:g} at batch {optim.base_batch} "
        f"to global batch {global_batch}"
    )


def written_for_other_epochs(config: Config) -> Iterator[str]:
    """A sentence for each number of a recipe that counts epochs and does not fit those that the run has."""
    epochs, steps, paste = config.train.epochs, config.optim.cosine_steps, config.data.paste
    if config.train.schedule_iters is not None:
        return
    if config.optim.schedule == "cosine" and steps is not None and steps != epochs:
        yield (
            f"The learning rate falls in {steps} steps over {epochs} epochs "
            f"(optim.cosine_steps; {epochs} would be one an epoch)"
        )
    if paste is not None and paste.stop_epoch >= epochs:
        yield (
            f"Objects are pasted to the end: data.paste.stop_epoch is {paste.stop_epoch} of {epochs} epochs; "
            "the published recipe leaves the last quarter without"
        )
