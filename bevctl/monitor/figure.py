"""Line plots as SVG: no script, no font, no style from elsewhere; colours come from the page's own style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bevctl.monitor.history import Column

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 24
POINTS = 600
"""Points of a curve; more are averaged, as the page has no more pixels."""
HUGE = 1e100
"""Beyond this, or below one over it on a logarithmic axis, a value is not drawn."""
COLOURS = 6
"""Colours and dash patterns that the style sheet has, `s0` to `s5`."""


@dataclass(frozen=True)
class Line:
    """One curve: `y` over `x`, NaN where there is a gap, and the x at which a value was NaN or infinite."""

    name: str
    x: Column
    y: Column
    bad: Column = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Marker:
    """A vertical line at `x`, such as a resume or an evaluation."""

    x: float
    label: str


@dataclass(frozen=True)
class _Axes:
    """From data to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def px(self, x: float) -> float:
        return LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.y_low, self.y_high, y))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def figure(title: str, unit: str, lines: Sequence[Line], markers: Iterable[Marker] = (), *, log: bool = False) -> str:
    """An SVG figure with legend; empty where no curve has a value.

    Each of `lines` keeps its colour and dash; where it was not finite, a triangle stands at the bottom.
    """
    drawn = [_thinned(line) for line in lines if np.isfinite(line.y).any() or len(line.bad)]
    if not drawn:
        return ""
    axes = _axes(drawn, log)
    inner = [*_grid(axes), *(_marker(axes, marker) for marker in markers)]
    for index, line in enumerate(drawn):
        inner.append(f'<path class="line s{index % COLOURS}" d="{_path(axes, line)}"/>')
        inner.extend(_triangle(axes, x, index) for x in line.bad[:POINTS])
    label = html.escape(f"{title}, {unit}" if unit else title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(inner)}</svg>'
    return f"<figure><figcaption>{label}{_legend(drawn)}</figcaption>{svg}</figure>"


def _thinned(line: Line) -> Line:
    """The curve in at most POINTS points, without values that are beyond the arithmetic of axes."""
    y = np.where(np.abs(line.y) < HUGE, line.y, np.nan)
    if len(line.x) <= POINTS:
        return Line(line.name, line.x, y, line.bad)
    parts = np.array_split(np.arange(len(line.x)), POINTS)
    x = np.array([line.x[part].mean() for part in parts])
    return Line(line.name, x, np.array([_mean(y[part]) for part in parts]), line.bad)


def _mean(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _axes(lines: Sequence[Line], log: bool) -> _Axes:
    """Axes around the curves; a few far outliers at the top are cut off rather than flattening the rest."""
    xs = np.concatenate([np.concatenate([line.x, line.bad]) for line in lines])
    ys = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    log = log and bool(len(ys)) and bool((ys > 1 / HUGE).all())
    low, high = (float(ys.min()), _top(ys)) if len(ys) else (0.0, 1.0)
    if not log:
        margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
        low, high = (0.0 if 0 <= low < 0.4 * high else low - margin), high + margin
    elif low == high:
        low, high = low / 2, high * 2
    x_low, x_high = float(xs.min()), float(xs.max())
    return _Axes(x_low, x_high if x_high > x_low else x_low + 1, low, high, log)


def _top(ys: Column) -> float:
    """The largest value, or the 99th percentile where the largest is far beyond it."""
    high, usual = float(ys.max()), float(np.percentile(ys, 99))
    return usual if len(ys) >= 50 and high > 4 * usual > 0 else high


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    found = [10.0**power for power in powers]
    return found if len(found) > 1 else [low, math.sqrt(low * high), high]


def _grid(axes: _Axes) -> Iterable[str]:
    ys = _log_ticks(axes.y_low, axes.y_high) if axes.log else ticks(axes.y_low, axes.y_high, 4)
    for y, label in zip(ys, labels(ys), strict=True):
        at = axes.py(y)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    xs = ticks(axes.x_low, axes.x_high, 6)
    for x, label in zip(xs, labels(xs), strict=True):
        yield f'<text x="{axes.px(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>'


def labels(values: Sequence[float]) -> list[str]:
    """Numbers as an axis shows them, in as few digits as tell them apart: 12k, 1.5M, 2e-05."""
    for digits in range(2, 9):
        shown = [short(value, digits) for value in values]
        if len(set(shown)) == len(set(values)) and digits > 2:
            break
    return shown


def short(value: float, digits: int) -> str:
    """A number in `digits` significant digits, with k or M where that is shorter."""
    size = abs(value)
    if 1e6 <= size < 1e12:
        return f"{value / 1e6:.{digits}g}M"
    if 1e4 <= size < 1e6:
        return f"{value / 1e3:.{digits}g}k"
    if 1e3 <= size < 1e4:
        return f"{value:.{max(digits, 4)}g}"
    if 0 < size < 1e-2:
        mantissa, _, power = f"{value:.{max(digits - 1, 0)}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(power)}"
    return f"{value:.{digits}g}"


def _path(axes: _Axes, line: Line) -> str:
    """SVG path data; a gap starts a new stroke, a lone point is a stroke of no length, which round caps show."""
    parts: list[str] = []
    pen_down = False
    for x, y in zip(line.x, line.y, strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        point = f"{axes.px(x):.1f} {axes.py(y):.1f}"
        parts.append(f"L{point}" if pen_down else f"M{point}h0")
        pen_down = True
    return "".join(parts)


def _marker(axes: _Axes, marker: Marker) -> str:
    if not axes.x_low <= marker.x <= axes.x_high:
        return ""
    at = f"{axes.px(marker.x):.1f}"
    return f'<path class="mark" d="M{at} {TOP}V{HEIGHT - BOTTOM}"><title>{html.escape(marker.label)}</title></path>'


def _triangle(axes: _Axes, x: float, index: int) -> str:
    at, base = axes.px(x), HEIGHT - BOTTOM
    return f'<path class="bad s{index % COLOURS}" d="M{at - 4:.1f} {base}h8l-4 -8z"><title>not finite</title></path>'


def _legend(lines: Sequence[Line]) -> str:
    """Names of the curves beside a piece of their stroke; a single curve needs none but its non-finite count."""
    entries = []
    for index, line in enumerate(lines):
        note = f" ({len(line.bad)} not finite)" if len(line.bad) else ""
        key = f'<svg class="key" viewBox="0 0 24 8"><path class="line s{index % COLOURS}" d="M1 4H23"/></svg>'
        entries.append(f"<span>{key}{html.escape(line.name)}{note}</span>")
    return (
        f'<span class="legend">{"".join(entries)}</span>' if len(lines) > 1 or any(len(ln.bad) for ln in lines) else ""
    )
