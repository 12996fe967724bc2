"""How the numbers of a log line become a record: names found once a kind of line, not once a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from bevctl.runs.records import StepRecord

MIB_PER_GIB = 1024.0
_LONGEST_ETA_S = 1e10
EXTRA_METRICS = ("device_memory_gib", "gpu_util")
"""Metrics that a StepRecord has in `extra`."""

FIELDS = {
    "loss": "loss",
    "total_loss": "loss",
    "loss_total": "loss",
    "train_loss": "loss",
    "training_loss": "loss",
    "lr": "lr",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "gradnorm": "grad_norm",
    "gnorm": "grad_norm",
    "total_grad_norm": "grad_norm",
    "loss_scale": "loss_scale",
    "scale": "loss_scale",
    "time": "iter_time_s",
    "iter_time": "iter_time_s",
    "iter_time_s": "iter_time_s",
    "step_time": "iter_time_s",
    "batch_time": "iter_time_s",
    "data_time": "data_time_s",
    "data_time_s": "data_time_s",
    "memory": "memory_mib",
    "memory_gib": "memory_gib",
    "samples_per_s": "samples_per_s",
    "skipped_steps": "skipped_steps",
    "eta_s": "eta_s",
}
"""Field of StepRecord, or `memory_mib`, by a foreign name in lower case."""


def parse_eta(text: str) -> float | None:
    """Seconds of a timedelta as Python prints it: `1:02:03`, `3 days, 4:05:06`, `-1 day, 23:00:00`."""
    days = 0
    try:
        if " " in text:
            days = int(text[: text.index(" ")])
            text = text[text.rindex(" ") + 1 :]
        hours, minutes, seconds = text.split(":")
        total = days * 86400 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except (ValueError, OverflowError):
        return None
    return total if abs(total) < _LONGEST_ETA_S else None


def is_loss(name: str) -> bool:
    """Whether a foreign `name` is a part of the loss (or one of the statistics that are logged beside it)."""
    return "loss" in name or name.startswith("stats/")


@dataclass
class Layout:
    """Which metric each number of a line is; made once, as the lines of one log have the same names."""

    names: tuple[str, ...]
    """As the log has them."""

    def __post_init__(self) -> None:
        self._index: dict[str, int] = {}
        """Place of each field of StepRecord, and of `memory_mib`."""
        for index, name in enumerate(self.names):
            if (metric := FIELDS.get(name.lower())) is not None:
                self._index.setdefault(metric, index)
        if "lr" not in self._index:
            self._take_group_lr()
        rest = [(index, name) for index, name in enumerate(self.names) if index not in self._index.values()]
        self._losses = [(name, index) for index, name in rest if is_loss(name)]
        self._extra = [(name, index) for index, name in rest if not is_loss(name)]

    def _take_group_lr(self) -> None:
        """Several parameter groups log `<group>_lr`: the first stands for all."""
        for index, name in enumerate(self.names):
            if name.endswith(("_lr", "/lr")):
                self._index["lr"] = index
                return

    @property
    def metrics(self) -> list[tuple[str, int, float]]:
        """Name, place and unit of every metric that figures are kept of."""
        known = [(name, index) for name, index in self._extra if name in EXTRA_METRICS]
        found = [(name, index, 1.0) for name, index in (*self._index.items(), *self._losses, *known) if name != "eta_s"]
        return [("memory_gib", i, 1 / MIB_PER_GIB) if name == "memory_mib" else (name, i, u) for name, i, u in found]

    def iter_time_s(self, row: Row) -> float | None:
        """Seconds an iteration took."""
        index = self._index.get("iter_time_s")
        return None if index is None else row.values[index]

    def record(self, row: Row) -> StepRecord:
        """The record of a line with these names."""
        values = row.values
        record = StepRecord(row.epoch, row.iter, row.time, eta_s=parse_eta(row.eta) if row.eta else None)
        for name, index in self._index.items():
            if name == "memory_mib":
                record.memory_gib = values[index] / MIB_PER_GIB
            elif name == "skipped_steps":
                record.skipped_steps = int(values[index]) if math.isfinite(values[index]) else None
            else:
                setattr(record, name, values[index])
        record.losses = {name: values[index] for name, index in self._losses}
        record.extra = {name: values[index] for name, index in self._extra}
        return record


class Row:
    """A training record as a line had it; most of a long log never become more than this."""

    __slots__ = ("epoch", "eta", "iter", "layout", "time", "values")

    def __init__(
        self,
        layout: Layout,
        values: list[float],
        epoch: int,
        iteration: int,
        time: float | None,
        eta: str | None = None,
    ) -> None:
        self.layout = layout
        self.values = values
        self.epoch = epoch
        self.iter = iteration
        self.time = time
        self.eta = eta

    @property
    def iter_time_s(self) -> float | None:
        """Seconds an iteration took."""
        return self.layout.iter_time_s(self)

    def record(self) -> StepRecord:
        """As a StepRecord."""
        return self.layout.record(self)


class LayoutCache:
    """The layouts of the last few kinds of line, by their names."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._layout = Layout(())
        self._known: dict[tuple[str, ...], Layout] = {}

    def of(self, names: list[str]) -> Layout:
        """The layout of a line with these `names`."""
        if names != self._names:
            key = tuple(names)
            if len(self._known) > 64:
                self._known.clear()
            if key not in self._known:
                self._known[key] = Layout(key)
            self._layout = self._known[key]
            self._names = names
        return self._layout

    def of_items(self, items: Mapping[str, Any]) -> tuple[Layout, list[float]]:
        """The layout of an object's entries, and their numbers; entries that are none are left out."""
        try:
            return self.of(list(items)), list(map(float, items.values()))
        except (TypeError, ValueError, OverflowError):
            known = numbers(items)
            return self.of(list(known)), list(known.values())


def numbers(items: Mapping[str, Any]) -> dict[str, float]:
    """The entries of `items` that are numbers, as floats; an integer too large for one is infinite."""
    found = {}
    for name, value in items.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        try:
            found[name] = float(value)
        except OverflowError:
            found[name] = math.inf
    return found


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from a file can be an epoch or an iteration."""
    return type(value) is int and 0 <= value < 2**53


def is_moment(value: object) -> TypeGuard[float]:
    """Whether a value from a file can be a Unix time, s."""
    return isinstance(value, (int, float)) and 0 <= value < 1e11
