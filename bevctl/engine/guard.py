"""When to give up on non-finite numbers: single ones are skipped, an endless row of them ends the run."""

from __future__ import annotations

import math

from bevctl.engine.recorder import StepOutcome
from bevctl.errors import BevctlError, ExitCode

NONFINITE_LIMIT = 50
"""Skipped steps in a row that end a run; the loss scale has fallen by 2^50 then, or was never the cause."""
_SMALLEST_SCALE = 1.0


class NonfiniteGuard:
    """Counts skipped steps in a row."""

    def __init__(self, dynamic: bool) -> None:
        self._dynamic = dynamic
        self._row = 0

    def check(self, outcome: StepOutcome) -> None:
        """Takes the next step of the run.

        Raises:
            BevctlError: too many skipped steps in a row, or a dynamic loss scale below 1 (exit code 5).
        """
        self._row = self._row + 1 if outcome.skipped else 0
        scale = outcome.record.loss_scale or 0.0
        if not self._row or not (self._row >= NONFINITE_LIMIT or (self._dynamic and scale < _SMALLEST_SCALE)):
            return
        raise BevctlError(
            f"Gradients were not finite in {self._row} steps in a row, up to iteration {outcome.record.iter} "
            f"(loss scale {scale:.10g}): {nonfinite_terms(outcome)}; samples {', '.join(outcome.tokens) or 'unknown'}. "
            "The weights are clean: every one of these steps was skipped.",
            "Continue from the last checkpoint in FP32 (--fp32 --resume auto), or with a lower --lr.",
            ExitCode.NONFINITE,
        )


def nonfinite_terms(outcome: StepOutcome) -> str:
    """Which losses of a skipped step are not finite, as a phrase."""
    names = [name for name, value in outcome.record.losses.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(names)}" if names else "the losses are finite, the gradients are not"
