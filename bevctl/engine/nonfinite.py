"""What a step was that was not finite: the loss scale being searched, or a failure; and where it shows."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from bevctl.engine.recorder import StepOutcome
from bevctl.engine.resume import TrainState

CALIBRATION = "calibration"
"""A fresh dynamic scale comes down to where gradients fit."""
GROWTH_PROBE = "growth_probe"
"""The scale had grown since it last was too high, and was so again: once every growth interval is normal."""
OVERFLOW = "overflow"
"""Gradients overflow at a scale that had worked."""
RISING = "rising"
"""Such overflows come more and more often."""
COLLAPSE = "collapse"
"""The scale falls and falls, and gradients still are not finite."""
BACKWARD = "backward"
"""Gradients are not finite where no loss scale can be the cause."""
FORWARD = "forward"
"""A loss is not finite: no scale helps."""
BENIGN = frozenset((CALIBRATION, GROWTH_PROBE))
KINDS = (CALIBRATION, GROWTH_PROBE, OVERFLOW, RISING, COLLAPSE, BACKWARD, FORWARD)
"""By gravity."""

SETTLED = 100
"""Good steps in a row after which a fresh scale is found."""
COLLAPSED_ROW = 6
"""Overflows in a row that make a collapse: the scale fell by 2^6 and nothing was gained."""
SMALLEST_SCALE = 1.0
"""Below it small gradients vanish, as without scaling."""
_WINDOW = 200
"""Steps of each of the two windows that are compared."""
_RISING_LEAST, _RISING_FACTOR = 5, 2.0


@dataclass(frozen=True)
class Nonfinite:
    """A step that was not finite."""

    kind: str
    """One of `KINDS`."""
    losses: tuple[str, ...]
    """Losses that are not finite on some rank."""
    parts: tuple[str, ...]
    """Parts of the model whose gradient is not finite."""
    news: bool = True
    """Not a repetition: the first of its row of such steps, or graver than those before it in the row."""

    @property
    def benign(self) -> bool:
        """Whether loss scaling explains it."""
        return self.kind in BENIGN

    @property
    def phase(self) -> str:
        """forward when a loss shows it, backward when only gradients do."""
        return "forward" if self.losses else "backward"

    @property
    def task(self) -> str | None:
        """The one task that it belongs to: of the losses, else of the only head with such gradients."""
        names = self.losses or tuple(part for part in self.parts if part.startswith("heads."))
        separator = "/" if self.losses else "."
        tasks = {name.split(separator)[1] for name in names if separator in name}
        return tasks.pop() if len(tasks) == 1 else None

    @property
    def where(self) -> str:
        """Which losses, or which gradients, as a phrase."""
        if self.losses:
            return f"not finite: {', '.join(self.losses)}"
        only = f", of {', '.join(self.parts)}" if self.parts else ""
        return f"the losses are finite, the gradients are not{only}"


class Classifier:
    """Tells the kind of each step that was not finite, from the steps before it.

    Args:
        scaled: the run has a loss scale (FP16).
        dynamic: and it moves.
        backoff: its factor after an overflow.
        fresh: it starts at its initial value and was not restored.
    """

    def __init__(self, scaled: bool, dynamic: bool, backoff: float, fresh: bool) -> None:
        self._scaled = scaled
        self._dynamic = dynamic
        self._backoff = backoff
        self._found = not fresh
        self._held = math.inf
        """Scale after the last overflow: the highest that cannot be a probe."""
        self._good = self._bad = 0
        self._gravity = -1
        """Of the gravest step in the present row of steps that were not finite."""
        self._overflows: deque[bool] = deque(maxlen=2 * _WINDOW)

    @staticmethod
    def of(state: TrainState, fresh: bool) -> Classifier:
        return Classifier(state.half, state.scaler.dynamic, state.scaler.backoff_factor, fresh)

    def observe(self, outcome: StepOutcome) -> Nonfinite | None:
        """Takes the next step of the run; None when it was finite."""
        if self._held == math.inf:
            self._held = outcome.record.loss_scale or 1.0
        if not outcome.skipped:
            self._good, self._bad, self._gravity = self._good + 1, 0, -1
            self._found |= self._good >= SETTLED
            self._overflows.append(False)
            return None
        self._good, self._bad = 0, self._bad + 1
        losses = tuple(name for name, v in outcome.record.losses.items() if name.startswith("loss/") and not _finite(v))
        parts = tuple(name for name, norm in outcome.grad_norms.items() if not _finite(norm))
        kind = FORWARD if losses or not _finite(outcome.record.loss) else self._kind(outcome)
        self._overflows.append(kind not in BENIGN)
        self._held = (outcome.record.loss_scale or 1.0) * self._backoff
        before, self._gravity = self._gravity, max(self._gravity, KINDS.index(kind))
        return Nonfinite(kind, losses, parts, news=self._gravity > before)

    def _kind(self, outcome: StepOutcome) -> str:
        """The kind of a step whose losses are finite."""
        scale = outcome.record.loss_scale or 0.0
        if not self._scaled:
            return BACKWARD
        if self._dynamic and scale * self._backoff < SMALLEST_SCALE:
            return COLLAPSE
        if self._dynamic and not self._found:
            return CALIBRATION
        if self._dynamic and scale > self._held:
            return GROWTH_PROBE
        if self._dynamic and self._bad >= COLLAPSED_ROW:
            return COLLAPSE
        return RISING if self._is_rising() else OVERFLOW

    def _is_rising(self) -> bool:
        """Whether the last steps, with this one, had more overflows than those before."""
        marks = list(self._overflows)
        recent, before = marks[-_WINDOW + 1 :], marks[: -_WINDOW + 1]
        expected = sum(before) * len(recent) / len(before) if before else 0.0
        count = sum(recent) + 1
        return len(marks) >= _WINDOW and count >= _RISING_LEAST and count >= _RISING_FACTOR * expected


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
