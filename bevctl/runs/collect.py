"""Gathers what a reader finds into a RunLog: windows, resumes, clocks, and a memory that does not grow with the log."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bevctl.runs.records import EventRecord, RunLog, Segment, StepRecord, ValidationRecord
from bevctl.runs.statistics import Accumulator
from bevctl.runs.window import Window

KEEP = 10_000
"""Records held one by one; of more, every second, fourth, ... is kept."""
CLOCK_SLACK_S = 60.0
"""Clocks are corrected by less than this all the time."""
_MAX_EVENTS = 5000
_MAX_VALIDATIONS = 5000
_METRICS = (
    "loss",
    "grad_norm",
    "loss_scale",
    "lr",
    "iter_time_s",
    "data_time_s",
    "memory_gib",
    "samples_per_s",
    "skipped_steps",
)
_EXTRA_METRICS = ("device_memory_gib", "gpu_util")


class Collector:
    """What readers report to, line by line in the order of the log; `finish` completes `log`."""

    def __init__(self, log: RunLog, window: Window, timed: bool = True) -> None:
        self.log = log
        self.window = window
        self._holds = window.holds if timed else Window().holds  # an estimated clock is known at the end alone
        self.time: float | None = None
        """Clock of the line that is being read."""
        self._untimed = 0.0
        self._steps: list[StepRecord] = []
        self._recent: list[StepRecord] = []
        self._stride = 1
        self._totals: dict[str, Accumulator] = {}
        self._last: StepRecord | None = None
        self._segment: Segment | None = None
        self._opened: EventRecord | None = None
        self._strides: Counter[int] = Counter()
        self._skipped = 0

    # --- what readers call -------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        """Takes a training record. One whose iteration is not after the last one's replaces what it repeats."""
        last = self._last
        if record.time is None:
            self._estimate(record)
        elif last is not None and last.time is not None and record.time < last.time - CLOCK_SLACK_S:
            self._clock_went_back(last.time, record.time)
        if last is None or self._opened is not None or record.iter <= last.iter:
            self._connect(record, last)
        else:
            self._strides[record.iter - last.iter] += 1
        self._last = record
        segment = self._segment
        if segment is not None:
            segment.last_iter, segment.last_time = record.iter, record.time
        if self._holds(record.time):
            self._recent.append(record)
            if len(self._recent) >= KEEP:
                self._fold()

    def replace_last(self, record: StepRecord) -> None:
        """Takes a record in place of the one before, of which it is the whole."""
        if self._recent and self._recent[-1] is self._last:
            self._recent[-1] = record
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
        for earlier in known[-8:]:
            if (earlier.kind, earlier.message, earlier.iter) == (record.kind, record.message, record.iter):
                earlier.data["count"] = earlier.data.get("count", 1) + 1
                return
        known.append(record)
        del known[:-_MAX_EVENTS]

    def begin(self, kind: str, message: str, where: str = "", **data: Any) -> None:
        """A run starts (`start`) or goes on (`resume`) in the lines that follow."""
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
    def last(self) -> StepRecord | None:
        """The last training record, inside the window or not."""
        return self._last

    def note(self, sentence: str) -> None:
        """Something to tell the user of, once."""
        if sentence not in self.log.notes:
            self.log.notes.append(sentence)

    # --- order and time ----------------------------------------------------------------------------------------------

    def _now(self) -> float | None:
        if self.time is not None:
            return self.time
        return self._untimed if self.log.time_estimated else None

    def _estimate(self, record: StepRecord) -> None:
        if self.time is not None:
            record.time = self.time
            return
        self.log.time_estimated = True
        step = record.iter - self._last.iter if self._last is not None else 1
        seconds = record.iter_time_s
        if seconds is not None and 0.0 < seconds < 1e6:
            self._untimed += seconds * (step if 0 < step < 1e6 else 1)
        record.time = self._untimed

    def _clock_went_back(self, before: float, after: float) -> None:
        if self._opened is None:  # another start may well come from an older file
            seconds = before - after
            self.event("clock_change", f"The clock went back by {seconds:.0f} s", seconds=seconds)

    def _connect(self, record: StepRecord, last: StepRecord | None) -> None:
        """Starts a segment at `record` where the log says so or its iterations repeat."""
        opened, self._opened = self._opened, None
        repeats = last is not None and record.iter <= last.iter
        if last is not None and record.iter == last.iter and opened is None:
            self._drop_from(record.iter)  # the same iteration, told twice: a progress bar
            return
        kind = self._kind(record, opened)
        if repeats:
            assert last is not None
            dropped = self._drop_from(record.iter)
            if opened is None:
                opened = self.event(kind, self._sentence(kind, record, last))
            opened.data.update(from_iter=last.iter, to_iter=record.iter, replaced=dropped)
        self._segment = Segment(kind, record.iter, record.iter, record.time, record.time)
        self.log.segments.append(self._segment)

    def _kind(self, record: StepRecord, opened: EventRecord | None) -> str:
        first = self.log.segments[0].first_iter if self.log.segments else None
        if opened is not None and (opened.kind == "resume" or first is None):
            return opened.kind
        if first is None:
            return "start"
        return "start" if record.iter <= first else "resume"

    @staticmethod
    def _sentence(kind: str, record: StepRecord, last: StepRecord) -> str:
        if kind == "start":
            return f"Another run starts after iteration {last.iter}"
        return f"Resumed: iteration {record.iter} follows {last.iter}"

    def _drop_from(self, iteration: int) -> int:
        """Forgets the records from `iteration` on; the figures keep those that were folded in already."""
        dropped = _pop_from(self._recent, iteration)
        if not self._recent and self._steps:
            folded = _pop_from(self._steps, iteration) * self._stride
            self.log.records = max(0, self.log.records - folded)
            dropped += folded
        return dropped

    # --- flat memory -------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Adds the recent records to the figures, and keeps every `stride`-th of them."""
        _fold_into(self._totals, self._recent)
        self.log.records += len(self._recent)
        self._steps += self._recent[self._stride - 1 :: self._stride]
        self._recent = []
        while len(self._steps) > KEEP:
            self._steps = self._steps[1::2]
            self._stride *= 2

    def finish(self, modified: float | None) -> RunLog:
        """Completes the log; `modified` is the newest file's mtime, which an estimated clock counts back from."""
        log = self.log
        log.modified = modified
        log.last_time = self.time
        if log.time_estimated and modified is not None:
            self._set_clock(modified)
        self._finish_steps()
        if self._strides:
            log.interval = self._strides.most_common(1)[0][0]
        return log

    def _set_clock(self, modified: float) -> None:
        """Moves estimated times so that the last record was written when the file was, then applies the window."""
        shift = modified - self._untimed
        log = self.log
        timed: list[StepRecord | EventRecord | ValidationRecord] = [*self._steps, *self._recent]
        for item in (*timed, *log.events, *log.validations):
            if item.time is not None:
                item.time += shift
        for segment in log.segments:
            segment.first_time = None if segment.first_time is None else segment.first_time + shift
            segment.last_time = None if segment.last_time is None else segment.last_time + shift
        log.last_time = modified
        self.note("The log has no clock times: they are counted back from the file's mtime by its iteration times.")
        holds = self.window.holds
        self._steps = [step for step in self._steps if holds(step.time)]
        self._recent = [step for step in self._recent if holds(step.time)]
        log.events = [event for event in log.events if holds(event.time)]
        log.validations = [scores for scores in log.validations if holds(scores.time)]

    def _finish_steps(self) -> None:
        log, last = self.log, self._recent[-1:]
        if log.records:
            self._fold()
            log.steps = self._steps if self._steps[-1:] == last else self._steps + last
        else:
            _fold_into(self._totals, self._recent)
            log.records = len(self._recent)
            log.steps = self._recent
        log.metrics = {name: total.metric(_column(log.steps, name)[0]) for name, total in self._totals.items()}


def _pop_from(records: list[StepRecord], iteration: int) -> int:
    dropped = 0
    while records and records[-1].iter >= iteration:
        records.pop()
        dropped += 1
    return dropped


def _fold_into(totals: dict[str, Accumulator], records: list[StepRecord]) -> None:
    losses = dict.fromkeys(name for record in records for name in record.losses)
    for name in (*_METRICS, *_EXTRA_METRICS, *losses):
        values, iterations = _column(records, name)
        if values:
            totals.setdefault(name, Accumulator()).fold(values, iterations)


def _column(records: list[StepRecord], name: str) -> tuple[list[float], list[int]]:
    """Values of one metric where it was measured, and their iterations."""
    if name in _METRICS:
        values = [getattr(record, name) for record in records]
    elif name in _EXTRA_METRICS:
        values = [record.extra.get(name) for record in records]
    else:
        values = [record.losses.get(name) for record in records]
    if None in values:
        kept = [(value, record.iter) for value, record in zip(values, records, strict=True) if value is not None]
        return [value for value, _ in kept], [iteration for _, iteration in kept]
    return values, [record.iter for record in records]
