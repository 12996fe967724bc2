"""The last operations with their inputs, so that a number which was rounded away can be computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bevctl.numerics.operation import Call
from bevctl.numerics.record import Phase
from bevctl.numerics.rerun import run_wide

COUNT = 32
BYTES = {"cpu": 2**27, "cuda": 2**30}
"""Most memory that the inputs kept alive may hold."""
DEPTH = 6
"""Operations looked back through."""


@dataclass(frozen=True)
class _Entry:
    call: Call
    read: tuple[Tensor, ...]
    """Its floating-point inputs."""
    versions: tuple[int, ...]
    writers: tuple[int, ...]
    """Record or source that each of them came from."""
    outputs: tuple[Tensor, ...]
    bytes: int


@dataclass(frozen=True)
class Rounding:
    """An operation whose narrow result has zeros where the wide one has none."""

    index: int
    """Of its record."""
    smallest: float
    """Smallest magnitude that was lost."""


class RecentCalls:
    """A bounded memory of calls by the index of their record; those in `keep` stay to the end."""

    def __init__(self, keep: Iterable[int] = ()) -> None:
        self._keep = frozenset(keep)
        self._kept: dict[int, _Entry] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._bytes = 0

    def add(self, index: int, phase: Phase, call: Call, writers: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """Keeps a call, unless its inputs are too large, and forgets the oldest ones beyond the bounds.

        Gradients stay autograd's own: it would copy those that somebody else holds, which is one operation more.
        """
        if phase == "backward":
            if index not in self._keep:
                return
            call, outputs = call.detached(), [tensor.detach() for tensor in outputs]
        read = call.read()
        if any(tensor.is_inference() for tensor in (*read, *outputs)):
            return  # nothing tells whether they are overwritten later
        size = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *outputs))
        limit = BYTES["cuda" if any(tensor.is_cuda for tensor in read) else "cpu"]
        versions = tuple(tensor._version for tensor in read)
        entry = _Entry(call, tuple(read), versions, tuple(writers), tuple(outputs), size)
        if index in self._keep:
            self._kept[index] = entry
        elif size <= limit // 4:
            self._entries[index] = entry
            self._bytes += size
        while len(self._entries) > COUNT or self._bytes > limit:
            self._bytes -= self._entries.popitem(last=False)[1].bytes

    def clear(self) -> None:
        self._kept.clear()
        self._entries.clear()
        self._bytes = 0

    def widened(self, read: Sequence[Tensor], writers: Sequence[int]) -> tuple[dict[int, Tensor], list[Rounding]]:
        """What `read` would have been, had the operations that made it run in FP32.

        Returns the tensors that could be made again by the id() of those read, and the operations on the way that
        rounded numbers to zero, oldest first.
        """
        roundings: dict[int, Rounding] = {}
        replaced = self._widened(read, writers, roundings, DEPTH)
        return replaced, [roundings[index] for index in sorted(roundings)]

    def _widened(
        self,
        read: Sequence[Tensor],
        writers: Sequence[int],
        roundings: dict[int, Rounding],
        depth: int,
    ) -> dict[int, Tensor]:
        replaced: dict[int, Tensor] = {}
        for tensor, writer in zip(read, writers, strict=True):
            entry = self._kept.get(writer) or self._entries.get(writer)
            if entry is None or depth == 0 or not _untouched(entry):
                continue
            earlier = self._widened(entry.read, entry.writers, roundings, depth - 1)
            wide = run_wide(entry.call, torch.float16, earlier)
            for output, again in zip(entry.outputs, wide, strict=False):
                lost = (output == 0) & (again != 0)
                if lost.any():
                    roundings[writer] = Rounding(writer, float(again[lost].abs().min()))
                view = _same_view(tensor, output, again)
                if view is not None:
                    replaced[id(tensor)] = view
        return replaced


def _untouched(entry: _Entry) -> bool:
    """Whether nothing was written into the inputs since."""
    return all(tensor._version == version for tensor, version in zip(entry.read, entry.versions, strict=True))


def _same_view(tensor: Tensor, output: Tensor, again: Tensor) -> Tensor | None:
    """`again` seen as `tensor` sees `output`, whose memory it shares; None if it does not, or the layout differs."""
    if tensor.untyped_storage()._cdata != output.untyped_storage()._cdata or again.stride() != output.stride():
        return None
    offset = tensor.storage_offset() - output.storage_offset() + again.storage_offset()
    return torch.as_strided(again, tensor.shape, tensor.stride(), offset)
