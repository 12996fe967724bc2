"""One self-contained page about one or several runs: no script, and nothing is loaded from anywhere."""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Sequence

import numpy as np

import bevctl
from bevctl.console import printable
from bevctl.finding import Severity
from bevctl.monitor import wording
from bevctl.monitor.alarms.tasks import by_task
from bevctl.monitor.compare import differences
from bevctl.monitor.figure import COLOURS, Line, Marker, figure
from bevctl.monitor.history import History
from bevctl.monitor.report import Report, metrics_of, names_of
from bevctl.monitor.style import STYLE
from bevctl.monitor.view import Alarm

LONGEST_CONFIG = 200_000
"""Characters of a config that are shown."""
PLOTS = (
    ("loss", "", False),
    ("grad_norm", "", True),
    ("lr", "", False),
    ("loss_scale", "", True),
    ("memory_gib", "GiB", False),
    ("iter_time_s", "s", False),
)
"""Metric, unit, and whether its axis is logarithmic."""
# Beside the page's own style nothing may load: a browser refuses what slips in through a log.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(reports: Sequence[Report], refresh_s: int | None = None) -> str:
    """The page as HTML text; `refresh_s` makes a browser load it again and again."""
    names = ", ".join(names_of(reports))
    reload = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    body = "".join(_run(report) for report in reports) if len(reports) == 1 else _comparison(reports)
    written = datetime.datetime.fromtimestamp(reports[0].moment.now)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,">{reload}<title>{_text(names)} – bevctl monitor</title>'
        f"<style>{STYLE}</style></head><body><main>{body}"
        f"<footer>bevctl {bevctl.__version__}, {written:%Y-%m-%d %H:%M:%S}</footer></main></body></html>\n"
    )


def _text(value: object) -> str:
    """Text from anywhere as harmless HTML: markup escaped, control characters spelled out."""
    return html.escape(printable(str(value)))


def _run(report: Report) -> str:
    return (
        _header(report)
        + _alarms(report.alarms)
        + f'<section class="plots">{_plots([report])}{_parts(report)}</section>'
        + _table(report)
        + _validation(report)
        + _gpus(report)
        + _background(report)
    )


def _comparison(reports: Sequence[Report]) -> str:
    heads = "".join(
        f'<div class="s{i % COLOURS} run">{_header(r)}{_alarms(r.alarms)}</div>' for i, r in enumerate(reports)
    )
    return f'<div class="runs">{heads}</div><section class="plots">{_plots(reports)}</section>{_differences(reports)}'


def _header(report: Report) -> str:
    state = report.state.name
    facts = [
        ("progress", wording.position(report)),
        ("time left", wording.remaining(report)),
        ("done at", ", ".join(f"{epoch} {time}" for epoch, time in wording.coming_epochs(report, 12))),
        ("speed", wording.speed(report)),
        ("precision", wording.precision(report)),
        ("disk", wording.disk(report)),
        ("source", f"{report.log.path} ({report.log.format}, {report.log.records} records)"),
    ]
    share = report.progress.share
    bar = "" if share is None else f'<progress max="1" value="{share:.4f}"></progress>'
    rows = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts if value)
    return (
        f'<header><h1>{_text(report.name)} <span class="state {state}">{wording.SYMBOLS[state]} {state}</span></h1>'
        f"<p>{_text(report.state.why)}</p>{bar}<dl>{rows}</dl></header>"
    )


def _alarms(alarms: Sequence[Alarm]) -> str:
    if not alarms:
        return '<section><h2>Alarms</h2><p class="quiet">none</p></section>'
    return f"<section><h2>Alarms</h2>{''.join(map(_alarm, alarms))}</section>"


def _alarm(alarm: Alarm) -> str:
    severity = alarm.severity.value
    evidence = "".join(f"<li><b>{_text(e.where)}</b> {_text(e.what)}</li>" for e in alarm.evidence)
    fix = f'<p class="fix">{_text(alarm.fix)}</p>' if alarm.fix else ""
    is_open = "" if alarm.severity is Severity.INFO else " open"
    tag = f'<span class="tag">{wording.SEVERITIES[severity]} {severity} {alarm.id}</span>'
    return (
        f'<details class="alarm {severity}"{is_open}><summary>{tag} {_text(alarm.title)}</summary>'
        f"<ul>{evidence}</ul><p>{_text(alarm.cause)}</p>{fix}</details>"
    )


