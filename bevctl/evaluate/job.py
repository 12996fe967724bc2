"""From a config and a checkpoint to an evaluation: data, model, weights, precision, ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bevctl.config.schema import Config
from bevctl.console import Console
from bevctl.data.index import InfoFile, SampleInfo
from bevctl.data.loader import EpochSampler, Samples, make_loader
from bevctl.data.split import open_split
from bevctl.engine.checkpoint import Checkpoint, load_state, read_checkpoint
from bevctl.engine.class_order import check_class_order
from bevctl.engine.dist import World, process_group, select_device
from bevctl.engine.precision import Precision, keep_fp32, resolve_precision
from bevctl.engine.signals import Interruptible
from bevctl.errors import BevctlError
from bevctl.evaluate.run import Evaluation, evaluate_model
from bevctl.evaluate.show import spread
from bevctl.models.build import build_model


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and the samples it is about."""

    evaluation: Evaluation
    samples: tuple[SampleInfo, ...]
    shown: tuple[SampleInfo, ...]
    """Those to draw, whose maps were kept."""


def evaluate_checkpoint(
    config: Config, checkpoint: Path, world: World, console: Console, show: int = 0, min_loaded: float = 1.0
) -> Evaluated:
    """Evaluate a checkpoint of any known layout on the config's evaluation split; every rank calls it.

    `show` samples are chosen for pictures. Raises BevctlError for unusable data, checkpoint or device, and for a
    checkpoint that lacks more than a share 1 - `min_loaded` of the model's entries.
    """
    say = console.info if world.is_main else console.detail
    device = select_device(config.device, world)
    precision = resolve_precision(config.precision.dtype, device)
    dataset = open_split(config, "val")
    info = ground_truth(dataset)
    for note in dataset.notes:
        say(note)
    model = build_model(config)
    weights = read_checkpoint(checkpoint)
    check_class_order(weights, config)
    _load(model, weights, console, world, min_loaded)
    keep_fp32(model, config.precision.fp32_modules, device.type)
    model.to(device)
    shown = spread(info.samples, show)
    say(f"Evaluating {len(dataset)} samples of {info.path} in {precision.name.upper()} on {device}.")
    with process_group(world, device):
        evaluation = evaluate_split(model, dataset, device, precision, world, console, {s.token for s in shown})
    return Evaluated(evaluation, info.samples, shown)


def evaluate_split(
    model: nn.Module,
    dataset: Samples,
    device: torch.device,
    precision: Precision,
    world: World,
    console: Console,
    keep_maps: Collection[str] = (),
    interruptible: Interruptible = nullcontext,
) -> Evaluation:
    """`evaluate_model` on a data set of the evaluation split, loaded as its config says, with progress shown.

    Every rank calls it, inside the process group; each takes its share of the samples.
    """
    config = dataset.config
    sampler = EpochSampler(
        len(dataset), config.train.batch, rank=world.rank, world=world.size, shuffle=False, drop_last=False
    )
    loader = make_loader(dataset, sampler, workers=config.train.workers, pin=device.type == "cuda")
    with console.progress(len(dataset) // world.size, "evaluating") as progress:
        return evaluate_model(
            model,
            loader,
            ground_truth(dataset),
            config,
            autocast=precision.autocast,
            ranks=world,
            progress=progress if world.is_main else None,
            keep_maps=keep_maps,
            interruptible=interruptible,
        )


def ground_truth(dataset: Samples) -> InfoFile:
    """What predictions are scored with. Raises BevctlError where the data set has none that can be read."""
    if dataset.info is None:
        raise BevctlError("The evaluation split has no nuScenes info file to score with.", "Set train.eval_interval=0.")
    return dataset.info


def _load(model: nn.Module, checkpoint: Checkpoint, console: Console, world: World, min_loaded: float) -> None:
    """The checkpoint's weights; of a run that averaged them, the average, which is what its training evaluated."""
    report = load_state(model, checkpoint)
    report.require(share_of_model=min_loaded)
    average = checkpoint.content.get("ema")
    if isinstance(average, Mapping):
        model.load_state_dict(average, strict=False)
    if not world.is_main:
        return
    for sentence in report.sentences():
        console.info(sentence)
    if isinstance(average, Mapping):
        console.info("These are the averaged weights (EMA) of the checkpoint.")
    if report.missing or report.mismatched:
        count = len(report.missing) + len(report.mismatched)
        console.warn(
            f"{count} entries of the model are not in {checkpoint.path} and keep their random values: "
            "these numbers mean little."
        )
