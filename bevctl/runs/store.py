"""Training records in a memory that does not grow with the log: figures over all, every n-th record itself."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from bevctl.runs.layout import EXTRA_METRICS, Layout, Row
from bevctl.runs.records import StepRecord
from bevctl.runs.statistics import Accumulator, Metric

KEEP = 10_000
"""Records held one by one; of more, every second, fourth, ... is kept."""
_METRICS = (
    "loss",
    "grad_norm",
    "loss_scale",
    "lr",
    "iter_time_s",
    "data_time_s",
    "memory_gib",
    "samples_per_s",
    "skipped_steps",
)

Step = StepRecord | Row


class RecordStore:
    """The records of a window in the order of their iterations."""

    def __init__(self) -> None:
        self._kept: list[Step] = []
        self._recent: list[Step] = []
        self._last: Step | None = None
        self._stride = 1
        self._folded = 0
        """Records that are in the figures already."""
        self._totals: dict[str, Accumulator] = {}
        self._distances: Counter[int] = Counter()

    def append(self, step: Step) -> None:
        """Takes a record, later than all others."""
        recent = self._recent
        recent.append(step)
        self._last = step
        if len(recent) > KEEP:
            self._fold()

    def replace_last(self, last: Step, whole: Step) -> None:
        """Puts `whole` in the place of `last`, where that is the last."""
        if self._recent and self._recent[-1] is last:
            self._recent[-1] = self._last = whole

    def drop_from(self, iteration: int) -> int:
        """Forgets the records from `iteration` on, and says how many; figures keep those that are in them already."""
        self._last = None
        dropped = _pop_from(self._recent, iteration)
        if not self._recent:
            folded = _pop_from(self._kept, iteration) * self._stride
            self._folded = max(0, self._folded - folded)
            dropped += folded
        return dropped

    def held(self) -> Sequence[Step]:
        """All that is held one by one."""
        return [*self._kept, *self._recent]

    def retain(self, holds: Callable[[float | None], bool]) -> None:
        """Forgets all records but those with a time that `holds`."""
        self._kept = [step for step in self._kept if holds(step.time)]
        self._recent = [step for step in self._recent if holds(step.time)]

    def finish(self) -> tuple[list[StepRecord], int, dict[str, Metric], int | None]:
        """The records (thinned), how many there were, figures of each metric, and the usual distance of two."""
        totals: dict[str, Accumulator] = {}
        distances: Counter[int] = Counter()
        if self._folded:
            self._fold()
            totals, distances = self._totals, self._distances
            last = [] if self._last is None or self._kept[-1:] == [self._last] else [self._last]
            held = self._kept + last
        else:
            _measure(self._recent, totals, distances)
            held = self._recent
        count = self._folded or len(held)
        steps = [step if isinstance(step, StepRecord) else step.record() for step in held]
        metrics = {name: total.metric(_column(steps, name)[0]) for name, total in totals.items()}
        return steps, count, metrics, _median(distances)

    def _fold(self) -> None:
        """Adds the recent records to the figures, and keeps every `stride`-th of them."""
        _measure(self._recent, self._totals, self._distances)
        self._folded += len(self._recent)
        self._kept += self._recent[self._stride - 1 :: self._stride]
        self._recent = []
        while len(self._kept) > KEEP:
            self._kept = self._kept[1::2]
            self._stride *= 2


def _median(counts: Counter[int]) -> int | None:
    """The lower median: some logs have single records besides, at an epoch's ends, close to their neighbours."""
    left = (counts.total() + 1) // 2
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None


def _measure(records: list[Step], totals: dict[str, Accumulator], distances: Counter[int]) -> None:
    """Adds records to the figures of every metric, and to how often two are how far apart."""
    for layout, steps in groupby(records, key=_layout):
        part = list(steps)
        iterations = [step.iter for step in part]
        distances.update(map(operator.sub, iterations[1:], iterations))
        if layout is None:
            _fold_records(totals, [step for step in part if isinstance(step, StepRecord)])
            continue
        columns = list(zip(*[step.values for step in part if isinstance(step, Row)], strict=True))
        for name, index, unit in layout.metrics:
            totals.setdefault(name, Accumulator()).fold(columns[index], iterations, unit)


def _layout(step: Step) -> Layout | None:
    return step.layout if isinstance(step, Row) else None


def _pop_from(records: list[Step], iteration: int) -> int:
    dropped = 0
    while records and records[-1].iter >= iteration:
        records.pop()
        dropped += 1
    return dropped


def _fold_records(totals: dict[str, Accumulator], records: list[StepRecord]) -> None:
    losses = dict.fromkeys(name for record in records for name in record.losses)
    for name in (*_METRICS, *EXTRA_METRICS, *losses):
        values, iterations = _column(records, name)
        if values:
            totals.setdefault(name, Accumulator()).fold(values, iterations)


def _column(records: list[StepRecord], name: str) -> tuple[list[float], list[int]]:
    """Values of one metric where it was measured, and their iterations."""
    if name in _METRICS:
        values = [getattr(record, name) for record in records]
    elif name in EXTRA_METRICS:
        values = [record.extra.get(name) for record in records]
    else:
        values = [record.losses.get(name) for record in records]
    if None in values:
        kept = [(value, record.iter) for value, record in zip(values, records, strict=True) if value is not None]
        return [value for value, _ in kept], [iteration for _, iteration in kept]
    return values, [record.iter for record in records]
