"""Text logs of mmengine: its file, and its console as nohup captures it (without a year)."""

from __future__ import annotations

import re

from bevctl.runs.collect import Collector
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.messages import openmmlab_message
from bevctl.runs.readers.text import MESSAGE_ONLY, Place, TextLog, parse_scores
from bevctl.runs.readers.train_lines import TrainLines

_STAMP = r"((?:\d{4}/)?\d\d/\d\d \d\d:\d\d:\d\d) - "
_PREFIX = (
    rf"(?:{_STAMP}\S+ - [A-Z]+ - )?"
    r"(?:Epoch\(train\) +\[ *(\d{1,9})\]\[ *(\d{1,9})/ *(\d{1,9})\]|Iter\(train\) +\[ *(\d{1,12})/ *(\d{1,12})\])"
    r"\s+(?=\S)"
)
_TRAIN = re.compile(_PREFIX, re.ASCII)
_MESSAGE = re.compile(rf"{_STAMP}\S+ - ([A-Z]+) - ?(.*)", re.ASCII)
_SCORES = re.compile(
    r"(?:Epoch|Iter)\((?:val|test)\) +(?:\[ *(\d{1,9})\])?\[ *(\d{1,12})/ *(\d{1,12})\]\s+(.*)", re.ASCII
)


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    message = _MESSAGE.match(line)
    return clock.time(message[1]) if message is not None else None


def recognises(line: str) -> float:
    """How sure `line` is this format's; messages without numbers are many programs'."""
    if _TRAIN.match(line):
        return 1.0
    return MESSAGE_ONLY if _MESSAGE.match(line) else 0.0


class MmengineText:
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        self._out = out
        self._clock = clock
        self._text = TextLog(out, place)
        self._lines = TrainLines(out, clock, _PREFIX)

    def jump(self, place: Place) -> None:
        self._text.jump(place)

    def feed(self, lines: list[str], number: int) -> None:
        parse, take = self._lines.row, self._text.step
        for line in lines:
            row = parse(line)
            if row is None:
                self._other(line, number)
            else:
                take(row)
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
            line = self._text.without_rank(line)
            row = self._lines.row(line)
            if row is not None:
                self._text.step(row)
                return
        message = _MESSAGE.match(line)
        body = line
        if message is not None:
            time, level, body = message.groups()
            self._out.time = self._clock.time(time)
        found = _SCORES.match(body)
        if found is not None:
            self._scores(found)
        elif message is not None:
            openmmlab_message(self._text, level, body, number)
        else:
            self._text.plain(line, number)

    def _scores(self, found: re.Match[str]) -> None:
        self._text.close_dump()
        epoch, inner, length, tail = found.groups()
        if inner != length:
            return  # how far the evaluation is
        last = self._out.last
        metrics = parse_scores(tail)
        self._out.validation(int(epoch) if epoch else last.epoch if last else 1, last.iter if last else None, metrics)
