"""What the alarms look at: one run with everything known about it, and the trouble that a rule finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bevctl.config.span import Span
from bevctl.finding import Evidence, Finding, Severity
from bevctl.monitor.disk import Disk
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.history import Column, History, Mask, history_of
from bevctl.monitor.progress import Progress
from bevctl.monitor.state import State
from bevctl.runs.records import EventRecord, RunLog

SETTLING_ITERS = 100
"""Iterations after a start or a resume in which the loss scale is still being found."""
WARMING_ITERS = 50
"""Iterations after a start or a resume whose time and memory are not the usual ones."""
FRESH_ITERS = 200
"""A log whose first record is no later shows the run from its beginning."""


@dataclass(frozen=True)
class Trouble:
    """What a rule found; the table of alarms adds the id."""

    severity: Severity
    title: str
    evidence: tuple[Evidence, ...]
    cause: str
    fix: str | None
    iter: float | None = None
    """Iteration of the first record that shows it."""


@dataclass(frozen=True)
class Alarm(Finding):
    """A finding about a run, with the record that shows it first: epoch, iter and Unix time."""

    first_record: dict[str, float | None] | None = None


@dataclass(frozen=True)
class View:
    """A run, or a window of it, as the rules see it."""

    log: RunLog
    history: History
    """Of the log's training records."""
    state: State
    progress: Progress
    expect: Mapping[str, Span] = field(default_factory=dict)
    against: RunLog | None = None
    """The run that this one is compared with."""
    config: Mapping[str, Any] | None = None
    """The run's own resolved config, for a run of bevctl."""
    gpus: tuple[Gpu, ...] = ()
    disk: Disk | None = None

    @cached_property
    def other(self) -> History:
        """History of the run compared with; empty without one."""
        return history_of(self.against.steps, self.against.interval) if self.against else history_of([])

    @property
    def is_fresh(self) -> bool:
        """Whether the window shows the run from its beginning, and that was no resume."""
        segments = self.log.segments
        resumed = bool(segments) and segments[0].reason == "resume"
        return bool(len(self.history)) and self.history.iters[0] <= FRESH_ITERS and not resumed

    @cached_property
    def starts(self) -> list[float]:
        """Iterations after which the run began or went on; a log that is cut off at its front shows no beginning."""
        firsts = [float(s.first_iter) for s in self.log.segments if s.reason == "resume" or s.first_iter <= FRESH_ITERS]
        return [max(first - max(self.history.interval, 1.0), 0.0) for first in firsts]

    def near_start(self, iterations: float) -> Mask:
        """Records of the first `iterations` after a start or a resume, and at least the first record."""
        iters = self.history.iters
        length = max(iterations, self.history.interval)
        near = [(iters > start) & (iters <= start + length) for start in self.starts]
        return np.logical_or.reduce(near) if near else np.zeros(len(iters), dtype=np.bool_)

    @cached_property
    def settling(self) -> Mask:
        """Records in which the loss scale is still being found."""
        return self.near_start(SETTLING_ITERS)

    @cached_property
    def warm(self) -> History:
        """The records whose time and memory are the usual ones."""
        return self.history.rows(~self.near_start(WARMING_ITERS))

    def settled(self, name: str) -> tuple[Column, Column]:
        """Iterations and finite values of a metric, without those in which the loss scale is still being found."""
        return self.history.rows(~self.settling).finite(name)

    def events(self, *kinds: str) -> list[EventRecord]:
        """Events of these kinds, in their order."""
        return [event for event in self.log.events if event.kind in kinds]

    def where(self, iteration: float) -> str:
        """How evidence names an iteration."""
        rows = np.flatnonzero(self.history.iters >= iteration)
        epoch = int(self.history.epochs[rows[0]]) if len(rows) else None
        return f"iteration {iteration:.0f}" + (f" (epoch {epoch})" if epoch else "")
