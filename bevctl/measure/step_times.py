"""How long a training step takes in other settings than those that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.measure.bench_compare import HINT, read_document

FIXED_MS = {False: 13.6, True: 47.0}
"""Of a step, whatever its batch: launches, optimizer, what does not fill the GPU; without and with all parts
recomputed, which run without CUDA graphs then."""
SAMPLE_MS = {"fp16": 10.9, "bf16": 11.1, "fp32": 40.0}
"""Of each sample."""
RECOMPUTED = {"fp16": 0.9, "bf16": 0.9, "fp32": 1.2}
"""Factor on a sample's time where activations are recomputed: part of that is hidden behind the fixed time."""
BASIS = (
    "bevfusion_multitask on an H200 in FP16 at batch 1, 4 and 8, with and without; FP32 from bevfusion_det with TF32"
)
"""Where these numbers are from. Only their ratios are used."""


@dataclass(frozen=True)
class StepSetting:
    """What of a plan changes the time of a step."""

    precision: str
    """fp16, bf16 or fp32."""
    batch: int
    recomputing: bool

    @property
    def cost(self) -> float:
        """Time of a step, ms on the card of BASIS."""
        factor = RECOMPUTED[self.precision] if self.recomputing else 1.0
        return FIXED_MS[self.recomputing] + SAMPLE_MS[self.precision] * factor * self.batch


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one batch."""

    seconds: float
    measured: bool
    """Else it is scaled from the nearest setting that was."""


class StepTimes:
    """Measured steps, and what follows from them for other settings.

    Args:
        known: seconds of a step; empty where nothing was measured.
    """

    def __init__(self, known: Mapping[StepSetting, float]) -> None:
        self._known = dict(known)

    def of(self, setting: StepSetting) -> StepTime | None:
        """The time of `setting`; None where nothing was measured."""
        if setting in self._known:
            return StepTime(self._known[setting], measured=True)
        if not self._known:
            return None
        nearest = min(self._known, key=lambda known: _distance(known, setting))
        return StepTime(self._known[nearest] * setting.cost / nearest.cost, measured=False)


def read_times(path: Path) -> StepTimes:
    """The steps in a document of `bevctl bench --json`; FP32 without TF32 where it holds both.

    Raises:
        BevctlError: the file is no such document.
    """
    document = read_document(path)
    try:
        recomputing = bool((document.get("settings") or {}).get("checkpointing"))
        known = {
            StepSetting(str(r["precision"]), int(r["batch"]), recomputing): float(r["step_s"]["median"])
            for r in document["results"]
            if r.get("step_s") and r["precision"] in SAMPLE_MS
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BevctlError(f"{path} lacks what a benchmark's document has: {error!r}.", HINT) from error
    if not known:
        raise BevctlError(f"{path} holds no measured step.", HINT)
    return StepTimes(known)


def _distance(known: StepSetting, wanted: StepSetting) -> tuple[bool, bool, float]:
    ratio = known.batch / wanted.batch
    return known.precision != wanted.precision, known.recomputing != wanted.recomputing, max(ratio, 1 / ratio)
