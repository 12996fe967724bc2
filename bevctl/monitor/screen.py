"""A run on one screen of a terminal, and as one line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bevctl.console import printable
from bevctl.finding import Severity
from bevctl.monitor import wording
from bevctl.monitor.report import Report
from bevctl.monitor.trend import sparkline
from bevctl.monitor.view import Alarm

COLOURS = {"fail": "bold red", "warn": "yellow", "info": "cyan"}
STATES = {"running": "green", "finished": "green", "stalled": "bold red", "died": "bold red", "ended": "yellow"}
BAR = 30
ROWS_ON_PAPER = 24
"""Metrics shown where the height is not limited."""


class Screen:
    """Draws a report in the width, and on a terminal the height, that there is; `plain` keeps to ASCII."""

    def __init__(self, report: Report, plain: bool = False, height: int | None = None) -> None:
        self.report = report
        self.plain = plain
        self.height = height

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        head = Group(_head(self.report, self.plain), _facts(self.report, self.plain))
        alarms = _alarms(self.report, full=self.height is None, plain=self.plain)
        used = sum(len(console.render_lines(part, options)) for part in (head, alarms))
        rows = ROWS_ON_PAPER if self.height is None else max(self.height - used - 3 - len(self.report.view.gpus), 3)
        yield head
        yield alarms
        yield _metrics(self.report, width, rows, self.plain)
        if self.report.view.gpus:
            yield _gpus(self.report)


def _head(report: Report, plain: bool) -> Text:
    state = report.state.name
    symbol = "" if plain else f"{wording.SYMBOLS[state]} "
    text = Text(f"{symbol}{state.upper()}", style=STATES[state])
    text.append(f"  {printable(report.name)}", style="bold")
    facts = ", ".join(part for part in (report.log.format, wording.precision(report)) if part)
    text.append(f"  {facts}", style="dim")
    text.append(f"\n{printable(report.state.why)}")
    return text


def _facts(report: Report, plain: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    share = report.progress.share
    bar = "" if share is None else f"{_bar(share, plain)}  "
    grid.add_row("progress", bar + wording.position(report))
    epochs = ", ".join(f"{epoch} {time}" for epoch, time in wording.coming_epochs(report, 6))
    for name, value in (
        ("time left", wording.remaining(report)),
        ("done at", epochs),
        ("speed", wording.speed(report)),
        ("disk", wording.disk(report)),
        ("evaluation", _evaluation(report)),
    ):
        if value:
            grid.add_row(name, printable(value))
    return grid


def _bar(share: float, plain: bool) -> str:
    full = round(share * BAR)
    return ("#" if plain else "█") * full + ("." if plain else "░") * (BAR - full)


def _evaluation(report: Report) -> str:
    if not report.log.validations:
        return ""
    last = report.log.validations[-1]
    known = [name for name in ("mAP", "NDS", "mIoU") if name in last.metrics] or list(last.metrics)[:3]
    return f"epoch {last.epoch}: " + ", ".join(f"{name} {wording.number(last.metrics[name])}" for name in known)


def _metrics(report: Report, width: int, rows: int, plain: bool) -> RenderableType:
    names = wording.shown_metrics(report.history)
    if not names:
        return Text()
    narrow = width < 90
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric", no_wrap=True, overflow="ellipsis")
    for column in ("last", "median") if narrow else ("last", "median", "lowest", "highest", "not finite"):
        table.add_column(column, justify="right", no_wrap=True)
    trend = max(min(width - (56 if narrow else 84), 60), 8)
    table.add_column("trend", no_wrap=True)
    for name in names[:rows]:
        table.add_row(*_row(report, name, narrow, trend, plain))
    notes = [f"{len(names) - rows} more: --json, --html"] if len(names) > rows else []
    zero = len(wording.always_zero(report.history))
    notes += [f"{zero} parts of the loss are always zero"] if zero else []
    return Group(table, Text("; ".join(notes), style="dim")) if notes else table


def _row(report: Report, name: str, narrow: bool, trend: int, plain: bool) -> list[str]:
    history = report.history
    metric = report.log.metrics.get(name)
    values = history.column(name)
    last = history.values[name][history.logged[name]][-1]
    figures = [last, *((metric.p50,) if narrow else (metric.p50, metric.min, metric.max))] if metric else [last]
    bad = [] if narrow else [str(metric.nonfinite) if metric and metric.nonfinite else ""]
    return [printable(name), *map(wording.number, figures), *bad, sparkline(values, trend, plain)]


def _gpus(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("GPU", "use", "memory", "power", "heat", "processes"):
        table.add_column(column)
    for gpu in report.view.gpus:
        memory = f"{wording.number(gpu.memory_used_gib)} of {wording.number(gpu.memory_total_gib)} GiB"
        processes = ", ".join(
            f"{pid} ({wording.number(gib)} GiB)" if gib is not None else str(pid) for pid, gib in gpu.processes
        )
        power, heat = wording.number(gpu.power_w), wording.number(gpu.temperature_c)
        use = f"{wording.number(gpu.utilization)} %"
        table.add_row(printable(f"{gpu.index} {gpu.name}"), use, memory, f"{power} W", f"{heat} C", processes)
    return table


def _alarms(report: Report, full: bool, plain: bool) -> RenderableType:
    alarms = report.alarms
    if not alarms:
        empty = "no training record in this window" if report.moment.recent else "nothing in the log to judge"
        told = "no alarm" if report.status == "pass" else empty
        return Text(f"\n{told}\n", style="green" if report.status == "pass" else "yellow")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for alarm in alarms:
        _add_alarm(grid, alarm, full, plain)
    worst = alarms[0].severity
    if worst is Severity.INFO or plain:
        return Group(Text(), grid, Text())
    return Panel(grid, title="alarms", title_align="left", border_style=COLOURS[worst.value])


def _add_alarm(grid: Table, alarm: Alarm, full: bool, plain: bool) -> None:
    severity = alarm.severity.value
    symbol = "" if plain else f"{wording.SEVERITIES[severity]} "
    title = Text(printable(alarm.title), style="" if severity == "info" else "bold")
    grid.add_row(Text(f"{symbol}{severity} {alarm.id}", style=COLOURS[severity]), title)
    for line, style in _details(alarm, full):
        grid.add_row("", Text(printable(line), style))


def _details(alarm: Alarm, full: bool) -> Iterable[tuple[str, str]]:
    """Lines below the title, with their styles: fewer where the height is limited, and for information."""
    is_info = alarm.severity is Severity.INFO
    most = 6 if full and not is_info else 1 if full or not is_info else 0
    for evidence in alarm.evidence[:most]:
        yield f"{evidence.where}: {evidence.what}", "dim"
    if full and not is_info:
        yield alarm.cause, "dim"
    if alarm.fix and not is_info:
        yield f"fix: {alarm.fix}", ""


def one_line(report: Report) -> str:
    """The run in one line, for a stream that cannot be redrawn."""
    history = report.history
    parts = [f"{report.name}: {report.state.name}", wording.position(report)]
    for name in ("loss", "grad_norm", "loss_scale", "memory_gib"):
        if name in history:
            parts.append(f"{name} {wording.number(history.values[name][history.logged[name]][-1])}")
    if report.progress.iter_time_s is not None:
        parts.append(f"{wording.number(report.progress.iter_time_s)} s/iter")
    parts.append(wording.remaining(report))
    loud = [alarm.id for alarm in report.alarms if alarm.severity is not Severity.INFO]
    parts.append(f"alarms: {' '.join(loud)}" if loud else "no alarm")
    return ", ".join(part for part in parts if part)
