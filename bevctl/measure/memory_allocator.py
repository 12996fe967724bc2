"""What torch's CUDA allocator reserves for a sequence of tensors: whole segments, cut into blocks and joined again.

The rules are those of the default settings (c10/cuda/CUDACachingAllocator.cpp of PyTorch).
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from torch import Tensor

BLOCK = 512
"""Bytes that a tensor is rounded up to a multiple of."""
_SMALL = 2**20
"""Largest block of the small class."""
_SMALL_SEGMENT, _MIDDLE_SEGMENT, _ROUND = 2 * 2**20, 20 * 2**20, 2 * 2**20
_MIDDLE = 10 * 2**20
"""Blocks below it share segments."""


def rounded(size: int) -> int:
    """`size` bytes as the allocator counts them."""
    return -(-size // BLOCK) * BLOCK


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor of its own, as the allocator counts them."""
    return rounded(tensor.numel() * tensor.element_size())


@dataclass(eq=False)
class Block:
    """A piece of a segment; neighbours are linked."""

    size: int
    number: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """One pool. `allocated` and `reserved` are bytes in use and bytes of all segments, which are never given back."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._numbers = itertools.count()
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes, the smallest free one that is large enough."""
        size = rounded(size)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def give(self, block: Block) -> None:
        """`block` is free again, joined with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._unlist(other)
                block = self._join(block, other)
        self._list(block)

    def _segment(self, size: int, small: bool) -> Block:
        shared = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT
        size = shared if size < _MIDDLE else -(-size // _ROUND) * _ROUND
        self.reserved += size
        return Block(size, next(self._numbers), small)

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < BLOCK or (not block.small and left <= _SMALL):
            return
        rest = Block(left, next(self._numbers), block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._list(rest)

    def _join(self, block: Block, other: Block) -> Block:
        first, second = (other, block) if block.before is other else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _list(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.number, block))

    def _unlist(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect.bisect_left(free, (block.size, block.number)))
