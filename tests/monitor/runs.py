"""Runs made of columns, for rules and pictures; nothing is read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bevctl.monitor.history import history_of
from bevctl.monitor.report import Circumstances, Report, metrics_of, report_on
from bevctl.runs.records import RunLog, Segment, StepRecord
from bevctl.runs.statistics import Metric

NOW = 1_790_000_000.0
FIELDS = {
    *("lr", "loss", "grad_norm", "loss_scale", "skipped_steps", "iter_time_s"),
    *("data_time_s", "memory_gib", "samples_per_s"),
}
Values = Any
"""Values of all records in their order, or one number for all of them."""


def make_log(
    records: int,
    columns: Mapping[str, Values],
    *,
    interval: int = 50,
    first: int | None = None,
    reason: str = "start",
    seconds: float = 0.6,
    ends: float = NOW - 5,
    **fields: Any,
) -> RunLog:
    """A log of `records` records, `interval` iterations apart, whose last one was written at `ends`.

    `columns` holds values by metric, a scalar standing for all records; names that are no field are losses.
    """
    first = interval if first is None else first
    iters = [first + interval * row for row in range(records)]
    full: dict[str, list[Any]] = {
        name: [value] * records if np.isscalar(value) else list(value) for name, value in columns.items()
    }
    steps = []
    for row, iteration in enumerate(iters):
        values = {name: column[row] for name, column in full.items() if column[row] is not None}
        own: dict[str, Any] = {name: float(value) for name, value in values.items() if name in FIELDS}
        losses = {name: float(value) for name, value in values.items() if name not in FIELDS}
        time = ends - (records - 1 - row) * interval * seconds
        steps.append(StepRecord(1 + iteration // 1000, iteration, time, losses=losses, **own))
    segments = [Segment(reason, iters[0], iters[-1], steps[0].time, steps[-1].time)] if records else []
    log = RunLog(Path("run.log"), [Path("run.log")], "mmcv-text", steps=steps, segments=segments)
    log.records, log.interval, log.last_time, log.modified = records, interval, ends, ends
    for name, value in fields.items():
        setattr(log, name, value)
    history = history_of(steps)
    log.metrics = {name: _metric(figures) for name, figures in metrics_of(log, history).items()}
    return log


def _metric(figures: Mapping[str, Any]) -> Metric:
    return Metric(**figures, count=1, first_nonfinite=None)


def judge(log: RunLog, **circumstances: Any) -> Report:
    """The report on a log, seconds after its last record unless told otherwise."""
    return report_on(log, Circumstances(**{"now": NOW, **circumstances}))


def found(report: Report) -> dict[str, str]:
    """Severity by id of every alarm."""
    return {alarm.id: alarm.severity.value for alarm in report.alarms}


def loud(report: Report) -> dict[str, str]:
    """Alarms above info."""
    return {id: severity for id, severity in found(report).items() if severity != "info"}


def falling(records: int, start: float = 8.0, end: float = 2.0, noise: float = 0.03, seed: int = 0) -> np.ndarray:
    """A loss that falls, quickly at first."""
    shape = np.exp(-np.arange(records) / (records / 5 + 1))
    return (end + (start - end) * shape) * (1 + noise * np.random.default_rng(seed).standard_normal(records))


def healthy(records: int = 80, seed: int = 0, **changes: Values) -> dict[str, Values]:
    """Columns of a run that nothing is wrong with."""
    generator = np.random.default_rng(seed)
    loss = falling(records, seed=seed)
    columns: dict[str, Values] = {
        "loss": loss,
        "loss/object/heatmap": 0.6 * loss,
        "loss/map/focal": 0.4 * loss,
        "grad_norm": 12 + generator.standard_normal(records),
        "lr": np.linspace(2e-4, 1e-6, records),
        "iter_time_s": 0.6 + 0.02 * generator.standard_normal(records),
        "data_time_s": 0.02,
        "memory_gib": 18.2,
    }
    return {**columns, **changes}
