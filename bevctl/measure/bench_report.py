"""What a benchmark found: numbers by precision, their ratios, and the document of them."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Seconds of `n` steps."""

    median: float
    p10: float
    p90: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return Spread(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


@dataclass(frozen=True)
class Split:
    """Median seconds of the pieces of a step, measured with the clock's marks in it."""

    data: float
    """Batch to the device."""
    forward: float
    backward: float
    optimizer: float
    """Unscale, clip, AdamW, loss scale."""
    forward_by_part: dict[str, float]
    backward_by_part: dict[str, float]


@dataclass(frozen=True)
class Result:
    """One precision. What a device cannot tell is None, and so is everything where memory ran out."""

    precision: str
    batch: int
    step_s: Spread | None = None
    split: Split | None = None
    allocated_bytes: int | None = None
    """Peak of what tensors held in a step, and all that recorded graphs keep for themselves."""
    reserved_bytes: int | None = None
    """Peak of what the allocator took from the device."""
    host_s: float | None = None
    """Time that the host needs to launch a step on an idle GPU: the sum of `host_by_part`, which are medians."""
    host_by_part: dict[str, float] | None = None
    """By the names of `PartClock`."""
    kernel_s: float | None = None
    """Time that a GPU's kernels and copies take in a step, one after the other."""
    launches: float | None = None
    """Kernels and copies of a step."""
    mfu: float | None = None
    """Arithmetic of matrix products and convolutions per second, over that of a large matrix product alone."""
    loss: float | None = None
    """Of the first batch with the initial weights, without dropout: differs between precisions by rounding alone."""
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything one call measured."""

    hardware: dict[str, Any]
    versions: dict[str, str | None]
    settings: dict[str, Any]
    """What of the config changes the cost of a step."""
    inputs: dict[str, Any]
    forward_flops: int
    """Arithmetic of the matrix products and convolutions of one forward pass."""
    results: list[Result]

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """Each half precision against fp32 and tf32, as far as they were measured."""
        by_name = {result.precision: result for result in self.results if result.step_s is not None}
        pairs = itertools.product(("tf32", "fp16", "bf16"), ("fp32", "tf32"))
        return {f"{a}/{b}": _ratio(by_name[a], by_name[b]) for a, b in pairs if a != b and {a, b} <= by_name.keys()}

    def document(self) -> dict[str, Any]:
        """Body of the `bevctl.bench/1` document."""
        return {**dataclasses.asdict(self), "ratios": self.ratios()}


def _ratio(result: Result, base: Result) -> dict[str, float | None]:
    assert result.step_s
    assert base.step_s
    memory = None
    if result.allocated_bytes is not None and base.allocated_bytes is not None:
        memory = result.allocated_bytes / base.allocated_bytes
    return {
        "speed": base.step_s.median / result.step_s.median,
        "memory": memory,
        "loss_difference": None if result.loss is None or base.loss is None else result.loss - base.loss,
    }
