"""The training records of a run as columns, for rules and plots that look at a metric over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.runs.records import StepRecord

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

FIELDS = (
    "time",
    "lr",
    "loss",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "iter_time_s",
    "data_time_s",
    "memory_gib",
    "samples_per_s",
)
"""Metrics that are fields of a StepRecord; losses and foreign metrics come beside them."""
WINDOW_ITERS = 50
"""Iterations over which single noisy iterations are condensed, as most logs do by themselves."""


@dataclass(frozen=True)
class History:
    """Columns of equal length, one row a record, oldest first."""

    iters: Column
    epochs: Column
    values: dict[str, Column]
    """By metric, as logged: NaN and infinities stay; NaN too where a record does not have the metric."""
    logged: dict[str, Mask]
    """Which records have the metric."""
    losses: tuple[str, ...] = ()
    """Names of the parts of the loss, statistics that are logged beside them left out."""
    interval: float = 1.0
    """Iterations that a record stands for; of a long log only every n-th record is here."""

    def __len__(self) -> int:
        return len(self.iters)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def column(self, name: str) -> Column:
        """The metric with NaN wherever it is not a finite number."""
        values = self.values.get(name)
        return np.full(len(self), np.nan) if values is None else np.where(np.isfinite(values), values, np.nan)

    def nonfinite(self, name: str) -> Mask:
        """Records that have the metric, but not as a finite number."""
        if name not in self.values:
            return np.zeros(len(self), dtype=np.bool_)
        return self.logged[name] & ~np.isfinite(self.values[name])

    def finite(self, name: str) -> tuple[Column, Column]:
        """Iterations and values of the records in which the metric is finite."""
        values = self.column(name)
        kept = np.isfinite(values)
        return self.iters[kept], values[kept]

    def rows(self, kept: Mask) -> History:
        """The records that `kept` marks."""
        values = {name: column[kept] for name, column in self.values.items()}
        logged = {name: mask[kept] for name, mask in self.logged.items()}
        return History(self.iters[kept], self.epochs[kept], values, logged, self.losses, self.interval)

    def after(self, iteration: float) -> History:
        """The records later than `iteration`."""
        return self.rows(self.iters > iteration)

    def windows(self, name: str) -> tuple[Column, Column]:
        """Last iteration and median of the finite values, of as many records as make WINDOW_ITERS iterations.

        A log whose records are such windows already is given as it is.
        """
        iters, values = self.finite(name)
        step = round(WINDOW_ITERS / self.interval)
        if step <= 1 or not len(values):
            return iters, values
        ends = np.append(np.arange(step, len(values), step), len(values))
        return iters[ends - 1], np.array([np.median(values[max(end - step, 0) : end]) for end in ends])


def history_of(records: Sequence[StepRecord], interval: float | None = None) -> History:
    """The history of `records`, which are of training and stand for `interval` iterations each."""
    parts = dict.fromkeys(name for record in records for name in record.losses)
    extra = dict.fromkeys(name for record in records for name in record.extra)
    lists: dict[str, list[Any]] = {name: [getattr(record, name) for record in records] for name in FIELDS}
    lists |= {name: [record.losses.get(name) for record in records] for name in parts}
    lists |= {name: [_number(record.extra.get(name)) for record in records] for name in extra}
    logged = {name: np.array([value is not None for value in column]) for name, column in lists.items()}
    kept = [name for name in lists if logged[name].any()]
    return History(
        np.array([record.iter for record in records], dtype=np.float64),
        np.array([record.epoch for record in records], dtype=np.float64),
        {name: np.array(lists[name], dtype=np.float64) for name in kept},
        {name: logged[name] for name in kept},
        tuple(name for name in parts if name in kept and not name.startswith("stats/")),
        interval or 1.0,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
