"""What torch's CUDA allocator reserves for a sequence of tensors: growing segments, cut into blocks and joined again.

The rules are those of `expandable_segments:True` (c10/cuda/CUDACachingAllocator.cpp of PyTorch): a class of sizes has
one segment, which grows by whole pages at its end.
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
_PAGE = {True: 2 * 2**20, False: 20 * 2**20}
"""Bytes that a segment of small blocks, and one of others, grows by."""


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
        self._last: dict[bool, Block] = {}
        """Where each segment ends."""

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes: the smallest free one that is large enough, that at the end last."""
        size = rounded(size)
        small = size <= _SMALL
        block = self._inside(size, small) or self._grown(size, small)
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

    def _inside(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        for _, _, block in free[bisect.bisect_left(free, (size, -1)) :]:
            if block is not self._last[small]:
                self._unlist(block)
                return block
        return None

    def _grown(self, size: int, small: bool) -> Block:
        """The free end of a segment, grown until it has room."""
        last = self._last.get(small)
        end = last if last is not None and last.free else None
        if end is not None:
            self._unlist(end)
        missing = size - (0 if end is None else end.size)
        more = max(0, -(-missing // _PAGE[small])) * _PAGE[small]
        self.reserved += more
        if end is not None:
            end.size += more
            return end
        block = self._last[small] = Block(more, next(self._numbers), small, before=last)
        if last is not None:
            last.after = block
        return block

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < BLOCK:
            return
        rest = Block(left, next(self._numbers), block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        else:
            self._last[block.small] = rest
        block.after, block.size = rest, size
        self._list(rest)

    def _join(self, block: Block, other: Block) -> Block:
        first, second = (other, block) if block.before is other else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        else:
            self._last[first.small] = first
        return first

    def _list(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.number, block))

    def _unlist(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect.bisect_left(free, (block.size, block.number)))
