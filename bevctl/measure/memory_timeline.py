"""Whose tensors are alive at the peak of a real step, by the allocator's record of events and the parts' marks."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bevctl.measure.memory_allocator import rounded
from bevctl.measure.memory_places import INPUTS

HELD = "kept between steps"


class Timeline:
    """A ledger of `bevctl.measure.memory_places` that notes when which part came to run, on the host's clock."""

    def __init__(self) -> None:
        self.part, self.pool = INPUTS, ""
        self._instants: list[int] = []
        self._parts: list[str] = []
        self._labels: list[tuple[int, int, str]] = []

    def enter(self, part: str, pool: str = "") -> None:
        self.part, self.pool = part, pool
        self._instants.append(_now_us())
        self._parts.append(part)

    def relabel(self, tensor: Tensor, part: str) -> None:
        self._labels.append((_now_us(), tensor.untyped_storage().data_ptr(), part))

    def hold(self, size: int, part: str) -> None:
        """Nothing: the allocator itself tells what is held."""

    def peak(self, events: Iterable[Mapping[str, Any]], before: int) -> Counter[str]:
        """Bytes by part when most were allocated.

        Args:
            events: of the allocator, as `torch.cuda.memory._snapshot` lists them (action, addr, size, time_us).
            before: bytes that were allocated when the record began, counted as HELD.
        """
        live: dict[int, tuple[int, str]] = {}
        now = Counter({HELD: before})
        most, at_most = before, now.copy()
        labels = list(reversed(self._labels))
        for event in events:
            while labels and labels[-1][0] <= event["time_us"]:
                _, address, part = labels.pop()
                if address in live:
                    size, old = live[address]
                    now[old] -= size
                    now[part] += size
                    live[address] = size, part
            if event["action"] == "alloc":
                live[event["addr"]] = size, part = rounded(event["size"]), self._part_at(event["time_us"])
                now[part] += size
                if now.total() > most:
                    most, at_most = now.total(), now.copy()
            elif event["action"] == "free_requested":
                size, part = live.pop(event["addr"], (rounded(event["size"]), HELD))
                now[part] -= size
        return at_most

    def _part_at(self, instant: int) -> str:
        place = bisect.bisect_right(self._instants, instant) - 1
        return self._parts[place] if place >= 0 else INPUTS


def _now_us() -> int:
    return time.time_ns() // 1000
