"""Several runs beside each other: medians in one table, the loss in one plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bevctl.console import printable
from bevctl.monitor import wording
from bevctl.monitor.report import Report, names_of
from bevctl.monitor.trend import ASCII_MARKS, MARKS, Curve, plot

RECENT = 100
"""Records whose medians are compared."""


@dataclass(frozen=True)
class Difference:
    """One metric in each run; None where a run does not have it."""

    name: str
    values: tuple[float | None, ...]
    change: str
    """The last run over the first."""


def differences(reports: Sequence[Report]) -> list[Difference]:
    """Medians of the recent records of every main metric and loss part, and of the last scores."""
    names = list(dict.fromkeys(name for report in reports for name in wording.shown_metrics(report.history)))
    rows = [(name, tuple(_median(report, name) for report in reports)) for name in names]
    for name in ("mAP", "NDS", "mIoU"):
        scores = tuple(r.log.validations[-1].metrics.get(name) if r.log.validations else None for r in reports)
        rows += [(name, scores)] if any(score is not None for score in scores) else []
    return [Difference(name, values, _change(values)) for name, values in rows]


def _median(report: Report, name: str) -> float | None:
    values = report.history.finite(name)[1][-RECENT:]
    return float(np.median(values)) if len(values) else None


def _change(values: tuple[float | None, ...]) -> str:
    first, last = values[0], values[-1]
    if first is None or last is None:
        return "missing" if (first is None) != (last is None) else ""
    if not first:
        return ""
    return f"{last / first - 1:+.1%}" if abs(last) < 3 * abs(first) else f"x {last / first:.3g}"


def comparison(reports: Sequence[Report], width: int, plain: bool = False) -> RenderableType:
    """The runs' states, the table of medians, and a plot of their losses."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("median of the last records", no_wrap=True)
    marks = ASCII_MARKS if plain else MARKS
    names = names_of(reports)
    for index, name in enumerate(names):
        table.add_column(Text(printable(f"{marks[index % len(marks)]} {name}")), justify="right")
    table.add_column("change", justify="right")
    table.add_row("state", *(report.state.name for report in reports), "")
    table.add_row("precision", *(wording.half(report) for report in reports), "")
    for row in differences(reports):
        table.add_row(printable(row.name), *map(wording.number, row.values), row.change)
    table.add_row("alarms", *(_alarms(report) for report in reports), "")
    curves = [Curve(*report.history.finite("loss")) for report in reports]
    lines = plot(curves, max(width - 16, 20), 12, plain)
    return Group(table, Text("\nloss over iterations\n" + "\n".join(lines) if lines else ""))


def _alarms(report: Report) -> str:
    loud = [alarm.id for alarm in report.alarms if alarm.severity.value != "info"]
    return " ".join(loud) or "none"
