"""A recorded step set up to run again: its config (changed or not), the state before it, its batches."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bevctl.batch import AnyBatch
from bevctl.config.load import from_dict, to_dict
from bevctl.config.schema import Config
from bevctl.diagnose.bundle import Moment
from bevctl.engine.checkpoint import Checkpoint
from bevctl.engine.parts import build_state
from bevctl.engine.precision import Precision, resolve_precision
from bevctl.engine.resume import TrainState, restore
from bevctl.engine.schedule import Schedule
from bevctl.engine.step import TrainStep
from bevctl.errors import BevctlError


@dataclass(frozen=True)
class Result:
    """What one step came to, on the host."""

    losses: dict[str, float]
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    seconds: float

    @property
    def is_finite(self) -> bool:
        return not self.skipped and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class Rehearsal:
    """Objects of a run, restored to a moment; `run` takes its steps one after the other."""

    state: TrainState
    step: TrainStep
    precision: Precision
    iteration: int

    def run(self, batches: Sequence[AnyBatch]) -> Result:
        """The next step, exactly as training takes it."""
        started = time.perf_counter()
        tensors = self.step.run(batches, self.iteration)
        self.iteration += 1
        losses = {name: float(value) for name, value in tensors.losses.items()}
        return Result(
            losses=losses,
            loss=float(tensors.total),
            grad_norm=float(tensors.grad_norm),
            loss_scale=float(tensors.loss_scale),
            skipped=bool(tensors.skipped),
            seconds=time.perf_counter() - started,
        )


def rehearse(moment: Moment, changes: Mapping[str, Any] | None = None) -> Rehearsal:
    """Sets a moment up, with config values changed by dotted key.

    Raises:
        BevctlError: the device cannot do the precision, or a value does not fit the config or the model.
    """
    if moment.device.type == "cuda":
        gc.collect()  # the model before this one may hold itself through its wrapped methods
    config = changed(moment.config, changes or {})
    precision = resolve_precision(config.precision.dtype, moment.device)
    length = moment.setting.iters_per_epoch
    state, _ = build_state(config, precision, moment.world, moment.device, length)
    if moment.checkpoint is not None:
        _restore(state, moment, moment.checkpoint)
    state.model.train()
    total = config.train.schedule_iters or config.train.epochs * length
    step = TrainStep(
        state,
        state.model,
        Schedule(config.optim, total),
        precision,
        clip=config.optim.clip,
    )
    return Rehearsal(state, step, precision, moment.iteration)


def _restore(state: TrainState, moment: Moment, checkpoint: Checkpoint) -> None:
    """Under the checkpoint's own setting everything is restored, random states too, whatever was changed."""
    try:
        restore(dataclasses.replace(state, setting=moment.setting), checkpoint, moment.world)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BevctlError(
            f"{checkpoint.path} cannot be restored: {type(error).__name__}: {error}.",
            "The file was changed, or is of another version of bevctl; use another.",
        ) from error


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values by dotted key. Raises BevctlError for one that does not fit."""
    document = to_dict(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            place = place[section]
        place[name] = value
    return from_dict(document)
