"""Settings to choose from, each with its memory, time, cost, learning rate and risks."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bevctl.config.rules import PARTS
from bevctl.config.schema import Config
from bevctl.errors import BevctlError, did_you_mean
from bevctl.measure.memory import Need, Predictor
from bevctl.measure.memory_chance import chance_of_running_out
from bevctl.measure.memory_inputs import Sizes
from bevctl.measure.memory_trace import SampleSize
from bevctl.measure.parameters import has_norms_of_batches
from bevctl.measure.step_times import StepSetting, StepTime, StepTimes

MARGIN = 0.1
"""Share of a card that a plan leaves free: the prediction's error, and fragments."""
_BATCHES = (1, 2, 4, 8)
_HALF, _FULL = "fp16", "fp32"
_LETTERS = {"A": ("fp16", 4, False), "B": ("fp16", 8, True), "C": ("fp16", 2, False)}
"""Well-known plans by their letters: FP16 with batch 4, with recomputing and batch 8, with batch 2."""
_LIKELY = 1e-3
"""Chance of running out of memory in an epoch from which on it is a risk to name."""


@dataclass(frozen=True)
class Job:
    """What a plan is for."""

    samples: int
    """Of an epoch."""
    gpus: int = 1
    price: float | None = None
    """Of a GPU for an hour."""


@dataclass(frozen=True)
class Plan:
    """One setting."""

    name: str
    letter: str | None
    """A, B or C."""
    precision: str
    batch: int
    """Samples a GPU."""
    accumulate: int
    workers: int
    checkpointing: tuple[str, ...]
    lr: float
    warmup: int
    typical: Need
    """With typical samples."""
    large: int
    """Bytes of the device with samples of the 99th percentile."""
    step: StepTime | None
    """Of one batch; None where nothing was measured."""
    steps: int
    """Optimizer steps of an epoch."""
    epochs: int
    job: Job
    risk: str = ""
    chance: float | None = None
    """Of running out of memory in an epoch, 0..1; None without a card to fit."""

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step."""
        return self.step.seconds * self.accumulate if self.step is not None else None

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch, without evaluation."""
        return self.step_s * self.steps if self.step_s is not None else None

    @property
    def total_s(self) -> float | None:
        """Seconds of all epochs, without evaluation."""
        return self.epoch_s * self.epochs if self.epoch_s is not None else None

    @property
    def gpu_hours(self) -> float | None:
        """Over all GPUs."""
        return self.total_s * self.job.gpus / 3600 if self.total_s is not None else None

    @property
    def cost(self) -> float | None:
        """In the unit of the price."""
        return self.gpu_hours * self.job.price if self.gpu_hours is not None and self.job.price is not None else None

    @property
    def relative_cost(self) -> float:
        """Time a sample; comparable between plans whether or not something was measured."""
        setting = _step_setting(self.precision, self.batch, self.checkpointing)
        return (self.step.seconds if self.step is not None else setting.cost) / self.batch

    def settings(self) -> dict[str, Any]:
        """The plan as a config for `train --set`."""
        return {
            "model": {"checkpointing": list(self.checkpointing)},
            "train": {"batch": self.batch, "accumulate": self.accumulate, "workers": self.workers},
            "optim": {"lr": self.lr, "lr_scaling": "none", "warmup": self.warmup},
            "precision": {"dtype": self.precision},
        }

    def document(self) -> Mapping[str, Any]:
        """As in the JSON of `bevctl memory`."""
        finish = None if self.total_s is None else datetime.datetime.now() + datetime.timedelta(seconds=self.total_s)
        return {
            "name": self.name,
            "letter": self.letter,
            "precision": self.precision,
            "batch": self.batch,
            "accumulate": self.accumulate,
            "workers": self.workers,
            "checkpointing": list(self.checkpointing),
            "allocated_bytes": self.typical.allocated,
            "reserved_bytes": self.typical.reserved,
            "device_bytes": self.typical.device,
            "device_bytes_p99": self.large,
            "s_per_iter": self.step_s,
            "s_per_iter_measured": self.step is not None and self.step.measured,
            "epoch_s": self.epoch_s,
            "total_s": self.total_s,
            "finish": finish.isoformat(timespec="seconds") if finish is not None else None,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "lr": self.lr,
            "warmup": self.warmup,
            "out_of_memory_chance": self.chance,
            "risk": self.risk,
        }


_Setting = tuple[str, int, tuple[str, ...]]
"""Precision, batch and recomputed parts."""


def _settings(config: Config) -> list[_Setting]:
    half = "bf16" if config.precision.dtype == "bf16" else _HALF
    return [(p, batch, c) for p in (half, _FULL) for c in ((), PARTS) for batch in _BATCHES]


def _name(precision: str, batch: int, checkpointing: tuple[str, ...]) -> str:
    return precision + (f"_batch{batch}" if batch > 1 else "") + ("_checkpoint" if checkpointing else "")


def _letter(precision: str, batch: int, checkpointing: tuple[str, ...]) -> str | None:
    setting = (precision, batch, bool(checkpointing))
    return next((letter for letter, known in _LETTERS.items() if known == setting), None)


