"""One look at a run: everything that the screen, the page, the server and JSON show of it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bevctl.config.span import Span, parse_span
from bevctl.errors import BevctlError, ExitCode
from bevctl.finding import Severity
from bevctl.monitor.alarms.table import alarms_of
from bevctl.monitor.disk import Disk, disk_of
from bevctl.monitor.facts import PrecisionFacts, precision_facts
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.history import History, history_of
from bevctl.monitor.progress import Progress, progress_of
from bevctl.monitor.state import State, state_of
from bevctl.monitor.view import Alarm, View
from bevctl.runs.records import RunLog
from bevctl.runs.statistics import percentile


@dataclass(frozen=True)
class Circumstances:
    """What is known at the moment of a look, beside the log."""

    now: float
    """Unix time."""
    grew: bool = False
    """The log was seen to grow."""
    expect: Mapping[str, Span] = field(default_factory=dict)
    """Ranges of --expect; they replace those of the run's config."""
    against: RunLog | None = None
    gpus: tuple[Gpu, ...] = ()
    since: float | None = None
    until: float | None = None
    recent: RunLog | None = None
    """The last part of the run, which state and progress are told from where the window holds no record."""


@dataclass(frozen=True)
class Report:
    """A run at one moment."""

    view: View
    alarms: list[Alarm]
    precision: PrecisionFacts
    moment: Circumstances

    @property
    def log(self) -> RunLog:
        return self.view.log

    @property
    def history(self) -> History:
        return self.view.history

    @property
    def progress(self) -> Progress:
        return self.view.progress

    @property
    def state(self) -> State:
        return self.view.state

    @property
    def status(self) -> str:
        """pass, warn, fail, or unknown for a log without records and without trouble."""
        worst = max(
            (alarm.severity for alarm in self.alarms), key=lambda severity: severity.rank, default=Severity.INFO
        )
        if worst is not Severity.INFO:
            return worst.value
        return "pass" if self.log.records else "unknown"

    @property
    def name(self) -> str:
        """How the run is called: the name of its folder or file."""
        return self.log.path.resolve().name or str(self.log.path)

    def document(self) -> dict[str, Any]:
        """The body of the `bevctl.monitor/1` document."""
        return {
            "status": self.status,
            "state": self.state.name,
            "state_reason": self.state.why,
            "source": {"path": str(self.log.path), "format": self.log.format, "unknown_lines": self.log.unknown_lines},
            "window": self._window(),
            "progress": self._progress(),
            "metrics": metrics_of(self.log, self.history),
            "validation": [
                {"epoch": v.epoch, "iter": v.iter, "time": iso(v.time), "metrics": v.metrics}
                for v in self.log.validations
            ],
            "precision": asdict(self.precision),
            "gpus": [gpu.document() for gpu in self.view.gpus],
            "disk": _disk_document(self.view.disk),
            "alarms": [alarm_document(alarm) for alarm in self.alarms],
        }

    def _window(self) -> dict[str, Any]:
        times = self.history.column("time")
        known = times[np.isfinite(times)]
        first, last = (float(known[0]), float(known[-1])) if len(known) else (None, None)
        since, until = self.moment.since, self.moment.until
        return {
            "from": iso(first if since is None else since),
            "to": iso(last if until is None else until),
            "records": self.log.records,
        }

    def _progress(self) -> dict[str, Any]:
        progress = self.progress
        is_over = self.state.name == "finished"
        start = self.last_time if self.state.name in ("running", "stalled") else None
        return {
            "epoch": progress.epoch,
            "iter": progress.iter,
            "iters_per_epoch": progress.iters_per_epoch,
            "max_epochs": progress.max_epochs,
            "max_iters": progress.total_iters,
            "eta_s": 0.0 if is_over else progress.eta_s,
            "epoch_finish": [
                {"epoch": epoch, "in_s": seconds, "time": None if start is None else iso(start + seconds)}
                for epoch, seconds in (() if is_over else progress.epoch_finish_s)
            ],
        }

    @property
    def last_time(self) -> float | None:
        """Unix time of the last training record, in the window or not."""
        steps = self.log.steps or (self.moment.recent.steps if self.moment.recent else [])
        return steps[-1].time if steps else None


def report_on(log: RunLog, moment: Circumstances) -> Report:
    """Judges a run at one moment. Raises BevctlError for an unreadable `expect:` of its config."""
    with np.errstate(all="ignore"):  # a log may hold any number
        return _report(log, moment)


