"""How far a run is, how fast, and when each coming epoch will be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bevctl.monitor.history import Column, History
from bevctl.runs.records import RunLog, StepRecord

RECENT = 100
"""Records that the present speed is measured over."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; None for what its log does not tell."""

    epoch: int | None = None
    iter: int | None = None
    """Attempted steps since the start of the run."""
    iters_per_epoch: int | None = None
    max_epochs: int | None = None
    total_iters: int | None = None
    iter_time_s: float | None = None
    """Median of the recent records."""
    data_time_s: float | None = None
    evaluation_s: float | None = None
    """Usual length of an evaluation."""
    eta_s: float | None = None
    """Time to the end if the run goes on as now, evaluations included."""
    epoch_finish_s: tuple[tuple[int, float], ...] = ()
    """For each coming epoch, the seconds after the last record at which it is done, its evaluation left out."""

    @property
    def share(self) -> float | None:
        """How much of the run is done, 0..1."""
        if not self.total_iters or self.iter is None:
            return None
        return min(self.iter / self.total_iters, 1.0)

    @property
    def epochs_left(self) -> int | None:
        """Epochs that are not complete."""
        if self.total_iters is None or self.iter is None or not self.iters_per_epoch:
            return None
        return -(-(self.total_iters - min(self.iter, self.total_iters)) // self.iters_per_epoch)


def progress_of(log: RunLog, history: History) -> Progress:
    """The progress of a run at its last record."""
    last = log.steps[-1] if log.steps else None
    total = _total(log)
    iter_time = _recent_median(history, "iter_time_s") or _time_by_clock(log.steps)
    lengths = evaluation_lengths(log)
    evaluation = float(np.median(lengths)) if lengths else None
    left = None if total is None or last is None else max(total - last.iter, 0)
    finish = _finish(log, last, total, iter_time, evaluation)
    length = _epoch_length(log)
    return Progress(
        epoch=_epoch(log, last, length),
        iter=last.iter if last else None,
        iters_per_epoch=length,
        max_epochs=log.max_epochs,
        total_iters=total,
        iter_time_s=iter_time,
        data_time_s=_recent_median(history, "data_time_s"),
        evaluation_s=evaluation,
        eta_s=_eta(log, left, iter_time, len(finish) * (evaluation or 0.0)),
        epoch_finish_s=finish,
    )


def _total(log: RunLog) -> int | None:
    if log.max_iters is not None:
        return log.max_iters
    return log.max_epochs * log.iters_per_epoch if log.max_epochs and log.iters_per_epoch else None


def _epoch_length(log: RunLog) -> int | None:
    """Iterations an epoch; of a run that counts iterations only, what its two limits give."""
    if log.iters_per_epoch or not log.max_iters or not log.max_epochs or log.max_iters % log.max_epochs:
        return log.iters_per_epoch
    return log.max_iters // log.max_epochs


def _epoch(log: RunLog, last: StepRecord | None, length: int | None) -> int | None:
    """The epoch of the last record; a run that counts iterations only logs epoch 1 throughout."""
    if last is None:
        return None
    return last.epoch if log.iters_per_epoch or not length else -(-last.iter // length)


def _recent_median(history: History, name: str) -> float | None:
    """Median, which an iteration that waited for an evaluation does not move."""
    _, values = history.finite(name)
    return float(np.median(values[-RECENT:])) if len(values) else None


def _time_by_clock(steps: Sequence[StepRecord]) -> float | None:
    """Seconds an iteration, from the clock times of the records."""
    pairs = [(step.time, step.iter) for step in steps[-RECENT:] if step.time is not None]
    times, iters = (
        (np.diff(np.array(column, dtype=np.float64)) for column in zip(*pairs, strict=True)) if pairs else ((), ())
    )
    rates: Column = np.array([time / step for time, step in zip(times, iters, strict=True) if step > 0 and time > 0])
    return float(np.median(rates)) if len(rates) else None


def evaluation_lengths(log: RunLog) -> list[float]:
    """Seconds from the last training record before each evaluation to its scores; none without clock times."""
    if log.time_estimated:
        return []
    times = np.array([step.time for step in log.steps if step.time is not None])
    lengths = []
    for validation in log.validations:
        before = times[times <= validation.time] if validation.time is not None else times[:0]
        if validation.time is not None and len(before):
            lengths.append(float(validation.time - before[-1]))
    return lengths


def _finish(
    log: RunLog, last: StepRecord | None, total: int | None, iter_time: float | None, evaluation: float | None
) -> tuple[tuple[int, float], ...]:
    """(epoch, seconds after the last record) of each epoch that is not done yet."""
    length = _epoch_length(log)
    if last is None or total is None or iter_time is None or not length:
        return ()
    every = _epochs_an_evaluation(log)
    finish = []
    for number, epoch in enumerate(range(last.iter // length + 1, -(-total // length) + 1)):
        waits = number * (evaluation or 0.0) / every if every else 0.0
        finish.append((epoch, (min(epoch * length, total) - last.iter) * iter_time + waits))
    return tuple(finish)


def _epochs_an_evaluation(log: RunLog) -> float | None:
    """Epochs between two evaluations; None where none was seen."""
    epochs = sorted({validation.epoch for validation in log.validations})
    if not epochs:
        return None
    return max(float(np.median(np.diff(epochs))) if len(epochs) > 1 else float(epochs[0]), 1.0)


def _eta(log: RunLog, left: int | None, iter_time: float | None, evaluations_s: float) -> float | None:
    if left is not None and iter_time is not None:
        return left * iter_time + (evaluations_s if left else 0.0)
    return next((step.eta_s for step in reversed(log.steps[-RECENT:]) if step.eta_s is not None), None)
