"""Text logs of mmengine: its file, and its console as nohup captures it (without a year)."""

from __future__ import annotations

import re

from bevctl.runs.collect import Collector
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.messages import openmmlab_message
from bevctl.runs.readers.text import MESSAGE_ONLY, ItemParser, Place, TextLog, parse_scores
from bevctl.runs.records import StepRecord

_STAMP = r"((?:\d{4}/)?\d\d/\d\d \d\d:\d\d:\d\d) - "
_TRAIN = re.compile(
    rf"(?:{_STAMP}\S+ - [A-Z]+ - )?"
    r"(?:Epoch\(train\) +\[ *(\d+)\]\[ *(\d+)/ *(\d+)\]|Iter\(train\) +\[ *(\d+)/ *(\d+)\])\s+(?=\S)",
    re.ASCII,
)
_MESSAGE = re.compile(rf"{_STAMP}\S+ - ([A-Z]+) - ?(.*)", re.ASCII)
_SCORES = re.compile(r"(?:Epoch|Iter)\((?:val|test)\) +(?:\[ *(\d+)\])?\[ *(\d+)/ *(\d+)\]\s+(.*)", re.ASCII)
_STAMP_INSIDE = re.compile(_STAMP, re.ASCII)
_WHOLE = re.compile(r"(?:\.\d{4}|nan|inf)\s*$", re.ASCII)


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    return clock.time(line) if _MESSAGE.match(line) else None


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
        self._items = ItemParser()

    def jump(self, place: Place) -> None:
        self._text.jump(place)

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
        if record is not None and _WHOLE.search(line) and (not before or self._items.layout.names == before):
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
        return True

    def _other(self, line: str, number: int) -> None:
        if line[:1] == "[":
            line = self._text.without_rank(line)
            found = _TRAIN.match(line)
            if found is not None and self._train(line, found):
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