def _report(log: RunLog, moment: Circumstances) -> Report:
    history = history_of(log.steps, log.interval)
    around = moment.recent or log
    progress = progress_of(around, history_of(around.steps, around.interval) if moment.recent else history)
    state = state_of(around, progress, moment.now, moment.grew)
    config = _config(log)
    goes_on = state.name in ("running", "stalled")
    view = View(
        log=log,
        history=history,
        state=state,
        progress=progress,
        expect={**_expected(config), **moment.expect},
        against=moment.against,
        config=config,
        gpus=moment.gpus if goes_on else (),
        disk=disk_of(_folder(log), progress, _kept(log, config)) if goes_on else None,
    )
    return Report(view, alarms_of(view), precision_facts(log, history), moment)


def _folder(log: RunLog) -> Path:
    return log.path if log.path.is_dir() else log.path.parent


def _config(log: RunLog) -> dict[str, Any] | None:
    """The resolved config that a run of bevctl keeps; None for other logs, or where it cannot be read."""
    text = log.header.get("config")
    if log.format != "bevctl" or not isinstance(text, str):
        return None
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _expected(config: Mapping[str, Any] | None) -> dict[str, Span]:
    ranges = (config or {}).get("expect")
    return expected({str(key): str(value) for key, value in ranges.items()}) if isinstance(ranges, dict) else {}


def expected(ranges: Mapping[str, str]) -> dict[str, Span]:
    """The spans of texts by metric. Raises BevctlError for a text that is no range."""
    spans = {}
    for name, text in ranges.items():
        try:
            spans[name] = parse_span(text)
        except ValueError as error:
            raise BevctlError(
                f"The expected range of {name} must be {error}, not {text!r}.",
                "For example memory_gib=18:20; one side may be empty; 1.8:2.0@500:9000 names iterations.",
            ) from None
    return spans


def _kept(log: RunLog, config: Mapping[str, Any] | None) -> int | None:
    train = (config or {}).get("train")
    keep = train.get("keep") if isinstance(train, dict) else None
    return keep if log.format == "bevctl" and isinstance(keep, int) else None


def metrics_of(log: RunLog, history: History) -> dict[str, dict[str, Any]]:
    """Figures of each metric over the window's training records."""
    figures = {name: asdict(metric) for name, metric in log.metrics.items()}
    for name in history.values:
        if name not in figures and name != "time":
            figures[name] = _figures(history, name)
    wanted = ("last", "mean", "min", "max", "p50", "p95", "nonfinite")
    return {name: {key: metric[key] for key in wanted} for name, metric in figures.items()}


def _figures(history: History, name: str) -> dict[str, Any]:
    finite = np.sort(history.finite(name)[1]).tolist()
    return {
        "last": float(history.values[name][history.logged[name]][-1]),
        "mean": sum(finite) / len(finite) if finite else None,
        "min": finite[0] if finite else None,
        "max": finite[-1] if finite else None,
        "p50": percentile(finite, 0.5),
        "p95": percentile(finite, 0.95),
        "nonfinite": int(history.nonfinite(name).sum()),
    }


def alarm_document(alarm: Alarm) -> dict[str, Any]:
    """An alarm as JSON has it."""
    return {
        "id": alarm.id,
        "severity": alarm.severity.value,
        "title": alarm.title,
        "first_record": alarm.first_record,
        "evidence": [asdict(evidence) for evidence in alarm.evidence],
        "cause": alarm.cause,
        "fix": alarm.fix,
    }


def _disk_document(disk: Disk | None) -> dict[str, Any] | None:
    if disk is None:
        return None
    sizes = {"free_bytes": disk.free, "total_bytes": disk.total, "needed_bytes": disk.needed}
    return {"folder": str(disk.folder), **sizes, "suffices": disk.suffices}


def iso(time: float | None) -> str | None:
    """A Unix time as ISO 8601 in UTC; None for none, and for one that no calendar has."""
    if time is None:
        return None
    try:
        return datetime.datetime.fromtimestamp(time, datetime.timezone.utc).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def names_of(reports: Sequence[Report]) -> list[str]:
    """What to call several runs: their names, or their paths where two have the same name."""
    names = [report.name for report in reports]
    return names if len(set(names)) == len(names) else [str(report.log.path) for report in reports]


def exit_code(reports: Sequence[Report], fail_on: Severity) -> ExitCode:
    """Findings win over what could not be judged, and that over what is fine."""
    severities = [alarm.severity for report in reports for alarm in report.alarms]
    if any(severity.rank >= fail_on.rank for severity in severities):
        return ExitCode.FINDINGS
    return ExitCode.UNKNOWN if any(report.status == "unknown" for report in reports) else ExitCode.OK


def overall(reports: Sequence[Report]) -> str:
    """The status of several runs: fail, then unknown, then warn."""
    statuses = {report.status for report in reports}
    return next(status for status in ("fail", "unknown", "warn", "pass") if status in statuses)
