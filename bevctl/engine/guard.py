"""What follows a step that was not finite: nothing more than skipping it, a remedy, or the end of the run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bevctl.config.schema import TrainConfig
from bevctl.engine.nonfinite import SMALLEST_SCALE, Nonfinite
from bevctl.engine.recorder import StepOutcome
from bevctl.errors import BevctlError, ExitCode

SKIP, LOWER_SCALE, REWIND, FP32_MODULE, HALT = "skip", "lower_scale", "rewind", "fp32_module", "halt"


@dataclass(frozen=True)
class Policy:
    """`train.on_nonfinite` and its budgets; the step itself is always skipped."""

    on_nonfinite: str = SKIP
    in_a_row: int = 50
    """Skipped steps in a row that use the budget up."""
    per_thousand: int = 200
    """Skipped steps among the last 1000 that do not, those left out that loss scaling explains."""
    rewinds: int = 3
    """Rewinds before the run ends."""

    @staticmethod
    def of(train: TrainConfig) -> Policy:
        return Policy(train.on_nonfinite, train.nonfinite_in_a_row, train.nonfinite_per_thousand, train.rewinds)


class NonfiniteGuard:
    """Counts skipped steps, and decides.

    Args:
        dynamic: the loss scale moves, so that it ends the run when it falls below 1.
    """

    def __init__(self, policy: Policy, dynamic: bool) -> None:
        self.rewinds = 0
        """Done so far."""
        self.onset = 0
        """First iteration of the last row of steps that were not finite."""
        self._policy = policy
        self._dynamic = dynamic
        self._row = 0
        self._recent: deque[bool] = deque(maxlen=1000)

    def decide(self, outcome: StepOutcome, found: Nonfinite | None) -> str:
        """What to do about the next step of the run: SKIP, LOWER_SCALE, FP32_MODULE or REWIND.

        Raises:
            BevctlError: the budget is used up, or the policy is to halt (exit code 5).
        """
        self._row = 0 if found is None else self._row + 1
        self._recent.append(found is not None and not found.benign)
        if found is None:
            return SKIP
        self.onset = outcome.record.iter - self._row + 1
        spent = self._spent(outcome)
        if spent:
            return self._after_budget(spent, outcome, found)
        if found.benign:
            return SKIP
        if self._policy.on_nonfinite == HALT:
            raise _stopped("A step was not finite", outcome, found, "train.on_nonfinite is halt.")
        return self._policy.on_nonfinite if self._policy.on_nonfinite in (LOWER_SCALE, FP32_MODULE) else SKIP

    def _spent(self, outcome: StepOutcome) -> str:
        """How the budget was used up, as a sentence; empty while it is not."""
        scale = outcome.record.loss_scale or 0.0
        if self._row >= self._policy.in_a_row or (self._dynamic and scale < SMALLEST_SCALE):
            return f"Gradients were not finite in {self._row} steps in a row"
        if sum(self._recent) > self._policy.per_thousand:
            return f"{sum(self._recent)} of the last {len(self._recent)} steps were not finite"
        return ""

    def _after_budget(self, spent: str, outcome: StepOutcome, found: Nonfinite) -> str:
        if self._policy.on_nonfinite != REWIND:
            raise _stopped(spent, outcome, found)
        if self.rewinds >= self._policy.rewinds:
            raise _stopped(spent, outcome, found, f"It was rewound {self.rewinds} times before.")
        self.rewinds += 1
        self._row = 0
        self._recent.clear()
        return REWIND


def _stopped(what: str, outcome: StepOutcome, found: Nonfinite, why: str = "") -> BevctlError:
    scale = outcome.record.loss_scale or 0.0
    sentences = [
        f"{what}, up to iteration {outcome.record.iter} (loss scale {scale:.10g}): {found.where}; "
        f"samples {', '.join(outcome.facts.tokens) or 'unknown'}.",
        "The weights are clean: every one of these steps was skipped.",
        why,
    ]
    return BevctlError(
        " ".join(filter(None, sentences)),
        "Find the cause with `bevctl diagnose nan --replay`, or continue from the last checkpoint in FP32 "
        "(--fp32 --resume auto) or with a lower --lr.",
        ExitCode.NONFINITE,
    )


class FutilityWatch:
    """Notices a run that trains next to nothing: its loss is exactly 0, or most of its steps are skipped."""

    NOTED_AFTER = 50
    """Steps with a loss of 0 before it is said."""

    def __init__(self) -> None:
        self.steps = self.skipped = self.failed = 0
        self._zero = 0

    def observe(self, outcome: StepOutcome, found: Nonfinite | None) -> str:
        """Takes the next step; returns the sentence to say now, else nothing."""
        self.steps += 1
        self.skipped += outcome.skipped
        self.failed += found is not None and not found.benign
        self._zero += outcome.record.loss == 0.0
        return f"The loss is {self._zero_sentence()}" if self._zero == self.steps == self.NOTED_AFTER else ""

    def conclusion(self) -> str:
        """What a run that trained next to nothing has to say at its end; empty for any other.

        Raises:
            BevctlError: most of its steps were skipped, and not for the search of a loss scale (exit code 5).
        """
        if 2 * self.failed > self.steps:
            raise BevctlError(
                f"{self.skipped} of {self.steps} steps were skipped as not finite.",
                "Find the cause with `bevctl diagnose nan`.",
                ExitCode.NONFINITE,
            )
        if self.steps and self.skipped == self.steps:
            return f"all {self.steps} steps were skipped: the loss scale was still being searched"
        return f"the loss was {self._zero_sentence()}" if self.steps and self._zero == self.steps else ""

    def _zero_sentence(self) -> str:
        return (
            f"exactly 0 in all {self.steps} steps, so nothing is learned: no annotation is seen, or all weights are 0"
        )
