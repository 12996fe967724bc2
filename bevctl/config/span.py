"""Expected ranges, as `expect:` and `--expect` write them: low:high, or low:high@first:last for some iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass

SETTLING_ITERS = 50
"""Iterations at the start of a run in which memory and loss scale settle; no range applies to them by itself."""


@dataclass(frozen=True)
class Span:
    """A range of values and the iterations it applies to, all ends inclusive."""

    low: float
    high: float
    first: float = SETTLING_ITERS + 1
    last: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


def parse_span(text: str) -> Span:
    """The span of `low:high` or `low:high@first:last`; an empty side is open.

    Raises ValueError with what such a text must be.
    """
    values, at, phase = text.partition("@")
    low, high = _ends(values)
    if not at:
        return Span(low, high)
    first, last = _ends(phase)
    return Span(low, high, max(first, 1), last)


def _ends(text: str) -> tuple[float, float]:
    low, separator, high = (part.strip() for part in text.partition(":"))
    try:
        ends = float(low or "-inf"), float(high or "inf")
    except ValueError:
        ends = math.nan, math.nan
    if not separator or not (low or high) or not ends[0] <= ends[1]:
        raise ValueError("low:high")
    return ends
