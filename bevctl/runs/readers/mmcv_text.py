"""Text logs of mmcv 1.x (mmdet, mmdet3d, mit-bevfusion with torchpack) and bevctl's own log.txt."""

from __future__ import annotations

import re

from bevctl.runs.collect import Collector
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.messages import openmmlab_message
from bevctl.runs.readers.text import MESSAGE_ONLY, ItemParser, Place, TextLog, parse_scores
from bevctl.runs.records import StepRecord

_STAMP = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})"
_TRAIN = re.compile(
    rf"(?:{_STAMP}(?: - \S+ - [A-Z]+ - | \| [^|]+\| *[A-Z]+ *\| ))?"
    r"(?:Epoch \[(\d+)\]\[ *(\d+)/(\d+)\]|Iter \[ *(\d+)/(\d+)\])\s+(?=\S)",
    re.ASCII,
)
_MESSAGE = re.compile(rf"{_STAMP}(?: - \S+ - ([A-Z]+) - ?| \| [^|]+\| *([A-Z]+) *\| )(.*)", re.ASCII)
_SCORES = re.compile(r"(?:Epoch\(val\) \[(\d+)\]\[\d+\]|Iter\(val\) \[\d+\])\s+(.*)", re.ASCII)
_STAMP_INSIDE = re.compile(_STAMP + r"(?= - | \| )", re.ASCII)
_CONTINUATION = re.compile(
    r"[ ,]*(?:[\w./@\-]+: ?)?(?:-?[\d.]+(?:e[+-]?\d+)?|nan|-?inf)?(?:,|$)|[\w./@\-]+: ", re.ASCII
)
_WHOLE = re.compile(r"(?:\.\d{4}|nan|inf)\s*$", re.ASCII)
_LONGEST_LINE = 100_000


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    return clock.time(line) if _MESSAGE.match(line) else None


def recognises(line: str) -> float:
    """How sure `line` is this format's; messages without numbers are many programs'."""
    if _TRAIN.match(line):
        return 1.0
    return MESSAGE_ONLY if _MESSAGE.match(line) else 0.0


class MmcvText:
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        self._out = out
        self._clock = clock
        self._text = TextLog(out, place)
        self._items = ItemParser()
        self._open = ""
        """A train line that the next line may continue, and the record made of it."""
        self._open_record: StepRecord | None = None

    def jump(self, place: Place) -> None:
        self._text.jump(place)
        self._open = ""

    def feed(self, lines: list[str], number: int) -> None:
        match = _TRAIN.match
        for line in lines:
            found = match(line)
            if found is None or not self._train(line, found):
                self._other(line, number)
            number += 1

    def feed_torn(self, line: str, number: int) -> None:
        found = _TRAIN.match(line)
        if found is None:
            self._other(line, number)
            return
        before = self._items.layout.names
        record = self._record(line, found)
        whole = _WHOLE.search(line) and (not before or self._items.layout.names == before)
        if record is not None and whole:
            self._out.step(record)
        else:
            self._out.note("The last line is not complete yet and was left out.")

    def finish(self) -> None:
        self._text.close_dump()

    def _record(self, line: str, found: re.Match[str]) -> StepRecord | None:
        time, epoch, inner, length, iteration, last = found.groups()
        out = self._out
        if time is not None:
            out.time = self._clock.time(time)
        tail = line[found.end() :]
        if epoch is None:
            out.log.max_iters = int(last)
            return self._items.record(tail, 1, int(iteration), out.time)
        out.log.iters_per_epoch = count = int(length)
        return self._items.record(tail, int(epoch), (int(epoch) - 1) * count + int(inner), out.time)

    def _train(self, line: str, found: re.Match[str]) -> bool:
        record = self._record(line, found)
        if record is None:
            return False
        self._text.complete(record)
        self._out.step(record)
        self._open, self._open_record = line, record
        return True

    def _other(self, line: str, number: int) -> None:
        if line[:1] == "[":
            line = self._stripped(line)
            found = _TRAIN.match(line)
            if found is not None and self._train(line, found):
                return
        if self._open:
            if self._continue(line):
                return
            self._open = ""
        message = _MESSAGE.match(line)
        if message is None:
            self._text.plain(line, number)
            return
        time, level, torchpack_level, body = message.groups()
        self._out.time = self._clock.time(time)
        if body.startswith(("Epoch [", "Iter [")):
            self._open, self._open_record = line, None
        elif (found := _SCORES.match(body)) is not None:
            self._scores(found)
        else:
            openmmlab_message(self._text, level or torchpack_level, body, number)

    def _scores(self, found: re.Match[str]) -> None:
        self._text.close_dump()
        last = self._out.last
        epoch = int(found[1]) if found[1] else last.epoch if last else 1
        self._out.validation(epoch, last.iter if last else None, parse_scores(found[2]))

    def _stripped(self, line: str) -> str:
        """Without a launcher's rank, or the progress bar that a log line was appended to."""
        line = self._text.without_rank(line)
        found = _STAMP_INSIDE.search(line)
        return line[found.start() :] if found is not None else line

    def _continue(self, line: str) -> bool:
        """Joins a train line that a terminal wrapped; whether `line` is a part of one."""
        if not line or not _CONTINUATION.match(line) or _STAMP_INSIDE.match(line):
            return False
        gap = " " if self._open.endswith((",", ":")) else ""
        whole = self._open + gap + line
        found = _TRAIN.match(whole)
        record = self._record(whole, found) if found is not None else None
        if len(whole) > _LONGEST_LINE or (record is None and self._open_record is not None and found is not None):
            return False
        self._open = whole
        if record is None:
            return True
        if self._open_record is None:
            self._out.step(record)
        else:
            self._out.replace_last(record)
        self._open_record = record
        return True
