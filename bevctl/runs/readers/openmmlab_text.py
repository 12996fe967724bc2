"""Text logs of the OpenMMLab family: mmcv 1.x and mmengine differ in a few patterns only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Row
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.messages import openmmlab_message
from bevctl.runs.readers.text import MESSAGE_ONLY, Place, TextLog, parse_scores
from bevctl.runs.readers.train_lines import LONGEST_LINE, TrainLines

_PART_OF_LINE = re.compile(r"[\w./@\[\]:,+\- \t]+", re.ASCII)


@dataclass(frozen=True)
class Grammar:
    """How one of them writes."""

    train: str
    """Regular expression of all before a train line's items; its groups are those of TrainLines."""
    message: re.Pattern[str]
    """Any line with a time. Groups: time, level, text."""
    scores: re.Pattern[str]
    """Text of a validation line. Groups: epoch or None, iteration, iterations or None, items."""
    train_text: tuple[str, ...]
    """What the text of a train line begins with."""

    def stamp(self, line: str, clock: Clock) -> float | None:
        """Unix time of a line of this format."""
        message = self.message.match(line)
        return clock.time(message[1]) if message is not None else None

    def recognises(self, line: str) -> float:
        """How sure `line` is this format's; messages without numbers are many programs'."""
        if re.match(self.train, line, re.ASCII):
            return 1.0
        return MESSAGE_ONLY if self.message.match(line) else 0.0


class OpenMMLabText:
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place, grammar: Grammar) -> None:
        self._out = out
        self._clock = clock
        self._grammar = grammar
        self._text = TextLog(out, place)
        self._lines = TrainLines(out, clock, grammar.train)
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
        level, body = "", line
        message = self._grammar.message.match(line)
        if message is not None:
            time, level, body = message.groups()
            self._out.time = self._clock.time(time)
        if (found := self._grammar.scores.match(body)) is not None:
            self._scores(*found.groups())
        elif message is None:
            self._text.plain(line, number)
        elif body.startswith(self._grammar.train_text):
            self._open, self._open_row = line, None
        else:
            openmmlab_message(self._text, level, body, number)

    def _scores(self, epoch: str | None, inner: str, length: str | None, items: str) -> None:
        self._text.close_dump()
        if length is not None and inner != length:
            return  # how far the evaluation is
        last = self._out.last
        number = int(epoch) if epoch else last.epoch if last else 1
        self._out.validation(number, last.iter if last else None, parse_scores(items))

    def _stripped(self, line: str) -> str:
        """Without a launcher's rank, or the progress bar that a log line was appended to."""
        line = self._text.without_rank(line)
        if self._grammar.message.match(line):
            return line
        found = self._grammar.message.search(line[:LONGEST_LINE])
        return line[found.start() :] if found is not None else line

    def _continue(self, line: str) -> bool:
        """Joins a train line that a terminal wrapped; whether `line` was a part of one."""
        before, row = self._open, self._open_row
        ends_open = before.endswith((",", ":"))
        if not _PART_OF_LINE.fullmatch(line) or (line[0] == " " and not ends_open) or self._grammar.message.match(line):
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
