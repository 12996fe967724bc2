"""How much half precision can give, by the parts that `bevctl bench --json` timed in both number formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevctl.errors import BevctlError
from bevctl.measure.bench_compare import HINT, read_document

GAINS = 1.1
"""Part times in FP32 over half precision from which a part gains."""
BASES, HALVES = ("fp32", "tf32"), ("fp16", "bf16")


@dataclass(frozen=True)
class Timed:
    """A precision at a batch, seconds a step; None for what the document does not have."""

    precision: str
    batch: int
    step: float
    parts: Mapping[str, float]
    """Forward and backward of each part of the model, the copy to the device, the optimizer."""
    host: float | None = None
    """To launch a step."""
    kernel: float | None = None
    """Of the GPU's kernels and copies."""
    launches: float | None = None


@dataclass(frozen=True)
class Pair:
    """The same step in FP32 (or TF32) and in half precision."""

    base: Timed
    half: Timed

    @property
    def speed(self) -> float:
        """How many times as fast half precision is."""
        return self.base.step / self.half.step

    @property
    def host_bound(self) -> bool:
        """Whether the GPU waits for the host's launches in half precision."""
        half = self.half
        return half.host is not None and half.kernel is not None and half.kernel < 0.8 * half.step <= half.host / 0.9

    def gains(self) -> list[tuple[str, float, float, float]]:
        """Part, its seconds in both formats and their ratio; what takes longest in half precision first."""
        shared = [name for name in self.base.parts if self.half.parts.get(name, 0) > 0]
        rows = [
            (name, self.base.parts[name], self.half.parts[name], self.base.parts[name] / self.half.parts[name])
            for name in shared
        ]
        return sorted(rows, key=lambda row: -row[2])

    @property
    def ceiling(self) -> float | None:
        """Amdahl: the speed if the parts that gain took no time at all; None without parts or without a limit."""
        rows = self.gains()
        total = sum(base for _, base, _, _ in rows)
        fixed = sum(base for _, base, _, gain in rows if gain < GAINS)
        return total / fixed if fixed > 0 else None


def read_pair(paths: Sequence[Path]) -> Pair:
    """The half precision of the largest batch that the documents have in FP32 (or TF32) as well.

    Raises:
        BevctlError: a file is no such document, or they hold no such pair.
    """
    timed = {(t.precision, t.batch): t for path in paths for t in _timed(path)}
    pairs = [
        Pair(timed[base, batch], half)
        for (precision, batch), half in timed.items()
        if precision in HALVES
        for base in BASES
        if (base, batch) in timed
    ]
    if not pairs:
        raise BevctlError(
            f"{', '.join(map(str, paths))}: no batch was measured both in FP32 and in half precision.",
            "Measure both: bevctl bench CONFIG --json > FILE.",
        )
    return max(pairs, key=lambda pair: (pair.half.batch, pair.base.precision == "fp32"))


def _timed(path: Path) -> Iterator[Timed]:
    document = read_document(path)
    try:
        for result in document["results"]:
            if result.get("step_s"):
                yield Timed(
                    str(result["precision"]),
                    int(result["batch"]),
                    float(result["step_s"]["median"]),
                    dict(_parts(result.get("split") or {})),
                    _number(result.get("host_s")),
                    _number(result.get("kernel_s")),
                    _number(result.get("launches")),
                )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BevctlError(f"{path} lacks what a benchmark's document has: {error!r}.", HINT) from error


def _parts(split: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for phase in ("forward", "backward"):
        for name, seconds in (split.get(f"{phase}_by_part") or {}).items():
            yield f"{name}, {phase}", float(seconds)
    for name in ("data", "optimizer"):
        if split.get(name) is not None:
            yield name, float(split[name])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
