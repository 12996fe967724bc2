"""Text logs of OpenPCDet."""

from __future__ import annotations

import re

from bevctl.runs.collect import Collector
from bevctl.runs.layout import parse_eta
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.header import precision_of
from bevctl.runs.readers.text import MESSAGE_ONLY, Place, TextLog
from bevctl.runs.records import StepRecord

_MESSAGE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\s+([A-Z]+)\s\s?(.*)", re.ASCII)
_NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?|-?nan|-?inf)"
_TRAIN = re.compile(
    r"Train: +(\d{1,9})/(\d{1,9}) \( *\d+%\) \[ *(\d{1,9})/(\d{1,9}) \( *\d+%\)\] +"
    rf"Loss: {_NUMBER} \({_NUMBER}\) +LR: {_NUMBER} +"
    r"Time cost: [\d:]+/[\d:]+ \[[\d:]+/([\d:]{1,20})\] +Acc_iter (\d{1,12}) +"
    rf"Data time: {_NUMBER}\({_NUMBER}\) +Forward time: {_NUMBER}\({_NUMBER}\) +Batch time: {_NUMBER}\({_NUMBER}\)",
    re.ASCII,
)
_GPU = re.compile(r"\[\d+\] .*\| *-?\d+.C, *(\d{1,9}) % \| *(\d{1,9}) / *\d+ MB", re.ASCII)
_OPTION = re.compile(r"(\w+) +(\S.*)", re.ASCII)
_EVALUATED = re.compile(r"\*+ *Performance of EPOCH (\d{1,9})", re.ASCII)
_SCORE = re.compile(rf"([\w@.]+): {_NUMBER}$", re.ASCII)
_CHECKPOINT = re.compile(r"==> Loading parameters from checkpoint (\S+)", re.ASCII)


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    message = _MESSAGE.match(line)
    return clock.time(message[1]) if message is not None else None


def recognises(line: str) -> float:
    """How sure `line` is this format's; messages without numbers are many programs'."""
    message = _MESSAGE.match(line)
    if message is None:
        return 0.0
    return 1.0 if message[3].startswith("Train: ") else MESSAGE_ONLY


class OpenPCDet:
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        self._out = out
        self._clock = clock
        self._text = TextLog(out, place)
        self._config: list[str] = []
        self._gpu: dict[str, float] = {}
        self._evaluated: int | None = None
        self._scores: dict[str, float] = {}

    def jump(self, place: Place) -> None:
        self._text.jump(place)

    def feed(self, lines: list[str], number: int) -> None:
        for line in lines:
            message = _MESSAGE.match(line)
            if message is not None:
                self._out.time = self._clock.time(message[1])
                self._message(message[2], message[3], number)
            elif (gpu := _GPU.match(line)) is not None:
                self._gpu = {"gpu_util": float(gpu[1]), "device_memory_gib": float(gpu[2]) / 1024}
            else:
                self._text.plain(line, number)
            number += 1

    def feed_torn(self, line: str, number: int) -> bool:
        if "Train:" in line and not line.rstrip().endswith(")"):  # a train line ends with a number in brackets
            self._out.left_out()
            return False
        self.feed([line], number)
        return True

    def finish(self) -> None:
        self._text.close_dump()
        self._keep_scores()
        if self._config:
            header = self._out.log.header
            header["config"] = "\n".join(self._config)
            header["precision"] = precision_of(header["config"])

    def _message(self, level: str, body: str, number: int) -> None:
        train = _TRAIN.match(body)
        if train is not None:
            self._train(train)
        elif self._evaluated is not None and (score := _SCORE.match(body)) is not None:
            self._scores[score[1]] = float(score[2])
        else:
            self._other(level, body, number)

    def _train(self, found: re.Match[str]) -> None:
        epoch, epochs, inner, count, loss, mean, lr, left, total, data, _, forward, _, batch, _ = found.groups()
        out = self._out
        out.log.iters_per_epoch, out.log.max_epochs = int(count), int(epochs)
        # Acc_iter counts steps that are done; the iteration in the epoch is 0-based.
        record = StepRecord(int(epoch), int(total) or (int(epoch) - 1) * int(count) + int(inner) + 1, out.time)
        try:
            record.lr, record.loss = float(lr), float(loss)
            record.iter_time_s, record.data_time_s = float(batch), float(data)
            record.extra = {"loss_mean": float(mean), "forward_time": float(forward), **self._gpu}
        except ValueError:
            out.log.unknown_lines += 1
            return
        record.eta_s = parse_eta(left if left.count(":") == 2 else f"0:{left}")
        self._gpu = {}
        self._text.step(record)

    def _other(self, level: str, body: str, number: int) -> None:
        header, where = self._out.log.header, self._text.place.line(number)
        evaluated = _EVALUATED.match(body)
        if evaluated is not None:
            self._keep_scores()
            self._evaluated = int(evaluated[1])
        elif "Start logging" in body:
            self._out.begin("start", "A run starts", where)
        elif "End training" in body:
            self._out.event("end", "Training ended", where, status="finished")
        elif (checkpoint := _CHECKPOINT.match(body)) is not None:
            self._out.event("load", body, where, checkpoint=checkpoint[1])
        elif body.startswith("cfg."):
            self._config.append(body[4:])
        elif self._out.last is None and (option := _OPTION.fullmatch(body)) is not None:
            header.setdefault("env", {})[option[1]] = option[2].strip()
            self._config.append(body)
        else:
            self._text.message(level, body, number)

    def _keep_scores(self) -> None:
        if self._evaluated is not None and self._scores:
            last = self._out.last
            self._out.validation(self._evaluated, last.iter if last else None, self._scores)
        self._evaluated, self._scores = None, {}
