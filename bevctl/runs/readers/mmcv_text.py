"""Text logs of mmcv 1.x (mmdet, mmdet3d, mit-bevfusion with torchpack) and bevctl's own log.txt."""

from __future__ import annotations

import re

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Row
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.messages import openmmlab_message
from bevctl.runs.readers.text import MESSAGE_ONLY, Place, TextLog, parse_scores
from bevctl.runs.readers.train_lines import LONGEST_LINE, TrainLines

_STAMP = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})"
_PREFIX = (
    rf"(?:{_STAMP}(?: - \S+ - [A-Z]+ - | \| [^|]+\| *[A-Z]+ *\| ))?"
    r"(?:Epoch \[(\d{1,9})\]\[ *(\d{1,9})/(\d{1,9})\]|Iter \[ *(\d{1,12})/(\d{1,12})\])\s+(?=\S)"
)
_TRAIN = re.compile(_PREFIX, re.ASCII)
_MESSAGE = re.compile(rf"{_STAMP}(?: - \S+ - ([A-Z]+) - ?| \| [^|]+\| *([A-Z]+) *\| )(.*)", re.ASCII)
_SCORES = re.compile(r"(?:Epoch\(val\) \[(\d{1,9})\]\[\d+\]|Iter\(val\) \[\d+\])\s+(.*)", re.ASCII)
_STAMP_INSIDE = re.compile(_STAMP + r"(?= - | \| )", re.ASCII)
_PART_OF_LINE = re.compile(r"[\w./@\[\]:,+\- \t]+", re.ASCII)


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    message = _MESSAGE.match(line)
    return clock.time(message[1]) if message is not None else None


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
        self._lines = TrainLines(out, clock, _PREFIX)
        self._open = ""
        """The last train line, which the next line may continue, and the record made of it."""
        self._open_row: Row | None = None

    def jump(self, place: Place) -> None:
        self._text.jump(place)
        self._open = ""

    def feed(self, lines: list[str], number: int) -> None:
        parse, take = self._lines.row, self._text.step
        for line in lines:
            row = parse(line)
            if row is None:
                self._other(line, number)
            else:
                take(row)
                self._open, self._open_row = line, row
            number += 1

    def feed_torn(self, line: str, number: int) -> bool:
        row = self._lines.torn_row(line)
        if row is None and self._lines.begins(line):
            self._out.left_out()
            return False
        if row is not None:
            self._text.step(row)
        else:
            self._other(line, number)
        return True

    def finish(self) -> None:
        self._text.close_dump()

    def _other(self, line: str, number: int) -> None:
        if line[:1] == "[":
            line = self._stripped(line)
            row = self._lines.row(line)
            if row is not None:
                self._text.step(row)
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
            self._open, self._open_row = line, None
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
        """Joins a train line that a terminal wrapped; whether `line` was a part of one."""
        before, row = self._open, self._open_row
        ends_open = before.endswith((",", ":"))
        if not _PART_OF_LINE.fullmatch(line) or _STAMP_INSIDE.match(line) or (line[0] == " " and not ends_open):
            return False
        whole = before + (" " if ends_open else "") + line
        joined = self._lines.row(whole)
        if len(whole) > LONGEST_LINE or (joined is None and row is not None):
            return False
        self._open, self._open_row = whole, joined
        if joined is None:
            return True
        if row is None:
            self._text.step(joined)
        else:
            self._out.replace_last(joined)
        return True
