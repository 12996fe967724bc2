"""Everything that `bevctl memory` tells of a config, and its JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.engine.precision import resolve_precision
from bevctl.errors import BevctlError, ExitCode
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.memory import BASIS, Need, Predictor, predict
from bevctl.measure.memory_inputs import Sizes, batch_sizes, sample_sizes
from bevctl.measure.memory_measured import Measured, measure_memory
from bevctl.measure.memory_plans import Job, Plan, Planner, best_fit
from bevctl.measure.parameters import ParameterCounts, count_parameters
from bevctl.measure.step_times import StepSetting, StepTimes

SAMPLES_OF_NUSCENES, SAMPLES_OF_CBGS = 28_130, 123_580
"""Training samples of nuScenes trainval, as they are and balanced over the classes; assumed without a data set."""
_BATCHES, _STEPS = 2, 10
"""Different batches of a measurement, and steps that are timed."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """The config's own setting on a GPU, and what was predicted for the same batches."""

    measured: Measured
    predicted: Need

    @property
    def errors(self) -> dict[str, float]:
        """Prediction over measurement, less 1."""
        return {
            name: getattr(self.predicted, name) / getattr(self.measured, name) - 1
            for name in ("allocated", "reserved", "device")
        }


@dataclass(frozen=True)
class MemoryReport:
    """What the command shows."""

    config: Config
    precision: str
    counts: ParameterCounts
    sizes: Sizes
    by_size: Mapping[str, Need]
    """The config's own setting by how large its samples are: p50, p95, p99, max."""
    plans: Sequence[Plan]
    job: Job
    comparison: Comparison | None = None
    card: int | None = None

    @property
    def need(self) -> Need:
        return self.by_size["p50"]

    @property
    def chosen(self) -> Plan | None:
        """The fastest plan for the card."""
        return best_fit(self.plans, self.card) if self.card is not None else None

    def document(self) -> dict[str, Any]:
        """The JSON document, without its head."""
        compared = self.comparison
        parts = self.need.components if compared is None else compared.measured.components
        return {
            "source": "estimated" if compared is None else "measured",
            "basis": BASIS,
            "precision": self.precision,
            "parameters": dataclasses.asdict(self.counts),
            "components": [{"name": name, "bytes": size} for name, size in parts.items()],
            "peak": _peak(self.need if compared is None else compared.measured),
            "predicted": None if compared is None else _compared(compared),
            "start_reserved_bytes": None if compared is None else compared.measured.start_reserved,
            "by_size": {name: _peak(found) for name, found in self.by_size.items()},
            "samples": {**dataclasses.asdict(self.sizes), "samples": self.sizes.samples},
            "job": dataclasses.asdict(self.job),
            "plans": [plan.document() for plan in self.plans],
            "fit": self.chosen.name if self.chosen is not None else None,
        }


def _peak(found: Need | Measured) -> dict[str, int]:
    return {"allocated_bytes": found.allocated, "reserved_bytes": found.reserved, "device_bytes": found.device}


def _compared(compared: Comparison) -> dict[str, Any]:
    parts = [{"name": name, "bytes": size} for name, size in compared.predicted.components.items()]
    return {"components": parts, **_peak(compared.predicted), "errors": compared.errors}


def examine(
    config: Config, times: StepTimes, gpus: int, price: float | None, card: int | None, tell: Tell
) -> MemoryReport:
    """Predicts a config's memory, and plans for it.

    Raises:
        BevctlError: the data set is there and cannot be read, or Triton is not installed (exit code 3).
    """
    counts = count_parameters(config)
    tell("Looking at samples, tracing steps of one and two of them")
    sizes = sample_sizes(config)
    job = Job(sizes.epoch or (SAMPLES_OF_CBGS if config.data.cbgs else SAMPLES_OF_NUSCENES), gpus, price)
    precision = "fp16" if config.precision.dtype == "auto" else config.precision.dtype
    setting = (precision, config.train.batch, config.model.checkpointing)
    quantiles = {"p50": sizes.typical, "p95": sizes.p95, "p99": sizes.p99, "max": sizes.largest}
    known: dict[Any, Need] = {}
    for size in quantiles.values():
        if size not in known:
            known[size] = Predictor(config, size, gpus).need(*setting)
    by_size = {name: known[size] for name, size in quantiles.items()}
    plans = Planner(config, sizes, times, job, card).plans()
    return MemoryReport(config, precision, counts, sizes, by_size, plans, job, card=card)


def measure(config: Config, device: torch.device, tell: Tell) -> Comparison:
    """Trains a few steps of the config's own setting, and predicts the same.

    Raises:
        BevctlError: there is no GPU (exit code 3), or its memory ran out (4).
    """
    if device.type != "cuda":
        raise BevctlError("No GPU to measure on.", "Leave --measure out: memory is predicted then.", ExitCode.UNKNOWN)
    precision = resolve_precision(config.precision.dtype, device).name
    batches = make_inputs(config, _BATCHES, pin=True).batches
    measured = measure_alone(config, precision, batches, device, tell)
    needs = [predict(config, precision, batch_sizes(config, batch)) for batch in batches]
    return Comparison(measured, max(needs, key=lambda need: need.allocated))


def measure_alone(
    config: Config, precision: str, batches: Sequence[AnyBatch], device: torch.device, tell: Tell
) -> Measured:
    """Trains a few steps of the config's own setting.

    Raises:
        BevctlError: the GPU's memory ran out (exit code 4).
    """
    tell(f"Training {_STEPS} steps in {precision.upper()} after a warm-up")
    try:
        return measure_memory(config, precision, batches, device, _STEPS, tell)
    except torch.cuda.OutOfMemoryError as error:
        told = str(error).split(". ")[0]
        raise BevctlError(
            f"The GPU's memory ran out: {told}.", "Lower --batch, or use --fit.", ExitCode.RUN_FAILED
        ) from error


def own_setting(config: Config, precision: str) -> StepSetting:
    """What a measurement of the config itself is a time of."""
    return StepSetting(precision, config.train.batch, bool(config.model.checkpointing))