def plan_called(wanted: str, config: Config) -> str:
    """The name of the plan of a name or letter. Raises BevctlError with the nearest name."""
    names = {_name(*setting): _name(*setting) for setting in _settings(config)}
    known = names | {letter: _name(*setting) for setting in _settings(config) if (letter := _letter(*setting))}
    if wanted not in known:
        raise BevctlError(f"No plan {wanted!r}.", did_you_mean(wanted, known))
    return known[wanted]


class Planner:
    """Makes plans for one config.

    Args:
        sizes: of its samples.
        times: of steps that were measured.
        card: bytes of GPU memory to fit; None: no card is given.
    """

    def __init__(self, config: Config, sizes: Sizes, times: StepTimes, job: Job, card: int | None = None) -> None:
        self._config, self._sizes, self._times, self._job, self._card = config, sizes, times, job, card
        self._typical = Predictor(config, sizes.typical, job.gpus)
        self._growth = 0 if sizes.p99 == sizes.typical else None
        self._norms_of_batches = has_norms_of_batches(config)

    def plans(self) -> list[Plan]:
        """Every plan: half precision and FP32, with and without recomputing, by batch."""
        return [self.plan(*setting) for setting in _settings(self._config)]

    def plan(self, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Plan:
        """One of them. A smaller batch than the config's is added up to the same samples a step."""
        config, train, optim = self._config, self._config.train, self._config.optim
        step_samples = train.batch * train.accumulate
        accumulate = max(1, step_samples // batch)
        growth = batch * accumulate / step_samples
        batches = max(1, self._job.samples // (batch * self._job.gpus))
        typical = self._typical.need(precision, batch, checkpointing)
        large = typical.device + batch * self._more(precision)
        chance = self._chance(typical, large, batch, batches)
        return Plan(
            name=_name(precision, batch, checkpointing),
            letter=_letter(precision, batch, checkpointing),
            precision=precision,
            batch=batch,
            accumulate=accumulate,
            workers=_workers(config, batch),
            checkpointing=checkpointing,
            lr=float(f"{optim.lr * (growth if optim.lr_scaling == 'linear' else math.sqrt(growth)):.3g}"),
            warmup=max(optim.warmup, round(optim.warmup * math.sqrt(growth) / 100) * 100),
            typical=typical,
            large=large,
            step=self._times.of(_step_setting(precision, batch, checkpointing)),
            steps=max(1, batches // accumulate),
            epochs=train.epochs,
            job=self._job,
            risk="; ".join(self._risks(precision, batch, growth, checkpointing, chance)),
            chance=chance,
        )

    def _risks(
        self, precision: str, batch: int, growth: float, checkpointing: tuple[str, ...], chance: float | None
    ) -> Iterator[str]:
        if chance is not None and chance >= _LIKELY:
            yield f"runs out of memory in {chance:.1%} of epochs"
        if precision == _HALF:
            yield "loss scale can overflow"
        if precision == _FULL:
            yield "cuDNN takes more without TF32"
        if growth > 1:
            yield f"step of {growth:g} times the samples: check accuracy"
        if batch == 1 and self._norms_of_batches:
            yield "norms see one sample"
        if checkpointing:
            yield "a second forward pass"

    def _more(self, precision: str) -> int:
        """What a large sample takes more than a typical one, taken from half precision without recomputing."""
        if self._growth is None:
            asked = (_HALF, 1, ())
            large = Predictor(self._config, self._sizes.p99, self._job.gpus).need(*asked).device
            self._growth = max(0, large - self._typical.need(*asked).device)
        return self._growth * (2 if precision == _FULL else 1)

    def _chance(self, typical: Need, large: int, batch: int, steps: int) -> float | None:
        """From what the samples' sizes add to a batch of typical ones."""
        if self._card is None:
            return None
        low, high = _extent(self._sizes.typical), _extent(self._sizes.p99)
        if high == low:
            return float(typical.device > self._card)
        slope = (large - typical.device) / (batch * (high - low))
        room = self._card - typical.device + batch * slope * low
        return chance_of_running_out([slope * _extent(size) for size in self._sizes.each], room, batch, steps)


def fits_on(plan: Plan, card: int) -> bool:
    """Whether a plan leaves `MARGIN` of a card of `card` bytes free even with large samples."""
    return plan.large <= card * (1 - MARGIN)


def best_fit(candidates: Sequence[Plan], card: int) -> Plan | None:
    """The fastest plan, by the time of a sample, that fits on a card of `card` bytes even with large samples.

    None where nothing fits with `MARGIN` to spare.
    """
    fitting = [plan for plan in candidates if fits_on(plan, card)]
    return min(fitting, key=lambda plan: plan.relative_cost, default=None)


def _step_setting(precision: str, batch: int, checkpointing: Sequence[str]) -> StepSetting:
    return StepSetting(precision, batch, bool(checkpointing))


def _extent(size: SampleSize) -> int:
    """One number for how large a sample is: voxels, or points where there are none."""
    return size.sites[0] if size.sites else size.points


def _workers(config: Config, batch: int) -> int:
    """As many as keep no more samples ready than the config's own, but two where it has two."""
    workers = config.train.workers
    return min(workers, max(2, workers * config.train.batch // batch))
