"""Memory of recorded CUDA graphs: their pools stay allocated, but hold few tensors that the allocator counts."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Pool:
    """The memory of a recorded CUDA graph."""

    size: int
    """Bytes taken for it."""
    unused: int
    """Of these, bytes in no tensor that the allocator counts."""


def graph_pools(device: torch.device) -> dict[tuple[int, int], Pool]:
    """The pools of recorded CUDA graphs, by their number."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found: dict[tuple[int, int], Pool] = {}
    for segment in torch.cuda.memory_snapshot():
        number = tuple(segment["segment_pool_id"])
        if segment["device"] == index and number != (0, 0):
            pool, size = found.get(number, Pool(0, 0)), segment["total_size"]
            found[number] = Pool(pool.size + size, pool.unused + size - segment["allocated_size"])
    return found


def graph_bytes(device: torch.device) -> int:
    """Memory in the pools of recorded CUDA graphs that the allocator does not count, as no tensor holds it."""
    return sum(pool.unused for pool in graph_pools(device).values())
