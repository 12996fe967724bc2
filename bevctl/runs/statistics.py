"""Summary of a metric over many records, folded in chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """Figures of one metric over the records of a window; None where no value was finite."""

    last: float
    """As logged, finite or not."""
    mean: float | None
    min: float | None
    max: float | None
    p50: float | None
    p95: float | None
    count: int
    """Records that have the metric."""
    nonfinite: int
    """Records in which it is NaN or infinite."""
    first_nonfinite: int | None
    """Iteration of the first of them."""


@dataclass
class Accumulator:
    """Running figures of one metric; all are over finite values except `count` and `last`."""

    count: int = 0
    nonfinite: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    last: float = math.nan
    first_nonfinite: int | None = None

    def fold(self, values: Sequence[float], iterations: Sequence[int], unit: float = 1.0) -> None:
        """Adds `values` (times `unit`), of which the i-th belongs to `iterations[i]`; neither is empty."""
        self.count += len(values)
        self.last = values[-1] * unit
        total = sum(values)
        if not math.isfinite(total):
            values = self._finite(values, iterations)
            if not values:
                return
            total = sum(values)
        self.total += total * unit
        self.low = min(self.low, min(values) * unit)
        self.high = max(self.high, max(values) * unit)

    def _finite(self, values: Sequence[float], iterations: Sequence[int]) -> list[float]:
        finite = [value for value in values if math.isfinite(value)]
        self.nonfinite += len(values) - len(finite)
        if self.first_nonfinite is None and len(finite) < len(values):
            self.first_nonfinite = next(i for i, v in zip(iterations, values, strict=True) if not math.isfinite(v))
        return finite

    def metric(self, sample: Sequence[float]) -> Metric:
        """The summary; the percentiles are those of `sample`, which stands for all values."""
        finite = sorted(value for value in sample if math.isfinite(value))
        known = self.count - self.nonfinite
        return Metric(
            last=self.last,
            mean=self.total / known if known else None,
            min=self.low if known else None,
            max=self.high if known else None,
            p50=percentile(finite, 0.50),
            p95=percentile(finite, 0.95),
            count=self.count,
            nonfinite=self.nonfinite,
            first_nonfinite=self.first_nonfinite,
        )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Value below which `share` (0..1) of the sorted values lie, interpolated linearly; None of none."""
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float | None:
    """Middle of the finite `values`."""
    return percentile(sorted(value for value in values if math.isfinite(value)), 0.5)


def spread(values: Sequence[float]) -> float | None:
    """Robust standard deviation: 1.4826 times the median distance from the median."""
    middle = median(values)
    if middle is None:
        return None
    distance = median([abs(value - middle) for value in values])
    return None if distance is None else 1.4826 * distance
