"""Who wrote what: the memory that a step's tensors lie in, and what was measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bevctl.numerics.expected import expected
from bevctl.numerics.extent import Extent, measure
from bevctl.numerics.inputs import allowed_reason, bad_elements, bad_samples
from bevctl.numerics.record import Source, SourceKind

NUMBER = "a number in the code"
"""Why a tensor without axes that Python made of a number may be not finite."""


@dataclass(frozen=True)
class Known:
    """A tensor as an operation reads it."""

    extent: Extent
    writer: int
    """Index of the record that wrote it last, or −1 − index of a source."""
    declared: str
    """Why it may be not finite; "" if it may not."""


@dataclass
class _Memory:
    """One allocation."""

    handle: StorageWeakRef
    """Keeps its address from being used again; the numbers themselves are freed as ever."""
    writer: int
    declared: str = ""
    bad: bool = False
    """Whether the writer left something non-finite."""
    measured: dict[tuple[Any, ...], tuple[int, Extent]] = field(default_factory=dict)
    """By layout: the tensor's version counter when it was measured, and what was found."""

    def note(self, tensor: Tensor, extent: Extent) -> None:
        """Keeps what was measured, unless nothing counts the changes of the tensor."""
        if not tensor.is_inference():
            self.measured[_layout(tensor)] = (tensor._version, extent)

    def recall(self, tensor: Tensor) -> Extent | None:
        """What was measured, if nothing was written since."""
        version, extent = self.measured.get(_layout(tensor), (None, None))
        return extent if version is not None and version == tensor._version else None


class Ledger:
    """Keeps the writer of each allocation, so that views and in-place operations need no special care.

    `weights` names parameters and buffers by `address`.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        self.sources: list[Source] = []
        self._weights = weights
        self._memory: dict[int, _Memory] = {}

    def read(self, tensors: Sequence[Tensor], now: int) -> list[Known]:
        """What is known of tensors that record number `now` is about to read; measures what changed."""
        memories = [self._memory_of(tensor, now) for tensor in tensors]
        known = [memory.recall(tensor) for memory, tensor in zip(memories, tensors, strict=True)]
        fresh = iter(measure([t for t, extent in zip(tensors, known, strict=True) if extent is None]))
        extents = [next(fresh) if extent is None else extent for extent in known]
        for tensor, memory, extent in zip(tensors, memories, extents, strict=True):
            memory.note(tensor, extent)
            if memory.writer < 0 and extent.bad:
                self.sources[-1 - memory.writer].extent = extent
        return [Known(extent, m.writer, m.declared) for extent, m in zip(extents, memories, strict=True)]

    def wrote(self, index: int, tensor: Tensor, extent: Extent, declared: str, into: bool, keep: bool) -> None:
        """Notes that record `index` made `tensor`, or wrote `into` one that was there.

        `keep`: nothing writes to it behind our back, so that the extent may be used when it is read next.
        """
        place = address(tensor)
        before = self._memory.get(place)
        if into and before is not None and _is_part(tensor):  # the rest of it may still be what it was
            if before.bad and not extent.bad:
                return
            declared = declared or before.declared
        memory = self._memory[place] = _Memory(_handle(tensor), index, declared, extent.bad)
        if keep and not into:
            memory.note(tensor, extent)

    def add_input(self, name: str, tensor: Tensor, now: int) -> None:
        """Names a tensor that the model is called with."""
        (extent,) = measure([tensor])
        before = self._memory.get(address(tensor))
        if before is not None and before.bad and not extent.bad and self._is_input(before, now):
            return  # another part of the same memory, which is at fault
        source = Source(name, "data", extent, first_use=now)
        if extent.bad:
            fault = bad_elements(name, tensor, expected())
            source.samples = bad_samples(name, fault)
            source.declared = "" if fault.any() else allowed_reason(name, expected())
        self.sources.append(source)
        self._memory[address(tensor)] = _Memory(_handle(tensor), -len(self.sources), source.declared, extent.bad)

    def writer(self, tensor: Tensor) -> int | None:
        """Who wrote the tensor last; None if it was not seen."""
        memory = self._memory.get(address(tensor))
        return None if memory is None else memory.writer

    def _is_input(self, memory: _Memory, now: int) -> bool:
        source = self.sources[-1 - memory.writer] if memory.writer < 0 else None
        return source is not None and (source.kind, source.first_use) == ("data", now)

    def _memory_of(self, tensor: Tensor, now: int) -> _Memory:
        place = address(tensor)
        memory = self._memory.get(place)
        if memory is None:
            name = self._weights.get(place, "")
            nothing = Extent(tensor.dtype, tuple(tensor.shape), 0.0, 0.0)
            number = not name and tensor.dim() == 0 and tensor.device.type == "cpu"
            kind: SourceKind = "weight" if name else "unseen"
            source = Source(name, kind, nothing, NUMBER if number else "", now)
            self.sources.append(source)
            memory = self._memory[place] = _Memory(_handle(tensor), -len(self.sources), source.declared)
        return memory


def _handle(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def address(tensor: Tensor) -> int:
    """Identity of the tensor's memory, unique while it is alive or a handle of it exists."""
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_part(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
