"""Gathers what a reader finds into a RunLog: windows, resumes, clocks, and a memory that does not grow with the log."""

from __future__ import annotations

import math
from typing import Any

from bevctl.runs.records import EventRecord, RunLog, Segment, ValidationRecord
from bevctl.runs.store import RecordStore, Step
from bevctl.runs.window import Window

CLOCK_SLACK_S = 60.0
"""Clocks are corrected by less than this all the time."""
_LEFT_OUT = "The last line is not complete yet and was left out."
_MAX_EVENTS = 5000
_MAX_VALIDATIONS = 5000


class Collector:
    """What readers report to, line by line in the order of the log; `finish` completes `log`."""

    def __init__(self, log: RunLog, window: Window, timed: bool = True) -> None:
        self.log = log
        self.window = window
        self._bounded = timed and not window.is_open  # an estimated clock is known at the end alone
        self._holds = window.holds if self._bounded else Window().holds
        self.time: float | None = None
        """Clock of the line that is being read."""
        self._untimed = 0.0
        self._store = RecordStore()
        self._last: Step | None = None
        self._last_time = -math.inf
        self._opened: EventRecord | None = None
        self._skipped = 0

    # --- what readers call -------------------------------------------------------------------------------------------

    def step(self, record: Step) -> None:
        """Takes a training record. One whose iteration is not after the last one's replaces what it repeats."""
        last, time = self._last, record.time
        if time is None:
            time = self._estimate(record)
        elif time < self._last_time - CLOCK_SLACK_S:
            self._clock_went_back(self._last_time - time)
        if last is None or self._opened is not None or record.iter <= last.iter:
            self._connect(record, last)
        self._last = record
        self._last_time = time
        if self._bounded and not self._holds(time):
            return
        self._store.append(record)

    def replace_last(self, record: Step) -> None:
        """Takes a record in place of the one before, of which it is the whole."""
        if self._last is not None:
            self._store.replace_last(self._last, record)
        self._last = record

    def validation(self, epoch: int, iteration: int | None, metrics: dict[str, float]) -> None:
        """Takes the scores of an evaluation; of more than a few thousand the oldest are dropped."""
        if not metrics or not self._holds(self.time):
            return
        self.log.validations.append(ValidationRecord(epoch, iteration, self._now(), metrics))
        del self.log.validations[:-_MAX_VALIDATIONS]

    def event(self, kind: str, message: str, where: str = "", **data: Any) -> EventRecord:
        """Takes an event at the current time; one that repeats the last counts it up instead."""
        record = EventRecord(kind, message, self._now(), data=data, where=where)
        if self._last is not None:
            record.iter, record.epoch = self._last.iter, self._last.epoch
        self.add_event(record)
        return record

    def add_event(self, record: EventRecord) -> None:
        """Takes an event as a log has it."""
        if not self._holds(record.time):
            return
        known = self.log.events
        for earlier in reversed(known[-8:]):
            if earlier.kind in ("start", "resume") and earlier.kind != record.kind:
                break
            if (earlier.kind, earlier.message, earlier.iter) == (record.kind, record.message, record.iter):
                earlier.data["count"] = earlier.data.get("count", 1) + 1
                return
        known.append(record)
        del known[:-_MAX_EVENTS]

    def begin(self, kind: str, message: str, where: str = "", **data: Any) -> None:
        """A run starts (`start`) or goes on (`resume`) in the lines that follow."""
        self._skipped = 0 if kind == "start" else self._skipped
        opened = self._opened
        if opened is not None and (opened.kind, opened.message) == (kind, message):
            opened.data.update(data)
            return
        event = self.event(kind, message, where, **data)
        if opened is None or opened.kind != kind:
            self._opened = event

    def skipped(self, message: str, where: str, loss_scale: float | None) -> None:
        """A step was skipped for an overflow, and the loss scale became `loss_scale`."""
        self._skipped += 1
        data = {} if loss_scale is None else {"loss_scale": loss_scale}
        self.event("skipped_step", message, where, **data)

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    @property
    def last(self) -> Step | None:
        """The last training record, inside the window or not."""
        return self._last

    def note(self, sentence: str) -> None:
        """Something to tell the user of, once."""
        if sentence not in self.log.notes:
            self.log.notes.append(sentence)

    def left_out(self) -> None:
        """Notes that the last line was not read, as half of it is missing."""
        self.note(_LEFT_OUT)

    def go_on(self) -> None:
        """More lines follow, so what was left out is read after all."""
        self.log.notes = [note for note in self.log.notes if note != _LEFT_OUT]

    # --- order and time ----------------------------------------------------------------------------------------------

    def _now(self) -> float | None:
        if self.time is not None:
            return self.time
        return self._untimed if self.log.time_estimated else None

    def _estimate(self, record: Step) -> float:
        if self.time is not None:
            record.time = self.time
            return self.time
        self.log.time_estimated = True
        step = record.iter - self._last.iter if self._last is not None else 1
        seconds = record.iter_time_s
        if seconds is not None and 0.0 < seconds < 1e6:
            self._untimed += seconds * (step if 0 < step < 1e6 else 1)
        record.time = self._untimed
        return self._untimed

    def _clock_went_back(self, seconds: float) -> None:
        if self._opened is None:  # another start may well come from an older file
            self.event("clock_change", f"The clock went back by {seconds:.0f} s", seconds=seconds)

    def _connect(self, record: Step, last: Step | None) -> None:
        """Starts a segment at `record` where the log says so or its iterations repeat."""
        opened, self._opened = self._opened, None
        if last is not None and record.iter == last.iter and opened is None:
            self._store.drop_from(record.iter)  # the same iteration, told twice: a progress bar
            return
        kind = self._kind(record, opened)
        if last is not None and record.iter <= last.iter:
            dropped = self._store.drop_from(record.iter)
            if opened is None:
                opened = self.event(kind, self._sentence(kind, record, last))
            opened.data.update(from_iter=last.iter, to_iter=record.iter, replaced=dropped)
        self._close_segment()
        self.log.segments.append(Segment(kind, record.iter, record.iter, record.time, record.time))

    def _close_segment(self) -> None:
        if self.log.segments and self._last is not None:
            self.log.segments[-1].last_iter, self.log.segments[-1].last_time = self._last.iter, self._last.time

    def _kind(self, record: Step, opened: EventRecord | None) -> str:
        first = self.log.segments[0].first_iter if self.log.segments else None
        if opened is not None and (opened.kind == "resume" or first is None):
            return opened.kind
        return "start" if first is None or record.iter <= first else "resume"

    @staticmethod
    def _sentence(kind: str, record: Step, last: Step) -> str:
        if kind == "start":
            return f"Another run starts after iteration {last.iter}"
        return f"Resumed: iteration {record.iter} follows {last.iter}"

    def finish(self, modified: float | None) -> RunLog:
        """Completes the log; `modified` is the newest file's mtime, which an estimated clock counts back from."""
        log = self.log
        self._close_segment()
        log.modified = modified
        log.last_time = self.time
        if log.time_estimated and modified is not None:
            self._set_clock(modified)
        log.steps, log.records, log.metrics, log.interval = self._store.finish()
        return log

    def _set_clock(self, modified: float) -> None:
        """Moves estimated times so that the last record was written when the file was, then applies the window."""
        shift = modified - self._untimed
        log = self.log
        steps: list[Step | EventRecord | ValidationRecord] = [*self._store.held()]
        for item in (*steps, *log.events, *log.validations):
            if item.time is not None:
                item.time += shift
        for segment in log.segments:
            segment.first_time = None if segment.first_time is None else segment.first_time + shift
            segment.last_time = None if segment.last_time is None else segment.last_time + shift
        log.last_time = modified
        self.note("The log has no clock times: they are counted back from the file's mtime by its iteration times.")
        holds = self.window.holds
        self._store.retain(holds)
        log.events = [event for event in log.events if holds(event.time)]
        log.validations = [scores for scores in log.validations if holds(scores.time)]
