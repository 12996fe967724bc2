"""What a run is made of: data, model, optimizer and schedule, before any checkpoint is read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.data.loader import EpochSampler, Reshuffle, Samples, make_loader
from bevctl.data.split import open_split
from bevctl.engine.dist import World
from bevctl.engine.ema import WeightAverage
from bevctl.engine.optim import build_optimizer, unmatched_groups
from bevctl.engine.precision import Precision, keep_fp32, resolve_precision
from bevctl.engine.resume import Setting, TrainState
from bevctl.engine.scaler import LossScaler
from bevctl.engine.schedule import Schedule, peak_lr, written_for_other_epochs
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from bevctl.ops import spconv_bridge
from bevctl.ops.site_norm import share_statistics


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    config: Config
    world: World
    device: torch.device
    precision: Precision
    dataset: Samples
    state: TrainState
    schedule: Schedule
    notes: list[str]

    def loader(self, epoch: int, start_batch: int) -> Iterable[AnyBatch]:
        pin = self.device.type == "cuda"
        order = self.state.reshuffles
        return training_loader(self.config, self.dataset, self.world, epoch, start_batch, pin, order)


def training_loader(
    config: Config,
    dataset: Samples,
    world: World,
    epoch: int,
    start_batch: int,
    pin: bool,
    reshuffles: Sequence[Reshuffle] = (),
) -> Any:
    sampler = EpochSampler(
        len(dataset),
        config.train.batch,
        epoch=epoch,
        seed=config.seed,
        rank=world.rank,
        world=world.size,
        start_batch=start_batch,
        reshuffles=tuple(reshuffles),
    )
    return make_loader(dataset, sampler, workers=config.train.workers, pin=pin)


def build_parts(config: Config, world: World, device: torch.device) -> Parts:
    """Data, model and optimizer of a run, with equal weights and different random streams on every rank.

    Raises:
        BevctlError: the data is missing, the GPU cannot do the precision, a pattern matches nothing.
    """
    precision = resolve_precision(config.precision.dtype, device)
    dataset = open_split(config, "train")
    batches = len(training_loader(config, dataset, world, 0, 0, pin=False))
    iters_per_epoch = batches // config.train.accumulate
    if iters_per_epoch == 0:
        raise BevctlError(
            f"An epoch has {batches} batches a GPU, fewer than train.accumulate = {config.train.accumulate}.",
            "Lower --accumulate or --batch.",
        )
    state, notes = build_state(config, precision, world, device, iters_per_epoch)
    total = config.train.schedule_iters or config.train.epochs * iters_per_epoch
    notes += [*written_for_other_epochs(config), *_visible_gpus(world, device), *dataset.notes]
    return Parts(config, world, device, precision, dataset, state, Schedule(config.optim, total), notes)


def build_state(
    config: Config, precision: Precision, world: World, device: torch.device, iters_per_epoch: int
) -> tuple[TrainState, list[str]]:
    """Model, optimizer, scaler and average as a run starts with them, and what to say about them; needs no data.

    Raises:
        BevctlError: a pattern of precision.fp32_modules matches nothing.
    """
    _seed(config.seed)
    model = build_model(config)
    if config.train.sync_bn and world.size > 1 and device.type == "cuda":
        share_statistics(model)
    kept = keep_fp32(model, config.precision.fp32_modules, device.type)
    model.to(device)
    _seed(config.seed + 1000 * world.rank)
    lr, lr_sentence = peak_lr(config.optim, config.train.batch * world.size * config.train.accumulate)
    state = TrainState(
        model=model,
        optimizer=build_optimizer(model, config.optim, lr),
        scaler=LossScaler(config.precision, precision.is_half, device),
        average=WeightAverage(model, config.train.ema) if config.train.ema else None,
        setting=Setting(
            precision.name, config.train.batch, world.size, config.train.accumulate, iters_per_epoch, config.seed
        ),
        half=precision.is_half,
    )
    notes = [f"{device_name(device)}, {precision.name.upper()}, {lr_sentence}"]
    notes += [f"optim.groups: no parameter's name contains {p!r}" for p in unmatched_groups(model, config.optim)]
    notes += [f"Kept in FP32: {', '.join(kept)}"] if kept and precision.name != "fp32" else []
    if precision.is_half and device.type == "cpu":
        notes.append("FP16 is emulated on a CPU, convolutions are tens of times slower: use BF16 or FP32 for real work")
    if config.model.lidar is not None and device.type == "cuda":
        notes.append(spconv_bridge.reason(device, precision.dtype))
    return state, notes


def _seed(seed: int) -> None:
    """Starts every generator of this process; models of other projects draw from NumPy's and Python's, too."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _visible_gpus(world: World, device: torch.device) -> list[str]:
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return [f"Using 1 of {count} visible GPUs; --gpus {count} uses all"] if world.size == 1 and count > 1 else []
