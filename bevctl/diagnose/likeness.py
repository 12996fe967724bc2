"""How close a replayed step is to the recorded one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.diagnose.rehearsal import Result
from bevctl.engine.incident import Incident


@dataclass(frozen=True)
class Likeness:
    """A comparison of every loss and the gradient norm."""

    compared: int
    exact: bool
    """All are equal bit for bit, NaN to NaN."""
    relative: float
    """Largest relative difference of those that are finite in both."""
    flipped: tuple[str, ...]
    """Those that are finite in one and not in the other."""

    def sentence(self) -> str:
        """How close, as a user is told."""
        if self.exact:
            return f"The replay is bit for bit the recorded step: all {self.compared} losses and norms are equal."
        if self.flipped:
            return f"The replay differs from the recorded step: {', '.join(self.flipped)} finite in one of them only."
        return (
            f"The replay agrees with the recorded step to {self.relative:.1e}, the largest relative difference "
            f"among {self.compared} losses and norms."
        )


def likeness(incident: Incident, replayed: Result) -> Likeness:
    """Compares the losses of the recorded rank, and the gradient norm where the step was of one rank alone."""
    pairs = dict(_pairs(incident, replayed))
    finite = [(a, b) for a, b in pairs.values() if math.isfinite(a) and math.isfinite(b)]
    return Likeness(
        compared=len(pairs),
        exact=all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs.values()),
        relative=max((abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in finite), default=0.0),
        flipped=tuple(name for name, (a, b) in pairs.items() if math.isfinite(a) != math.isfinite(b)),
    )


def _pairs(incident: Incident, replayed: Result) -> Iterator[tuple[str, tuple[float, float]]]:
    for name in incident.losses.keys() & replayed.losses.keys():
        yield name, (incident.losses[name], replayed.losses[name])
    if incident.world == 1:
        yield "grad_norm", (incident.grad_norm, replayed.grad_norm)
