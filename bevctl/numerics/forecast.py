"""Which parts of a healthy model would be the next to leave FP16's range, and the settings that keep them inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from bevctl.numerics.formats import FP16_MAX
from bevctl.numerics.ranges import ModuleRange, RangeCounter
from bevctl.numerics.record import Culprit
from bevctl.numerics.trace import Trace

Step = TypeVar("Step")
MARGIN = 8.0
"""Numbers of other samples and of later epochs are larger than those seen: so many times is too close."""
LOST = 0.01
"""Share of all gradients that may round to zero."""
VANISHED = 0.5
"""Share of a module's gradients that may round to zero before it is called a risk."""
HALF_NAMES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Risk:
    """A module whose numbers come close to a limit of FP16."""

    module: str
    phase: str
    """forward, or backward: gradients times the loss scale."""
    kind: str
    """overflow or underflow."""
    largest: float
    """Largest magnitude, at the planned loss scale."""
    headroom: float
    """How many times larger it may get."""
    lost: float
    """Share of the non-zero numbers that round to zero."""
    op: str
    """The operation that made the largest."""
    place: str
    """Its file and line."""


@dataclass(frozen=True)
class Forecast:
    """What some steps of a healthy model say about FP16."""

    steps: int
    loss_scale: float
    """The planned one that the risks are for."""
    risks: tuple[Risk, ...]
    """Overflow before underflow, the closest first."""
    fp32_modules: tuple[str, ...]
    """Modules to keep in FP32; none inside another."""
    highest_scale: float
    """Largest power of two at which all gradients stay a margin below the limit."""
    lowest_scale: float
    """Smallest power of two at which few gradients round to zero."""
    ranges: tuple[ModuleRange, ...] = field(repr=False, default=())
    culprit: Culprit | None = None
    """The first bad operation, where a step was not healthy after all."""

    def patch(self, dynamic: bool) -> dict[str, object]:
        """Config values by dotted key that keep the model inside FP16's range; empty where it is safe as planned.

        `dynamic`: the loss scale is, so that only its start can be too high. A fixed one is moved into the usable
        range, to its upper end where the range is empty: an overflow stops the training, an underflow slows it.
        """
        values: dict[str, object] = {}
        if self.fp32_modules:
            values["precision.fp32_modules"] = list(self.fp32_modules)
        wanted = min(max(self.loss_scale, self.lowest_scale), self.highest_scale)
        if dynamic and wanted < self.loss_scale:
            values["precision.init_scale"] = wanted
        elif not dynamic and wanted != self.loss_scale:
            values["precision.loss_scale"] = wanted
        return values


def forecast(
    model: nn.Module,
    steps: Iterable[Step],
    gradients: Callable[[Step], object],
    planned_scale: float,
    measured_scale: float = 1.0,
    margin: float = MARGIN,
) -> Forecast:
    """Watches some steps and says what of them FP16 could not hold, or only just.

    Run them under FP16 or, for a run in another format, BF16 autocast: then the same operations are in half precision
    as in an FP16 run, and nothing leaves the range. Weights stay; BatchNorm statistics of a training model move.

    Args:
        model: the one that `gradients` uses.
        steps: what `gradients` is called with, one a step.
        gradients: runs the forward and the backward pass of a step.
        planned_scale: loss scale of the FP16 run in question.
        measured_scale: loss scale that `gradients` really multiplies by.
        margin: headroom below this is a risk.
    """
    counter, count = RangeCounter(), 0
    for step in steps:
        with Trace(model, counter) as trace:
            gradients(step)
        count += 1
        culprit = trace.first_bad()
        if culprit is not None:
            return assess(counter.ranges(), count, planned_scale, measured_scale, margin, culprit)
    return assess(counter.ranges(), count, planned_scale, measured_scale, margin)


def assess(
    ranges: Sequence[ModuleRange],
    steps: int,
    planned_scale: float,
    measured_scale: float = 1.0,
    margin: float = MARGIN,
    culprit: Culprit | None = None,
) -> Forecast:
    """The forecast that measured ranges give; see `forecast`."""
    half = [r for r in ranges if r.dtype in HALF_NAMES]
    backward = [r for r in half if r.phase == "backward"]
    ratio = planned_scale / measured_scale
    risks = [*_overflows(half, ratio, margin), *_underflows(backward, ratio)]
    largest = max((r.largest for r in backward), default=0.0) / measured_scale
    return Forecast(
        steps=steps,
        loss_scale=planned_scale,
        risks=tuple(risks),
        fp32_modules=_outermost(r.module for r in risks if (r.phase, r.kind) == ("forward", "overflow")),
        highest_scale=_power_below(FP16_MAX / margin / largest) if largest else planned_scale,
        lowest_scale=_lowest_scale(backward, measured_scale),
        ranges=tuple(ranges),
        culprit=culprit,
    )


def _overflows(half: Sequence[ModuleRange], ratio: float, margin: float) -> list[Risk]:
    factors = [(r, ratio if r.phase == "backward" else 1.0) for r in half]
    found = [_risk(r, "overflow", factor) for r, factor in factors if r.largest * factor * margin > FP16_MAX]
    return sorted(found, key=lambda risk: risk.headroom)


def _underflows(backward: Sequence[ModuleRange], ratio: float) -> list[Risk]:
    found = [_risk(r, "underflow", ratio) for r in backward if r.flushed(ratio) > VANISHED]
    return sorted(found, key=lambda risk: -risk.lost)


def _risk(r: ModuleRange, kind: str, factor: float) -> Risk:
    headroom = r.headroom / factor
    return Risk(r.module, r.phase, kind, r.largest * factor, headroom, r.flushed(factor), r.largest_op, r.place)


def _lowest_scale(backward: Sequence[ModuleRange], measured_scale: float) -> float:
    """Smallest power of two, 1 to 2^24, at which at most LOST of the gradients round to zero."""
    total = sum(sum(r.exponents) for r in backward)
    for power in range(25):
        lost = sum(r.flushed(2.0**power / measured_scale) * sum(r.exponents) for r in backward)
        if lost <= LOST * total:
            return 2.0**power
    return 2.0**24


def _power_below(value: float) -> float:
    return 2.0 ** math.floor(math.log2(value))


def _outermost(names: Iterable[str]) -> tuple[str, ...]:
    """The names without repetition, without the model itself, and without those inside another."""
    unique = sorted({name for name in names if name})
    return tuple(name for name in unique if not any(name.startswith(f"{other}.") for other in unique))
