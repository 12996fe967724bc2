"""The loss scale: collapsing, stuck at its floor, or steps skipped more and more often."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import Column
from bevctl.monitor.view import Trouble, View

FLOOR = 1.0
"""A scale at which half precision underflows as it would without scaling."""
COLLAPSE = 64.0
"""Factor below its usual value at which the scale has collapsed: six overflows in a row with nothing gained."""
STUCK_RECORDS = 20
SKIPPED_SHARE = 0.02
"""Share of skipped steps that growth of the scale never reaches (it makes 1 in 2000)."""
LEAST_SKIPPED = 5


def collapse(view: View) -> Iterator[Trouble]:
    """The scale is far below what it was in this stretch of the run, and went down to there."""
    iters, scale = _last_stretch(view)
    if len(scale) < 10:
        return
    usual, now = float(np.median(scale[: len(scale) // 2])), float(np.median(scale[-3:]))
    falls = int((np.diff(scale[len(scale) // 2 :]) < 0).sum())
    if now > usual / COLLAPSE or now <= FLOOR or falls < 3:
        return
    first = iters[np.flatnonzero(scale <= usual / 4)[0]]
    yield Trouble(
        Severity.WARN,
        f"The loss scale collapsed from {usual:g} to {now:g}",
        (
            Evidence(
                view.where(first), f"scale {scale[iters == first][0]:g}, a quarter of its usual {usual:g} or less"
            ),
            Evidence(view.where(iters[-1]), f"scale {scale[-1]:g} after {falls} drops in the second half"),
        ),
        "Gradients overflow at every scale: they grow, or NaN comes from the forward pass, which no scale helps.",
        "Lower the learning rate and check the loss for NaN; or resume in BF16, which needs no scale.",
        first,
    )


def floor(view: View) -> Iterator[Trouble]:
    """The scale came down to 1 or below and stays there."""
    iters, scale = _last_stretch(view)
    came_down = len(scale) and scale.max() > FLOOR
    low = scale <= FLOOR
    if len(scale) < 3 or not low[-1] or not (came_down or scale[-1] < FLOOR):
        return
    stuck = len(low) if low.all() else int(np.argmax(~low[::-1]))
    if stuck < STUCK_RECORDS and scale[-1] >= FLOOR:
        return
    first = iters[len(scale) - stuck]
    yield Trouble(
        Severity.FAIL,
        f"The loss scale is stuck at {scale[-1]:g}",
        (Evidence(view.where(first), f"scale {scale[-1]:g} for {stuck} records; it was {scale.max():g}"),),
        "Every step overflows, so that the scale was halved until nothing was left of it; below 1 small gradients "
        "vanish and the check for infinity is unreliable.",
        "Stop; resume from before the scale fell, in BF16 or FP32, or with the part that overflows in FP32.",
        first,
    )


def skips(view: View) -> Iterator[Trouble]:
    """Steps are skipped often, and more often than before."""
    iters, skipped = _skipped(view)
    if len(skipped) < 8:
        return
    quarter = 3 * (len(iters) - 1) // 4
    late_steps, early_steps = iters[-1] - iters[quarter], iters[quarter] - iters[0]
    late_skips, early_skips = skipped[-1] - skipped[quarter], skipped[quarter] - skipped[0]
    if min(late_steps, early_steps) <= 0 or late_skips < LEAST_SKIPPED:
        return
    late, early = late_skips / late_steps, early_skips / early_steps
    if late < SKIPPED_SHARE or late < 2 * early:
        return
    yield Trouble(
        Severity.WARN,
        f"More and more steps are skipped: {late:.1%} of the last {late_steps:.0f}",
        (
            Evidence(f"iterations {iters[0]:.0f} to {iters[quarter]:.0f}", f"{early_skips:.0f} skipped, {early:.2%}"),
            Evidence(f"iterations {iters[quarter]:.0f} to {iters[-1]:.0f}", f"{late_skips:.0f} skipped, {late:.2%}"),
        ),
        "Gradients overflow more often: they grow, or the scale grows back faster than the model allows.",
        "Lower the learning rate, or use a fixed loss scale of 512; BF16 needs none.",
        iters[quarter],
    )


def _last_stretch(view: View) -> tuple[Column, Column]:
    """Iterations and scale since the last start or resume, without its first iterations."""
    iters, scale = view.settled("loss_scale")
    start = view.starts[-1] if view.starts else 0.0
    kept = iters > start
    return iters[kept], scale[kept]


def _skipped(view: View) -> tuple[Column, Column]:
    """Iterations and skipped steps up to there, since the last start; from the log's messages where it has no count."""
    start = view.starts[-1] if view.starts else 0.0
    iters, counts = view.settled("skipped_steps")
    if len(iters):
        return iters[iters > start], counts[iters > start]
    iters = view.history.iters[(view.history.iters > start) & ~view.settling]
    events = [event for event in view.events("skipped_step") if event.iter is not None]
    skipped = np.array([sum(e.data.get("count", 1) for e in events if (e.iter or 0) <= i) for i in iters])
    return iters, skipped.astype(np.float64)
