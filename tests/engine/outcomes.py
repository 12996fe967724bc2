"""Outcomes of steps made by hand, and a loss scaler that is only its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.engine.recorder import StepFacts, StepOutcome
from bevctl.engine.resume import RandomCapture
from bevctl.runs.records import StepRecord


def outcome(
    iteration: int = 1,
    *,
    skipped: bool = False,
    scale: float = 1.0,
    losses: dict[str, float] | None = None,
    grad_norms: dict[str, float] | None = None,
) -> StepOutcome:
    """A step with finite losses unless they are given; gradients are not finite where it is skipped."""
    losses = {"loss/object/loss_heatmap": 1.0} if losses is None else losses
    total = sum(value for name, value in losses.items() if name.startswith("loss/"))
    norm = math.inf if skipped else 1.0
    record = StepRecord(
        epoch=1, iter=iteration, lr=1e-3, loss=total, losses=losses, grad_norm=norm, loss_scale=scale, skipped_steps=0
    )
    facts = StepFacts(
        epoch=1, iteration=iteration, inner=iteration - 1, lr=1e-3, data_time_s=0.0, random=RandomCapture.now()
    )
    norms = {"encoders.camera": norm} if grad_norms is None else grad_norms
    return StepOutcome(record, facts, skipped, norms, 0, dict(losses), stop=False, bad_samples=0)


@dataclass
class ScriptedScaler:
    """A dynamic loss scale over steps whose largest scale that fits is given."""

    scale: float = 65536.0
    growth_interval: int = 2000

    def run(self, limits: Iterator[float]) -> Iterator[StepOutcome]:
        good = 0
        for iteration, limit in enumerate(limits, start=1):
            skipped = self.scale > limit
            yield outcome(iteration, skipped=skipped, scale=self.scale)
            good = 0 if skipped else good + 1
            if skipped:
                self.scale /= 2
            elif good == self.growth_interval:
                self.scale, good = self.scale * 2, 0
