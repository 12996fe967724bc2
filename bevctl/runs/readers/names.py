"""Metric names: what other projects call a metric, and how one line's numbers become a StepRecord."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bevctl.runs.records import StepRecord

MIB_PER_GIB = 1024.0

FIELDS = {
    "loss": "loss",
    "total_loss": "loss",
    "loss_total": "loss",
    "train_loss": "loss",
    "training_loss": "loss",
    "lr": "lr",
    "base_lr": "base_lr",
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
}
"""Field of StepRecord, or `memory_mib`, by a foreign name in lower case."""

_SCORES = {
    "map": "mAP",
    "nds": "NDS",
    "miou": "mIoU",
    "map/mean/iou@max": "mIoU",
    "mean/iou@max": "mIoU",
    "object/map": "mAP",
    "object/nds": "NDS",
}


def is_loss(name: str) -> bool:
    """Whether a foreign `name` is a part of the loss (or one of the statistics that are logged beside it)."""
    return "loss" in name or name.startswith("stats/")


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` with mAP, NDS and mIoU also under these names, whatever prefix the log gives them."""
    named = dict(metrics)
    for name, value in metrics.items():
        lower = name.lower()
        known = _SCORES.get(lower) or _SCORES.get(lower.rpartition("/")[2])
        if known is not None:
            named.setdefault(known, value)
    return named


@dataclass
class Layout:
    """Where each field stands among the numbers of a line; made once, as lines of one log have the same names.

    An index of -1 is a None that is appended to the numbers.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        fields = {FIELDS[name.lower()]: index for index, name in reversed(list(enumerate(self.names))) if _field(name)}
        taken = set(fields.values())
        self._fields = fields
        self._lr = fields.get("lr", fields.get("base_lr", self._first_lr()))
        self._loss = fields.get("loss", -1)
        self._grad_norm = fields.get("grad_norm", -1)
        self._loss_scale = fields.get("loss_scale", -1)
        self._iter_time = fields.get("iter_time_s", -1)
        self._data_time = fields.get("data_time_s", -1)
        self._mib = fields.get("memory_mib", -1)
        rare = {"memory_gib", "samples_per_s"}
        self._rare = [(field, index) for field, index in fields.items() if field in rare]
        rest = [index for index in range(len(self.names)) if index not in taken]
        losses = [index for index in rest if is_loss(self.names[index])]
        extra = [index for index in rest if not is_loss(self.names[index])]
        self._loss_names, self._loss_slice = self._contiguous(losses)
        self._losses, self._extra = losses, [(self.names[index], index) for index in extra]
        self.has_loss = self._loss >= 0 or bool(losses)

    def _first_lr(self) -> int:
        """Several parameter groups log `<group>_lr`: the first stands for all."""
        return next((index for index, name in enumerate(self.names) if name.endswith(("_lr", "/lr"))), -1)

    def _contiguous(self, indices: list[int]) -> tuple[list[str], slice | None]:
        names = [self.names[index] for index in indices]
        if not indices or indices[-1] - indices[0] + 1 != len(indices):
            return names, None
        return names, slice(indices[0], indices[-1] + 1)

    def record(self, values: list[Any], epoch: int, iteration: int, time: float | None) -> StepRecord:
        """The record of a line whose numbers, in the order of `names`, are `values`; appends None to them."""
        if self._loss_slice is not None:
            losses = dict(zip(self._loss_names, values[self._loss_slice], strict=False))
        else:
            losses = {name: values[index] for name, index in zip(self._loss_names, self._losses, strict=True)}
        values.append(None)
        mib = values[self._mib]
        record = StepRecord(
            epoch,
            iteration,
            time,
            "train",
            values[self._lr],
            values[self._loss],
            losses,
            values[self._grad_norm],
            values[self._loss_scale],
            None,
            values[self._iter_time],
            values[self._data_time],
            None if mib is None else mib / MIB_PER_GIB,
        )
        if self._extra:
            record.extra = {name: values[index] for name, index in self._extra}
        for field, index in self._rare:
            setattr(record, field, values[index])
        return record


def _field(name: str) -> str | None:
    return FIELDS.get(name.lower())


class LayoutCache:
    """The layouts of the last few kinds of line, by the names as they stand there."""

    def __init__(self, suffix: str = "") -> None:
        self._suffix = suffix
        self._names: Sequence[str] = ()
        self._layout = Layout(())
        self._known: dict[tuple[str, ...], Layout] = {}

    def of(self, names: Sequence[str]) -> Layout:
        """The layout of a line with these `names`; an empty one where a name lacks the suffix."""
        if names != self._names:
            key = tuple(names)
            if len(self._known) > 64:
                self._known.clear()
            if key not in self._known:
                self._known[key] = self._make(key)
            self._layout = self._known[key]
            self._names = names
        return self._layout

    def _make(self, names: tuple[str, ...]) -> Layout:
        if not all(name.endswith(self._suffix) for name in names):
            return Layout(())
        return Layout(tuple(name.removesuffix(self._suffix) for name in names))


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
