"""bevctl's own log.jsonl and events.jsonl."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Row, is_count, is_moment
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.events import FAILURE, describe
from bevctl.runs.readers.json_lines import JsonLines, decode_object
from bevctl.runs.readers.names import scores
from bevctl.runs.readers.text import Place
from bevctl.runs.records import EventRecord, StepRecord

_FIELDS = frozenset(field.name for field in fields(StepRecord))
_FLOATS = _FIELDS - {"epoch", "iter", "mode", "losses", "extra", "skipped_steps"}
_NO_METRICS = frozenset(("epoch", "iter", "time", "mode", "losses", "extra"))
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SUFFIX = "_nonfinite"


def stamp(line: str, clock: Clock) -> float | None:  # noqa: ARG001 - the line has Unix time
    """Unix time of a line of this format."""
    item = decode_object(line)
    time = item.get("time") if item else None
    return float(time) if is_moment(time) else None


def recognises(line: str) -> bool:
    """Whether a line can only be this format's."""
    return line.startswith("{") and (
        ('"iter_time_s"' in line and '"epoch"' in line) or ('"kind": "' in line and '"message": "' in line)
    )


class BevctlLines(JsonLines):
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        super().__init__(out, clock, place)
        self._queue: list[tuple[float, dict[str, Any], str]] = []
        self._queued = 0
        self._next = math.inf

    def queue(self, lines: list[str], file: str) -> None:
        """Takes the lines of events.jsonl, which are told between the iterations where they belong.

        When called again, `lines` are those of before and what was added.
        """
        queued, self._queued = self._queued, len(lines)
        for number, line in enumerate(lines[queued:], queued + 1):
            item = decode_object(line)
            time = item.get("time") if item is not None else None
            if item is not None and is_moment(time):
                self._queue.append((float(time), item, f"{file}:{number}"))
            elif line.strip():
                self._out.log.unknown_lines += 1
        self._queue.sort(key=lambda entry: entry[0], reverse=True)
        self._next = self._queue[-1][0] if self._queue else math.inf

    def _tell_until(self, time: float) -> None:
        while self._next <= time and self._queue:
            _, item, where = self._queue.pop()
            if not self._event(item, where):
                self._out.log.unknown_lines += 1
            self._next = self._queue[-1][0] if self._queue else math.inf

    def finish(self) -> None:
        self._tell_until(math.inf)

    def _item(self, item: dict[str, Any], number: int) -> bool:
        if "kind" in item:
            return self._event(item, self._text.place.line(number))
        step = self._row(item) or step_of(item)
        if step is None:
            return False
        time = step.time
        if time is not None and time >= self._next:
            self._tell_until(time)
        self._out.time = time
        self._out.step(step)
        return True

    def _row(self, item: dict[str, Any]) -> Row | None:
        """The record of a line whose numbers are all finite, which nearly all are."""
        losses, extra = item.get("losses", {}), item.get("extra", {})
        if type(losses) is not dict or type(extra) is not dict:
            return None
        flat = {name: value for name, value in item.items() if name not in _NO_METRICS} | losses | extra
        epoch, iteration, time = item.get("epoch"), item.get("iter"), item.get("time")
        if not is_count(epoch) or not is_count(iteration) or not is_moment(time):
            return None
        try:
            values = list(map(float, flat.values()))
        except (TypeError, ValueError, OverflowError):
            return None
        return Row(self._layouts.of(list(flat)), values, epoch, iteration, time)

    def _event(self, item: dict[str, Any], where: str) -> bool:
        item = restored(item)
        kind, message, time = item.get("kind"), item.get("message"), item.get("time")
        if not isinstance(kind, str) or not isinstance(message, str):
            return False
        if is_moment(time):
            self._out.time = float(time)
        data = item["data"] if isinstance(item.get("data"), dict) else {}
        if kind in ("start", "resume", "rewind"):
            self._out.begin("start" if kind == "start" else "resume", message, where, **data)
            return True
        last = self._out.last
        iteration = item["iter"] if is_count(item.get("iter")) else last.iter if last else None
        epoch = item["epoch"] if is_count(item.get("epoch")) else last.epoch if last else None
        self._out.add_event(EventRecord(kind, message, self._out.time, iteration, epoch, data, where))
        self._consequences(kind, message, data, where)
        return True

    def _consequences(self, kind: str, message: str, data: dict[str, Any], where: str) -> None:
        metrics = data.get("metrics")
        if kind == "evaluation" and isinstance(metrics, dict):
            last = self._out.last
            epoch = data["epoch"] if is_count(data.get("epoch")) else last.epoch if last else 1
            known = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
            self._out.validation(epoch, last.iter if last else None, scores(known))
        elif kind == "end" and data.get("status") == "failed":
            found = describe(message, raised=True) or describe(message, "Error")
            if found is not None:
                self._out.event(FAILURE, message, where, **found.data)


def step_of(item: dict[str, Any]) -> StepRecord | None:
    """The record of a line of log.jsonl; None where it is none. Unknown entries are left out."""
    if any(name not in _FIELDS for name in item):
        item = {name: value for name, value in restored(item).items() if name in _FIELDS}
    losses = item.get("losses", {})
    if not is_count(item.get("epoch")) or not is_count(item.get("iter")) or not isinstance(losses, dict):
        return None
    if None in losses.values():
        item["losses"] = losses = restored(losses)
    try:
        record = StepRecord(**item)
    except TypeError:
        return None
    return record if _sound(record) else None


def _sound(record: StepRecord) -> bool:
    """Whether every entry has its type: a file of a stranger may hold anything."""
    values = [getattr(record, name) for name in _FLOATS]
    numeric = all(value is None or type(value) in (float, int) for value in (*values, *record.losses.values()))
    timed = record.time is None or is_moment(record.time)
    return numeric and timed and isinstance(record.extra, dict) and type(record.skipped_steps) in (int, type(None))


def restored(item: dict[str, Any]) -> dict[str, Any]:
    """`item` with the numbers back that strict JSON cannot hold."""
    plain = {name: value for name, value in item.items() if not name.endswith(_SUFFIX)}
    for name, value in item.items():
        if name.endswith(_SUFFIX) and isinstance(value, str) and value in _NONFINITE:
            plain[name.removesuffix(_SUFFIX)] = _NONFINITE[value]
    return plain
