"""How close the numbers of each module come to the limits of FP16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bevctl.numerics.formats import FLUSHED_EXPONENT, FP16_MAX, SATURATED, SMALLEST_EXPONENT, short_name
from bevctl.numerics.record import OpRecord

SAMPLE = 2**16
"""Elements of a tensor that shares are estimated from, evenly spaced."""
_LOWEST, _HIGHEST = -64, 64
"""Binary exponents that are told apart; beyond lies what the ends count."""


@dataclass(frozen=True)
class ModuleRange:
    """The numbers that the operations of one module made, in one phase and one format."""

    module: str
    phase: str
    """backward: numbers that grow with the loss scale; forward: all others."""
    dtype: str
    """float16, bfloat16, float32."""
    largest: float
    """Largest finite magnitude; exact."""
    largest_op: str
    """The operation that made it."""
    place: str
    """Its file and line."""
    saturated: float
    """Largest share of an operation's result above 0.9 × 65504; exact."""
    exponents: tuple[int, ...]
    """Sampled non-zero numbers by binary exponent, from −64 on."""

    @property
    def headroom(self) -> float:
        """How many times larger the numbers may get before FP16 overflows."""
        return FP16_MAX / self.largest if self.largest else float("inf")

    def subnormal(self, scale: float = 1.0) -> float:
        """Share of non-zero numbers below 2^-14, where FP16 loses bits, once multiplied by `scale`."""
        return self._share_below(SMALLEST_EXPONENT, scale)

    def flushed(self, scale: float = 1.0) -> float:
        """Share of non-zero numbers that FP16 rounds to zero, once multiplied by `scale`."""
        return self._share_below(FLUSHED_EXPONENT, scale)

    def _share_below(self, exponent: int, scale: float) -> float:
        total = sum(self.exponents)
        shift = round(torch.log2(torch.tensor(scale, dtype=torch.float64)).item())
        below = max(0, min(len(self.exponents), exponent - shift - _LOWEST))
        return sum(self.exponents[:below]) / total if total else 0.0


@dataclass
class _Count:
    largest: float = 0.0
    op: str = ""
    place: str = ""
    saturated: float = 0.0
    exponents: dict[torch.device, Tensor] = field(default_factory=dict)


class RangeCounter:
    """Collects ranges while a trace runs; the counts stay on the device until they are asked for."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], _Count] = {}

    def add(self, record: OpRecord, outputs: Sequence[Tensor]) -> None:
        """Counts what an operation inside or behind the model made."""
        if record.phase == "outside":
            return
        phase = "backward" if record.is_gradient else "forward"
        for tensor, extent in zip(outputs, record.outputs, strict=True):
            if tensor.numel() == 0:
                continue
            count = self._counts.setdefault((record.module, phase, short_name(tensor.dtype)), _Count())
            if extent.largest > count.largest:
                count.largest, count.op, count.place = extent.largest, record.op, str(record.place)
            if extent.largest > SATURATED:
                count.saturated = max(count.saturated, float((tensor.abs() > SATURATED).float().mean()))
            before = count.exponents.get(tensor.device, 0)
            count.exponents[tensor.device] = _exponents(tensor) + before

    def ranges(self) -> list[ModuleRange]:
        """One entry for each module, phase and format, the closest to FP16's limit first."""
        ranges = [
            ModuleRange(*key, c.largest, c.op, c.place, c.saturated, _to_tuple(c.exponents))
            for key, c in self._counts.items()
        ]
        return sorted(ranges, key=lambda r: r.headroom)


def _exponents(tensor: Tensor) -> Tensor:
    """(128,) counts of the binary exponents of an even sample of the non-zero finite elements."""
    flat = tensor.detach().flatten() if tensor.is_contiguous() else _in_memory_order(tensor.detach())
    sample = flat[:: max(1, flat.numel() // SAMPLE)].float()
    exponents = (torch.frexp(sample).exponent - 1).clamp(_LOWEST, _HIGHEST - 1)
    counted = (sample != 0) & sample.isfinite()
    centres = torch.where(counted, exponents + 0.5, _LOWEST - 1.0)
    return torch.histc(centres, bins=_HIGHEST - _LOWEST, min=_LOWEST, max=_HIGHEST)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps as they lie in memory, which copies nothing; else a flat copy."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    packed = tensor.permute(order)
    return packed.flatten() if packed.is_contiguous() else tensor.flatten()


def _to_tuple(counts: Mapping[torch.device, Tensor]) -> tuple[int, ...]:
    return tuple(int(sum(bins)) for bins in zip(*(tensor.tolist() for tensor in counts.values()), strict=True))