def _plots(reports: Sequence[Report]) -> str:
    """A figure of each main metric with one curve a run; a single run also shows its data time beside its iteration."""
    figures = []
    for name, unit, log in PLOTS:
        several = len(reports) > 1
        labels = names_of(reports) if several else [name]
        lines = [_line(label, report.history, name) for label, report in zip(labels, reports, strict=True)]
        if name == "iter_time_s" and not several:
            lines.append(_line("data_time_s", reports[0].history, "data_time_s"))
        figures.append(figure(name, unit, lines, () if several else _markers(reports[0]), log=log))
    return "".join(figures)


def _line(label: str, history: History, name: str) -> Line:
    return Line(printable(label), history.iters, history.column(name), history.iters[history.nonfinite(name)])


def _markers(report: Report) -> list[Marker]:
    """Resumes and evaluations."""
    resumes = [Marker(s.first_iter, f"resumed at {s.first_iter}") for s in report.log.segments if s.reason == "resume"]
    scores = [Marker(v.iter, f"evaluated after epoch {v.epoch}") for v in report.log.validations if v.iter is not None]
    return resumes + scores


def _parts(report: Report) -> str:
    """A figure of each task's losses; of a task with many parts, the largest."""
    history = report.history
    if len(history.losses) < 2:
        return ""
    tasks = by_task(history.losses)
    groups: dict[str, list[str]] = {f"losses of {task}": parts for task, parts in tasks.items() if len(parts) > 1}
    groups |= {"other losses": [parts[0] for parts in tasks.values() if len(parts) == 1]}
    figures = []
    for title, names in groups.items():
        largest = sorted(names, key=lambda name: -_size(history, name))[:COLOURS]
        more = f", the {COLOURS} largest of {len(names)}" if len(names) > COLOURS else ""
        figures.append(figure(printable(f"{title}{more}"), "", [_line(name, history, name) for name in largest]))
    return "".join(figures)


def _size(history: History, name: str) -> float:
    values = history.finite(name)[1]
    return float(np.median(np.abs(values))) if len(values) else 0.0


def _table(report: Report) -> str:
    if not report.history.values:
        return ""
    columns = ("last", "mean", "min", "max", "p50", "p95", "nonfinite")
    rows = [
        [name, *(wording.number(metric[column]) for column in columns)]
        for name, metric in metrics_of(report.log, report.history).items()
    ]
    return _section("Metrics", _grid(["metric", *columns], rows))


def _grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, content: str) -> str:
    return f"<details><summary><h2>{title}</h2></summary>{content}</details>" if content else ""


def _validation(report: Report) -> str:
    validations = report.log.validations
    if not validations:
        return ""
    known = [name for name in ("mAP", "NDS", "mIoU") if any(name in v.metrics for v in validations)]
    names = known or list(validations[-1].metrics)[:6]
    rows = [[v.epoch, v.iter or "", *(wording.number(v.metrics.get(name)) for name in names)] for v in validations]
    return _section("Evaluations", _grid(["epoch", "iteration", *names], rows))


def _gpus(report: Report) -> str:
    rows = [
        [
            f"{gpu.index} {gpu.name}",
            f"{wording.number(gpu.utilization)} %",
            f"{wording.number(gpu.memory_used_gib)} of {wording.number(gpu.memory_total_gib)} GiB",
            f"{wording.number(gpu.power_w)} W",
            f"{wording.number(gpu.temperature_c)} °C",
            ", ".join(str(pid) for pid, _ in gpu.processes),
        ]
        for gpu in report.view.gpus
    ]
    columns = ["GPU", "use", "memory", "power", "temperature", "processes"]
    return f"<section><h2>GPUs</h2>{_grid(columns, rows)}</section>" if rows else ""


def _background(report: Report) -> str:
    """Environment and config, as the log has them."""
    header = report.log.header
    env = header.get("env") or {}
    facts = {key: header[key] for key in ("name", "host", "work_dir") if header.get(key)}
    rows = [[key, value] for key, value in {**facts, **env}.items()]
    config = str(header.get("config") or "")
    shown = config[:LONGEST_CONFIG] + ("\n…" if len(config) > LONGEST_CONFIG else "")
    return _section("Environment", _grid(["", ""], rows) if rows else "") + _section(
        "Config", f"<pre>{_text(shown)}</pre>" if shown else ""
    )


def _differences(reports: Sequence[Report]) -> str:
    rows = [[row.name, *map(wording.number, row.values), row.change] for row in differences(reports)]
    return f"<section><h2>Medians</h2>{_grid(['metric', *names_of(reports), 'change'], rows)}</section>"
