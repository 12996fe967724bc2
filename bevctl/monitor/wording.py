"""Numbers, times and states as people read them; shared by screen and page."""

from __future__ import annotations

import datetime
import math

import numpy as np

from bevctl.monitor.history import History
from bevctl.monitor.report import Report
from bevctl.monitor.state import span

SYMBOLS = {"running": "▶", "stalled": "⏸", "finished": "✔", "died": "✘", "ended": "■"}
SEVERITIES = {"fail": "✘", "warn": "!", "info": "i"}
MAIN = ("loss", "grad_norm", "lr", "loss_scale", "iter_time_s", "memory_gib")
"""Metrics every view shows first, where the log has them."""


def number(value: float | None) -> str:
    """A figure in about four digits; a dash for none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 1e3 else f"{value:.4g}"
    return f"{value:.3g}"


def count(value: int | None) -> str:
    """A whole number with separators; a question mark for none."""
    return "?" if value is None else f"{value:,}"


def moment(time: float | None, now: float) -> str:
    """A Unix time as local clock time, with the day where it is not today's."""
    if time is None:
        return "-"
    try:
        there, here = datetime.datetime.fromtimestamp(time), datetime.datetime.fromtimestamp(now)
    except (ValueError, OverflowError, OSError):
        return "-"
    if there.date() == here.date():
        return f"{there:%H:%M}"
    return f"{there:%a %H:%M}" if abs(time - now) < 6 * 86400 else f"{there:%Y-%m-%d %H:%M}"


def position(report: Report) -> str:
    """Epoch and iteration, of how many."""
    progress = report.progress
    if progress.iter is None:
        return "no training record yet"
    epochs = f"epoch {progress.epoch}" + (f" of {progress.max_epochs}" if progress.max_epochs else "")
    if not progress.iters_per_epoch and progress.total_iters:
        epochs = ""  # the log counts iterations only
    of = f" of {count(progress.total_iters)}" if progress.total_iters else ""
    share = f" ({progress.share:.1%})" if progress.share is not None else ""
    return f"{epochs}{', ' if epochs else ''}iteration {count(progress.iter)}{of}{share}"


def remaining(report: Report) -> str:
    """Time to the end, and the clock time of it while the run is on."""
    eta = report.progress.eta_s
    if report.state.name == "finished" or eta is None:
        return ""
    if report.state.name not in ("running", "stalled") or report.last_time is None:
        return f"{span(eta)} of training left"
    return f"{span(eta)} left, done {moment(report.last_time + eta, report.moment.now)}"


def coming_epochs(report: Report, most: int) -> list[tuple[str, str]]:
    """(epoch, when it is done) of the next epochs; nothing for a run that does not go on."""
    if report.state.name not in ("running", "stalled") or report.last_time is None:
        return []
    last = report.last_time
    return [(f"epoch {e}", moment(last + s, report.moment.now)) for e, s in report.progress.epoch_finish_s[:most]]


def speed(report: Report) -> str:
    """Seconds an iteration, split into waiting for data and computing, and samples a second."""
    total, data = report.progress.iter_time_s, report.progress.data_time_s
    if total is None:
        return ""
    text = f"{number(total)} s/iter"
    if data is not None:
        text += f" = {number(data)} s data ({data / total:.0%}) + {number(total - data)} s compute"
    samples = report.history.finite("samples_per_s")[1]
    return text + (f", {number(float(np.median(samples[-100:])))} samples/s" if len(samples) else "")


def precision(report: Report) -> str:
    """FP16 or not, the scale and its skips, as far as the log tells."""
    facts = report.precision
    parts = [half(report)]
    if facts.loss_scale is not None:
        parts.append(f"loss scale {number(facts.loss_scale)}")
    if facts.skipped_steps is not None and facts.fp16 is not False:
        parts.append(f"{facts.skipped_steps} steps skipped")
    if facts.scale_drops:
        parts.append(f"{facts.scale_drops} drops of the scale")
    return ", ".join(part for part in parts if part)


def half(report: Report) -> str:
    """The number format, as far as it is known."""
    facts = report.precision
    return facts.dtype.upper() if facts.dtype else "not FP16" if facts.fp16 is False else ""


def shown_metrics(history: History) -> list[str]:
    """Metrics worth a line: the main ones, then the parts of the loss, those left out that are always zero."""
    return [name for name in (*MAIN, *history.losses) if name in history and name not in always_zero(history)]


def always_zero(history: History) -> list[str]:
    """Parts of the loss that are zero in every record."""
    return [name for name in history.losses if not history.values[name][history.logged[name]].any()]


def disk(report: Report) -> str:
    """Space left, and whether it lasts."""
    space = report.view.disk
    if space is None:
        return ""
    verdict = {True: "enough to the end", False: "NOT enough to the end", None: ""}[space.suffices]
    needed = "" if space.needed is None else f", {space.needed / 2**30:.1f} GiB still needed"
    return f"{space.free / 2**30:,.1f} GiB left{needed}" + (f": {verdict}" if verdict else "")
