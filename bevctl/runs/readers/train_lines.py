"""Train lines of mmcv and mmengine: a time, the place in the run, then `name: number` items.

The lines of one log are all alike, so the last one serves as a template for the next: one match gives every number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Layout, LayoutCache, Row
from bevctl.runs.readers.clock import Clock

_ITEM = re.compile(r"(?<=[\s,])([^\s,:]+): +((?:-?\d+ days?, )?\d+:\d\d:\d\d|[^\s,]+)", re.ASCII)
_ETA = r"((?:-?\d+ days?, )?\d+:\d\d:\d\d)"
_WHOLE = re.compile(r"(?:\.\d{4}|nan|inf)\s*$", re.ASCII)
LONGEST_LINE = 100_000
_PLACES = 6
"""Groups before the items: time, epoch, iteration in it, iterations of an epoch; or iteration, iterations of a run."""


@dataclass(frozen=True)
class _Template:
    pattern: re.Pattern[str]
    layout: Layout
    eta: int | None
    """Group of the ETA."""


class TrainLines:
    """Reads train lines; the Collector's clock becomes theirs.

    Args:
        prefix: regular expression of all before the items, with the groups of `_PLACES`.
    """

    def __init__(self, out: Collector, clock: Clock, prefix: str) -> None:
        self._out = out
        self._clock = clock
        self._prefix_text = prefix
        self._prefix = re.compile(prefix, re.ASCII)
        self._layouts = LayoutCache()
        self._template: _Template | None = None
        self._known: dict[str, _Template | None] = {}
        self._length, self._count = "", 0
        """Iterations in an epoch, as the last line has it."""
        self._names: tuple[str, ...] = ()

    def row(self, line: str) -> Row | None:
        """The line's record; None where it is no train line, or half of one."""
        template = self._template
        found = template.pattern.fullmatch(line) if template is not None else None
        if template is None or found is None:
            return self._any_row(line)
        groups = found.groups()
        eta = template.eta
        try:
            if eta is None:
                return self._placed(groups, template.layout, list(map(float, groups[_PLACES:])), None)
            values = list(map(float, groups[_PLACES:eta] + groups[eta + 1 :]))
        except ValueError:
            return self._any_row(line)
        return self._placed(groups, template.layout, values, groups[eta])

    def torn_row(self, line: str) -> Row | None:
        """As `row`, for a line without an end: None unless it is all there, with the names and digits of the others."""
        names = self._names
        row = self.row(line)
        if row is None or _WHOLE.search(line) is None or names not in ((), row.layout.names):
            return None
        return row

    def begins(self, line: str) -> bool:
        """Whether the line begins as a train line does."""
        return self._prefix.match(line) is not None

    def _any_row(self, line: str) -> Row | None:
        found = self._prefix.match(line)
        if found is None or len(line) > LONGEST_LINE:
            return None
        items = [(match[1], match[2]) for match in _ITEM.finditer(line, found.end())]
        eta = next((text for name, text in items if name == "eta"), None)
        try:
            values = [float(text) for name, text in items if name != "eta"]
        except ValueError:
            return None
        if not values:
            return None
        layout = self._layouts.of([name for name, _ in items if name != "eta"])
        self._learn(line, found.end(), layout)
        return self._placed(found.groups(), layout, values, eta)

    def _placed(self, groups: tuple[str | Any, ...], layout: Layout, values: list[float], eta: str | None) -> Row:
        """The record at the place in the run that the first groups name."""
        stamp, epoch, inner, length, iteration, last = groups[:_PLACES]
        out = self._out
        self._names = layout.names
        if stamp is not None:
            out.time = self._clock.time(stamp)
        if epoch is None:
            out.log.max_iters = int(last)
            return Row(layout, values, 1, int(iteration), out.time, eta)
        if length != self._length:
            self._length, self._count = length, int(length)
            out.log.iters_per_epoch = self._count
        number = max(int(epoch), 1)  # epochs are counted from 1: a 0 is damage
        return Row(layout, values, number, (number - 1) * self._count + int(inner), out.time, eta)

    def _learn(self, line: str, start: int, layout: Layout) -> None:
        """Makes the line a template: what stands between its numbers stays, each number is a group."""
        parts: list[str] = []
        eta = None
        place = start
        for match in _ITEM.finditer(line, start):
            after = line[match.end() : match.end() + 1] or " "
            group = _ETA if match[1] == "eta" else f"([^{re.escape(after)}]+)"
            eta = _PLACES + len(parts) if match[1] == "eta" else eta
            parts.append(re.escape(line[place : match.start(2)]) + group)
            place = match.end()
        text = "".join(parts) + re.escape(line[place:].rstrip()) + r"\s*"
        if text not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[text] = self._template_of(text, layout, eta)
        self._template = self._known[text]

    def _template_of(self, items: str, layout: Layout, eta: int | None) -> _Template | None:
        pattern = re.compile(self._prefix_text + items, re.ASCII)
        fits = pattern.groups == _PLACES + len(layout.names) + (eta is not None)
        return _Template(pattern, layout, eta) if fits else None
