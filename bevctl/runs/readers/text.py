"""What all text logs share: everything in them that is not a line of numbers."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Row
from bevctl.runs.readers.events import FAILURE, FailureScanner, Found, describe
from bevctl.runs.readers.header import Dump, limits_of
from bevctl.runs.readers.mismatch import MismatchScanner
from bevctl.runs.readers.names import scores
from bevctl.runs.records import StepRecord

MESSAGE_ONLY = 0.01
"""How sure a logger's message without numbers is a format's."""
_RANK_PREFIX = re.compile(r"(?:\[\d+,\d+\]<std(?:out|err)>: ?|\[(?:rank|default)\d+\]: ?)+")
_PROGRESS_BAR = re.compile(r"\[[>\s.=#-]*\] ?\d+/\d+")
_APEX = re.compile(r"Gradient overflow\. +Skipping step, loss scaler \d+ reducing loss scale to ([\d.e+-]+)")
_DEEPSPEED = re.compile(r"OVERFLOW! .*Skipping step\. Attempted loss scale: ([\d.e+-]+)(?:, reducing to ([\d.e+-]+))?")
_SCHEDULER_ORDER = "lr_scheduler.step()` before `optimizer.step()"
_ALARMING = ("ERROR", "CRITICAL", "FATAL")
_BETWEEN_SCORES = re.compile(r",\s*|\s{2,}")
"""mmcv and mmengine part items so; a name may hold single spaces."""
_LONGEST_LINE = 200_000
_ENDS_DUMP = (
    "Traceback (most recent",
    "load checkpoint from",
    "Killed",
    "Segmentation fault",
    "Bus error",
    "Terminated",
    "slurmstepd",
    "terminate called",
)
"""What is not part of a header though it has no time."""
_NOT_SCORES = ("time", "data_time", "eta", "memory", "lr", "base_lr", "step")


@dataclass(frozen=True)
class Place:
    """Where a reader stands: the file's name, and the byte its line numbers count from."""

    file: str
    offset: int = 0

    def line(self, number: int) -> str:
        return f"{self.file}:{number}" if not self.offset else f"{self.file}, line {number} after byte {self.offset}"


@dataclass
class TextLog:
    """The part of a text log's reader that knows headers, messages and failures."""

    out: Collector
    place: Place
    _loss_scale: float | None = None
    _dump: Dump | None = None
    _failures: FailureScanner = field(default_factory=FailureScanner)
    _mismatch: MismatchScanner = field(default_factory=MismatchScanner)

    def jump(self, place: Place) -> None:
        """The next line is somewhere else in the file, or in another."""
        self.place = place
        self.close_dump()
        self._failures = FailureScanner()

    def step(self, step: Row | StepRecord) -> None:
        """Takes a train line's record, to which what was told between the lines is added."""
        if self._dump is not None:
            self.close_dump()
        if self._loss_scale is not None:
            step = step.record() if isinstance(step, Row) else step
            if step.loss_scale is None:
                step.loss_scale, step.skipped_steps = self._loss_scale, self.out.skipped_steps
        self.out.step(step)

    @staticmethod
    def without_rank(line: str) -> str:
        """Without the rank that mpirun, torchrun or PyTorch put in front."""
        return _RANK_PREFIX.sub("", line, count=1)

    # --- lines without a time ----------------------------------------------------------------------------------------

    def plain(self, line: str, number: int) -> None:
        """A line without a time in front."""
        line = line[:_LONGEST_LINE] if line[:1] != "[" else self.without_rank(line[:_LONGEST_LINE])
        if self._dump is not None:
            if not line.startswith(_ENDS_DUMP):
                self._dump.add(line)
                return
            self.close_dump()
        if not line.strip() or self._continues_known(line, number):
            return
        known, found = self._failures.scan(line)
        if found is not None:
            self.failure(found, number)
        elif not known and not self._known(line):
            self.out.log.unknown_lines += 1

    def _continues_known(self, line: str, number: int) -> bool:
        if "state_dict" in line or "size mismatch for " in line or "loaded state dict" in line:
            return self._mismatch.scan(line, self.out, self.place.line(number))
        if "kipping step" in line:
            return self._overflow(line, number)
        if _SCHEDULER_ORDER in line:
            self.out.event("warning", line.strip()[:300], self.place.line(number), topic="scheduler_order")
            return True
        return False

    def _known(self, line: str) -> bool:
        """Lines that tell nothing and are no riddle: rulers, mmcv's progress bars, what is loaded."""
        return not line.strip(" -=*_") or _PROGRESS_BAR.match(line) is not None or "load checkpoint from " in line

    def _overflow(self, line: str, number: int) -> bool:
        match = _APEX.search(line) or _DEEPSPEED.search(line)
        if match is None:
            return False
        try:
            scale = float(match[match.lastindex or 1])
        except ValueError:
            return False
        self._loss_scale = scale
        self.out.skipped(line.strip()[:200], self.place.line(number), scale)
        return True

    def failure(self, found: Found, number: int) -> None:
        """Reports a failure."""
        self.out.event(FAILURE, found.message, self.place.line(number), **found.data)

    # --- lines with a time -------------------------------------------------------------------------------------------

    def message(self, level: str, body: str, number: int) -> None:
        """A logger's message that is not a line of numbers; the collector's time is its time."""
        self.close_dump()
        if level not in _ALARMING:
            self._continues_known(body, number)
        elif (found := describe(body, raised=True)) is not None:
            self.failure(found, number)

    def open_dump(self, name: str, first: str = "") -> None:
        self._dump = Dump(name)
        if first:
            self._dump.add(first)

    def close_dump(self) -> None:
        if self._dump is not None:
            dump, self._dump = self._dump, None
            dump.close(self.out.log.header)
            if dump.name == "config":
                log = self.out.log
                epochs, iterations = limits_of(log.header["config"])
                log.max_epochs, log.max_iters = log.max_epochs or epochs, log.max_iters or iterations


def parse_scores(tail: str) -> dict[str, float]:
    """The metrics of a validation line, without what belongs to the run."""
    metrics = {}
    for item in _BETWEEN_SCORES.split(tail):
        name, _, value = item.rpartition(": ")
        if name and name not in _NOT_SCORES:
            with contextlib.suppress(ValueError):
                metrics[name] = float(value)
    return scores(metrics)
