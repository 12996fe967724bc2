"""What PyTorch's out-of-memory sentence says: who had the memory when an allocation failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.runs.records import EventRecord

CONTEXT_GIB = 1.5
"""What CUDA and its libraries take beside PyTorch's own memory, at most."""


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed, GiB; None for what the sentence does not say."""

    event: EventRecord
    tried: float | None = None
    capacity: float | None = None
    free: float | None = None
    """Of the device."""
    allocated: float | None = None
    """By tensors."""
    reserved: float | None = None
    """By PyTorch, tensors included."""

    @property
    def idle(self) -> float | None:
        """Reserved by PyTorch and in no tensor."""
        return None if self.reserved is None or self.allocated is None else max(self.reserved - self.allocated, 0.0)

    @property
    def fragmented(self) -> bool:
        """Whether what lay idle would have been enough in one piece."""
        return self.idle is not None and self.tried is not None and self.idle > self.tried

    @property
    def elsewhere(self) -> float | None:
        """Held by nobody of this process's PyTorch: its CUDA context, and other processes."""
        if self.capacity is None or self.free is None or self.reserved is None:
            return None
        return max(self.capacity - self.free - self.reserved, 0.0)

    @property
    def of_others(self) -> float:
        """What other processes must hold, a CUDA context granted; 0 where nothing tells."""
        return max((self.elsewhere or 0.0) - CONTEXT_GIB, 0.0)

    @property
    def needed(self) -> float | None:
        """Least memory in tensors with which this allocation would have succeeded."""
        return None if self.allocated is None or self.tried is None else self.allocated + self.tried

    def sentences(self) -> Iterator[str]:
        """The figures, one a sentence."""
        named = {
            "{:.2f} GiB were asked for": self.tried,
            "{:.2f} GiB were in tensors (allocated)": self.allocated,
            "{:.2f} GiB were taken by PyTorch in all (reserved)": self.reserved,
            "{:.2f} GiB of the GPU were free": self.free,
            "the GPU has {:.2f} GiB": self.capacity,
            "{:.2f} GiB were outside of PyTorch: CUDA's context, and other processes": self.elsewhere,
        }
        for text, value in named.items():
            if value is not None:
                yield text.format(value)


def shortages(events: list[EventRecord]) -> list[Shortage]:
    """Each failure for want of GPU memory."""
    return [
        Shortage(
            event, *(event.data.get(f"{name}_gib") for name in ("tried", "capacity", "free", "allocated", "reserved"))
        )
        for event in events
        if event.kind == "failure" and event.data.get("cause") == "cuda_oom"
    ]
