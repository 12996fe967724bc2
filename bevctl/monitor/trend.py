"""Small pictures out of characters: a trend in one line, and a plot of a few curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bevctl.monitor.history import Column

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
"""The same eight levels where the stream has no block characters."""
MARKS = "●○▲△■□"
ASCII_MARKS = "ox+*#@"
OVERLAP = "◍"
ASCII_OVERLAP = "%"


def sparkline(values: Column, width: int, plain: bool = False) -> str:
    """`values` over at most `width` characters, lowest to highest; `!` where a part holds no finite value.

    A few outliers are cut off, so that they do not flatten the rest.
    `plain` keeps to ASCII.
    """
    if width < 1 or not len(values):
        return ""
    means = [_mean(part) for part in np.array_split(values, min(width, len(values)))]
    finite = [mean for mean in means if math.isfinite(mean)]
    levels = ASCII if plain else BLOCKS
    low, high = np.percentile(finite, [2, 98]) if finite else (0.0, 0.0)
    return "".join(levels[_level(mean, low, high, len(levels))] if math.isfinite(mean) else "!" for mean in means)


def _mean(part: Column) -> float:
    finite = part[np.isfinite(part)]
    return float(finite.mean()) if len(finite) else math.nan


def _level(value: float, low: float, high: float, levels: int) -> int:
    """0 at `low` and below, levels - 1 at `high` and above; the middle where all are equal."""
    if not high > low:
        return levels // 2 - 1
    share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves, as the difference of two floats may be none
    return round(min(max(share, 0.0), 1.0) * (levels - 1))


@dataclass(frozen=True)
class Curve:
    """Values over iterations."""

    x: Column
    y: Column


def plot(curves: Sequence[Curve], width: int, height: int, plain: bool = False) -> list[str]:
    """Lines of a plot of `curves`, each with its own mark; the y axis is at the left, a line of x values below.

    A curve has one point a column, the mean of its values there; a few outliers are drawn at the edge.
    """
    known = [(index, curve) for index, curve in enumerate(curves) if np.isfinite(curve.y).any()]
    if not known:
        return []
    x_low, x_high = (float(end([end(curve.x) for _, curve in known])) for end in (np.min, np.max))
    spans = [np.percentile(curve.y[np.isfinite(curve.y)], [2, 98]) for _, curve in known]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    grid = [[" "] * width for _ in range(height)]
    marks, overlap = (ASCII_MARKS, ASCII_OVERLAP) if plain else (MARKS, OVERLAP)
    for index, curve in known:
        columns = np.array([_level(x, x_low, x_high, width) if x_high > x_low else 0 for x in curve.x])
        for column in np.unique(columns):
            mean = _mean(curve.y[columns == column])
            if math.isfinite(mean):
                row = height - 1 - _level(mean, low, high, height)
                grid[row][column] = marks[index % len(marks)] if grid[row][column] == " " else overlap
    return _with_axes(grid, low, high, x_low, x_high, "|" if plain else "│")


def _with_axes(grid: list[list[str]], low: float, high: float, x_low: float, x_high: float, bar: str) -> list[str]:
    labels = [f"{high - (high - low) * row / max(len(grid) - 1, 1):.4g}" for row in range(len(grid))]
    margin = max(map(len, labels))
    shown = range(0, len(grid), max((len(grid) - 1) // 2, 1))
    lines = [f"{labels[i] if i in shown else '':>{margin}} {bar}{''.join(row)}" for i, row in enumerate(grid)]
    left, right = f"{x_low:.0f}", f"{x_high:.0f}"
    return [*lines, " " * (margin + 2) + left + right.rjust(len(grid[0]) - len(left))]
