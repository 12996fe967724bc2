"""The course of the loss: jumps, a slow rise, no descent at all, and swings. All figures are medians of windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import Column
from bevctl.monitor.view import Trouble, View

BEFORE, AFTER = 8, 3
"""Windows whose level is compared, before and after a moment."""
JUMP = 1.5
SCATTERS = 8.0
"""Robust standard deviations that a jump must exceed."""
RISE = 1.3
FLAT = 0.97
FLAT_WINDOWS = 30
SWING, MORE_SWING = 0.15, 4.0
"""Mean relative distance from the level, and its growth since the first half, that are called swings."""
SMOOTH = 5
SWING_WIDTH = 10
"""Even, so that the level of a loss that alternates lies between its two values."""
LR_RESTART = 2.0
"""Factor by which a learning rate that jumps explains a jump of the loss."""


@dataclass(frozen=True)
class _Jump:
    index: int
    """First window after it."""
    before: float
    scatter: float


def _scatter(values: Column, level: Column | float) -> Column:
    """Robust standard deviation around `level` along the last axis, at least 3 % of it."""
    spread = 1.4826 * np.median(np.abs(values - np.expand_dims(level, -1)), axis=-1)
    return np.maximum(spread, 0.03 * np.abs(level))


def _levels(values: Column, width: int) -> Column:
    """Running median of `width` values; the i-th is of values i to i + width - 1."""
    return np.median(sliding_window_view(values, width), axis=-1)


def _windows(view: View) -> tuple[Column, Column]:
    """The loss in windows, without the start-up of a run that is shown from its beginning."""
    iters, values = view.history.windows("loss")
    kept = iters > view.starts[0] + max(100.0, view.history.interval) if view.is_fresh and view.starts else iters > 0
    return iters[kept], values[kept]


def _find_jump(values: Column) -> _Jump | None:
    if len(values) < BEFORE + AFTER:
        return None
    before = sliding_window_view(values[:-AFTER], BEFORE)
    after = sliding_window_view(values[BEFORE:], AFTER)
    level = np.median(before, axis=-1)
    scatter = _scatter(before, level)
    is_higher = (after.min(axis=-1) > level + SCATTERS * scatter) & (
        np.median(after, axis=-1) > level + (JUMP - 1) * np.abs(level)
    )
    if not is_higher.any():
        return None
    first = int(np.argmax(is_higher))
    return _Jump(first + BEFORE, float(level[first]), float(scatter[first]))


def jump(view: View) -> Iterator[Trouble]:
    """The loss is suddenly much higher, for several windows."""
    iters, values = _windows(view)
    found = _find_jump(values)
    if found is None:
        return
    first, now = iters[found.index], float(np.median(values[-AFTER:]))
    restart = _lr_restart(
        view, iters[max(found.index - BEFORE, 0)], first, iters[min(found.index + AFTER, len(iters) - 1)]
    )
    recovered = now < found.before + SCATTERS / 2 * found.scatter
    resumed = [s for s in view.starts[1:] if iters[found.index - 1] - view.history.interval <= s < first]
    if recovered or restart:
        severity = Severity.INFO
    else:
        severity = Severity.FAIL if now > 3 * abs(found.before) + SCATTERS * found.scatter else Severity.WARN
    after = float(np.median(values[found.index : found.index + AFTER]))
    yield Trouble(
        severity,
        f"The loss jumped from {found.before:.4g} to {after:.4g}"
        + (" and recovered" if recovered else f", now {now:.4g}")
        + (" after a resume" if resumed else ""),
        (
            Evidence(
                view.where(first),
                f"median of {AFTER} windows {after:.4g}; before {found.before:.4g}, scatter {found.scatter:.2g}",
            ),
            *([Evidence(view.where(first), restart)] if restart else []),
            *([Evidence(view.where(resumed[0] + 1), "the run was resumed here")] if resumed else []),
        ),
        _jump_cause(bool(restart), bool(resumed)),
        None if severity is Severity.INFO else _jump_fix(bool(resumed)),
        first,
    )


def _lr_restart(view: View, before: float, first: float, after: float) -> str:
    """The sentence for a learning rate that jumped up together with the loss; empty where it did not."""
    iters, lr = view.history.finite("lr")
    old, new = lr[(iters >= before) & (iters < first)], lr[(iters >= first) & (iters <= after)]
    if not len(old) or not len(new) or np.max(new) <= LR_RESTART * np.median(old):
        return ""
    return f"the learning rate went from {np.median(old):.3g} to {np.max(new):.3g}"


def _jump_cause(restart: bool, resumed: bool) -> str:
    if restart:
        return "The learning rate restarted."
    if resumed:
        return "Something was not restored: optimizer state, learning rate, or another data order or setting."
    return "A step too large for the model: learning rate too high for the batch, or a batch of broken samples."


def _jump_fix(resumed: bool) -> str:
    if resumed:
        return "Compare learning rate, batch and loss scale before and after; resume again from a whole checkpoint."
    return "If it does not come down again, go back to the last checkpoint before it with a lower learning rate."


def rise(view: View) -> Iterator[Trouble]:
    """The loss has been going up slowly since its lowest point."""
    iters, values = _windows(view)
    if len(values) < 4 * SMOOTH or _find_jump(values) is not None:
        return
    smooth, ends = _levels(values, SMOOTH), iters[SMOOTH - 1 :]
    lowest = int(np.argmin(smooth))
    low, now = smooth[lowest], smooth[-1]
    scatter = 1.4826 * float(np.median(np.abs(values[SMOOTH - 1 :] - smooth)))
    since = smooth[lowest:]
    if len(since) < 2 * SMOOTH or now < low + (RISE - 1) * abs(low) or now < low + 6 * scatter or not _goes_up(since):
        return
    yield Trouble(
        Severity.WARN,
        f"The loss has risen from {low:.4g} to {now:.4g}",
        (
            Evidence(view.where(ends[lowest]), f"lowest level {low:.4g}"),
            Evidence(view.where(iters[-1]), f"level {now:.4g}, {now / low - 1:+.0%} over {len(since)} windows"),
            *_norm_growth(view, ends[lowest]),
        ),
        "Slow divergence: the learning rate is too high for the batch, or the loss scale or weight decay drifts.",
        "Go back to a checkpoint near the lowest point with a lower learning rate.",
        ends[lowest],
    )


def _goes_up(values: Column) -> bool:
    """Whether later values are mostly larger than earlier ones."""
    half = len(values) // 2
    return bool(np.mean(values[half:][:, None] > values[:half][None, :]) > 0.9)


def _norm_growth(view: View, since: float) -> Iterator[Evidence]:
    iters, norms = view.history.finite("grad_norm")
    before, after = norms[iters <= since][-10:], norms[iters > since][-10:]
    if len(before) and len(after) and np.median(after) > 1.5 * np.median(before):
        yield Evidence("grad_norm", f"grew from {np.median(before):.4g} to {np.median(after):.4g} meanwhile")


def plateau(view: View) -> Iterator[Trouble]:
    """A run shown from its beginning whose loss never fell."""
    iters, values = _windows(view)
    if not view.is_fresh or len(values) < FLAT_WINDOWS or _is_pretrained(view) or _find_jump(values) is not None:
        return
    first = float(np.median(values[:SMOOTH]))
    lowest = float(_levels(values[SMOOTH:], SMOOTH).min())
    if first <= 0 or lowest < FLAT * first:
        return
    yield Trouble(
        Severity.WARN,
        f"The loss has not fallen in {iters[-1]:.0f} iterations",
        (
            Evidence(
                f"iterations {iters[0]:.0f} to {iters[-1]:.0f}", f"level {first:.4g} at first, lowest {lowest:.4g}"
            ),
        ),
        "Nothing is learned: steps are skipped, the learning rate is far too low or high, or targets do not match "
        "inputs.",
        "Check grad_norm and skipped steps, the learning rate, and a few samples with their boxes drawn.",
        iters[0],
    )


def _is_pretrained(view: View) -> bool:
    """Whether the run started from weights of the same task, which may leave little to fall."""
    segments = (view.log.header.get("meta") or {}).get("segments") or [{}]
    return isinstance(segments, list) and isinstance(segments[0], dict) and bool(segments[0].get("load_from"))


def swings(view: View) -> Column:
    """Relative distance of each window from the level around it; empty for a short log, or one whose loss jumps."""
    values = _windows(view)[1]
    if len(values) < FLAT_WINDOWS or _find_jump(values) is not None:
        return np.empty(0)
    levels = _levels(values, SWING_WIDTH)
    middle = values[SWING_WIDTH // 2 :][: len(levels)]
    # The mean tells two scatters apart in fewer values than a median; no single value may count for more than 100 %.
    return np.minimum(np.abs(middle - levels) / np.maximum(np.abs(levels), 1e-9), 1.0)


def oscillation(view: View) -> Iterator[Trouble]:
    """The loss swings far more than it did in the first half of the records."""
    sizes = swings(view)
    if not len(sizes):
        return
    early, late = float(sizes[: len(sizes) // 2].mean()), float(sizes[-len(sizes) // 4 :].mean())
    if late < SWING or late < MORE_SWING * early:
        return
    first = _windows(view)[0][-len(sizes) // 4]
    yield Trouble(
        Severity.WARN,
        f"The loss swings by {late:.0%}",
        (
            Evidence(
                view.where(first), f"scatter around its level {late:.1%} from here on, {early:.1%} in the first half"
            ),
        ),
        "The learning rate is too high for the batch at this point, or a few samples are far harder than the rest.",
        "Lower the learning rate, or clip gradients more tightly.",
        first,
    )
