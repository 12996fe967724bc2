"""What a GPU did in profiled steps: busy, idle, with what, and in which part of the model the host kept it waiting."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

KERNEL, COPY, PART, WAIT = "kernel", "copy", "part", "wait"
BACKWARD = "backward and optimizer"
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|nchwToFold|convertTensor|addPadding", re.IGNORECASE)
_HALF_PRODUCT = re.compile(
    r"(?:16816|884|1688|wgmma|hgmma|xmma|tensorop|mma).*(?:f16|fp16|bf16|h16|half|__half)|"
    r"(?:h|f16|fp16|bf16|s16816|h16816|h1688|h884)(?:_?s?gemm|_?s?cudnn|wgrad|fprop|dgrad|fmha)|"
    r"(?:f16f16|bf16bf16|flash_fwd|flash_bwd|fmha|hmma|hshhs|hhs)",
    re.IGNORECASE,
)
_TF32_PRODUCT = re.compile(r"tf32", re.IGNORECASE)
_OWN_PRODUCT = re.compile(r"^_(?:convolve|attention)")
"""Of `bevctl.ops.kernels`."""
_PRODUCT = re.compile(r"gemm|gemv|cutlass|cudnn|conv|wgrad|dgrad|fprop|fmha|flash|attention|_mm_|matmul", re.IGNORECASE)
_COMMUNICATION = re.compile(r"nccl", re.IGNORECASE)
_SHORT_GAP = 2e-6
"""Seconds between two kernels that follow each other without a wait."""


@dataclass(frozen=True)
class Span:
    """Something that took time, seconds on one clock."""

    kind: str
    """KERNEL and COPY on the device; PART and WAIT (for the device) on the host."""
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class KernelRecord:
    """Of one step, the mean over those profiled; seconds."""

    step: float
    busy: float = 0.0
    """In which a kernel or a copy ran."""
    launches: float = 0.0
    products: float = 0.0
    """Kernels of matrix products, convolutions and attention."""
    half_products: float = 0.0
    """Of these, on tensor cores in half precision, by their names."""
    tf32_products: float = 0.0
    """Of `products`, on tensor cores in TF32, by their names."""
    own_products: float = 0.0
    """Of `products`, our own kernels, whose names do not say in what they multiply."""
    layout: float = 0.0
    """Kernels of cuDNN that only turn tensors for others: channels first to last and back."""
    to_device: float = 0.0
    communication: float = 0.0
    waits: float = 0.0
    """Of the host, for the device."""
    idle_by_part: dict[str, float] = field(default_factory=dict)
    """Time without a kernel, by the part of the model that the host was in."""
    longest: list[tuple[str, float, float]] = field(default_factory=list)
    """Kernels by name: seconds and launches; what takes longest first."""

    @property
    def idle(self) -> float:
        return max(self.step - self.busy, 0.0)


def summarise(spans: Sequence[Span], steps: int, seconds: float) -> KernelRecord:
    """What `steps` steps of `seconds` together did."""
    device = sorted((s for s in spans if s.kind in (KERNEL, COPY)), key=lambda s: s.start)
    parts = [s for s in spans if s.kind == PART]
    record = KernelRecord(step=seconds / steps)
    merged = _merged(device)
    record.busy = sum(end - start for start, end in merged) / steps
    record.launches = len(device) / steps
    for span in device:
        share = span.seconds / steps
        if _LAYOUT.search(span.name):
            record.layout += share
        elif _PRODUCT.search(span.name):
            record.products += share
            record.half_products += share if _HALF_PRODUCT.search(span.name) else 0.0
            record.tf32_products += share if _TF32_PRODUCT.search(span.name) else 0.0
            record.own_products += share if _OWN_PRODUCT.search(span.name) else 0.0
        record.communication += share if _COMMUNICATION.search(span.name) else 0.0
        record.to_device += share if span.kind == COPY and "HtoD" in span.name else 0.0
    record.waits = sum(s.seconds for s in spans if s.kind == WAIT) / steps
    record.idle_by_part = {name: idle / steps for name, idle in _idle(merged, parts).items()}
    record.longest = _longest(device, steps)
    return record


def _merged(device: Sequence[Span]) -> list[tuple[float, float]]:
    """Times in which something ran, in order, without overlaps."""
    merged: list[tuple[float, float]] = []
    for span in device:
        if merged and span.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end)
        else:
            merged.append((span.start, span.end))
    return merged


def _idle(merged: Sequence[tuple[float, float]], parts: Sequence[Span]) -> Counter[str]:
    """Gaps by the innermost part of the host that began last before the gap's end."""
    found: Counter[str] = Counter()
    for (_, end), (start, _) in itertools.pairwise(merged):
        if start - end > _SHORT_GAP:
            inside = [p for p in parts if p.start <= start <= p.end]
            name = min(inside, key=lambda p: p.seconds).name if inside else BACKWARD
            found[name] += start - end  # type: ignore[assignment]
    return found


def _longest(device: Iterable[Span], steps: int) -> list[tuple[str, float, float]]:
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for span in device:
        seconds[span.name] += span.seconds
        counts[span.name] += 1
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return [(name, seconds[name] / steps, counts[name] / steps) for name in ordered[:10]]
