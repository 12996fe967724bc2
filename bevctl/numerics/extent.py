"""What is in a tensor: the range of its finite values, and how many are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Extent:
    """Shape and content of one floating-point tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    """Smallest finite value; 0 where there is none."""
    high: float
    """Largest finite value; 0 where there is none."""
    nan: int = 0
    """Number of NaN."""
    inf: int = 0
    """Number of ±infinity."""

    @property
    def bad(self) -> bool:
        """Whether something in it is not finite."""
        return self.nan + self.inf > 0

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return max(abs(self.low), abs(self.high))


def measure(tensors: Sequence[Tensor]) -> list[Extent]:
    """The extents of floating-point tensors. Waits for the device once, and once more for each that is not finite."""
    pairs = iter(_to_host([torch.stack(torch.aminmax(tensor)) for tensor in tensors if tensor.numel()]))
    extents = []
    for tensor in tensors:
        low, high = next(pairs) if tensor.numel() else (0.0, 0.0)
        finite = low - low == high - high == 0
        extents.append(Extent(tensor.dtype, tuple(tensor.shape), low, high) if finite else _measure_bad(tensor))
    return extents


def _to_host(pairs: list[Tensor]) -> list[list[float]]:
    """The numbers of small tensors, copied together where they are of one kind."""
    if len(pairs) > 1 and len({(pair.device, pair.dtype) for pair in pairs}) == 1:
        rows: list[list[float]] = torch.stack(pairs).tolist()
        return rows
    return [pair.tolist() for pair in pairs]


def _measure_bad(tensor: Tensor) -> Extent:
    finite = tensor.isfinite()
    low = torch.where(finite, tensor, torch.inf).amin()
    high = torch.where(finite, tensor, -torch.inf).amax()
    counts = torch.stack([tensor.isnan().sum(), finite.sum()])
    low_value, high_value, nan, known = torch.cat([torch.stack([low, high]).double(), counts]).tolist()
    if known == 0:
        low_value = high_value = 0.0
    return Extent(
        tensor.dtype, tuple(tensor.shape), low_value, high_value, int(nan), tensor.numel() - int(nan) - int(known)
    )
