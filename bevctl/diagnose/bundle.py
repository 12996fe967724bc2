"""Finding the bundle of an incident and opening it: the moment before the step, its batches, the steps after it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bevctl.batch import AnyBatch
from bevctl.config.load import from_dict
from bevctl.config.mmdet3d import check_allowed
from bevctl.config.schema import Config
from bevctl.data.loader import Reshuffle, Samples
from bevctl.data.split import open_split
from bevctl.engine.checkpoint import Checkpoint, newest_checkpoints, read_checkpoint
from bevctl.engine.dist import World, select_device
from bevctl.engine.incident import (
    DOCUMENT,
    FOLDER,
    STATE,
    Incident,
    find_incidents,
    read_batches,
    read_incident,
)
from bevctl.engine.parts import training_loader
from bevctl.engine.resume import Setting
from bevctl.errors import BevctlError
from bevctl.runs.writer import read_run

_GROWING = 3.0
"""A loss this many times the lowest before it is not the noise of its samples."""


@dataclass(frozen=True)
class Moment:
    """A point of a run between two steps."""

    config: Config
    checkpoint: Checkpoint | None
    """Its state; None: that with which the run began."""
    iteration: int
    """Attempted steps before it."""
    setting: Setting
    world: World
    """The rank that is looked at, among those of the run."""
    device: torch.device
    """Where it is run again."""


@dataclass(frozen=True)
class Bundle:
    """An incident, opened."""

    folder: Path
    incident: Incident
    before: Moment
    """The moment before its step."""
    batches: list[AnyBatch]
    """Of the step, one for each accumulated."""
    dataset: Samples | None
    """The run's training samples; None where they are not on this machine."""
    recorded_batches: bool
    """The batches are those of the step; else they were made again from the data set."""
    notes: list[str]

    @property
    def rank(self) -> int:
        return self.before.world.rank

    @property
    def work_dir(self) -> Path:
        """The run's folder; of a bundle that was taken out of it, the bundle's own, which has no checkpoints."""
        return self.folder.parent.parent if self.folder.resolve().parent.name == FOLDER else self.folder

    def steps(self, moment: Moment, count: int) -> Iterator[list[AnyBatch]]:
        """The batches of `count` steps after a moment of the run; none without its data."""
        return iter(()) if self.dataset is None else itertools.islice(steps_after(moment, self.dataset), count)

    def with_config(self, config: Config) -> Bundle:
        """The same incident, with the data as another config reads them. Raises BevctlError where it does not fit."""
        dataset = open_split(config, "train") if self.dataset is not None else None
        return dataclasses.replace(self, dataset=dataset)


def steps_after(moment: Moment, dataset: Samples) -> Iterator[list[AnyBatch]]:
    """The batches of each step after a moment, as the run's rank had or will have them; without an end."""
    config, accumulate = moment.config, moment.config.train.accumulate
    first, inner = divmod(moment.iteration, moment.setting.iters_per_epoch)
    for epoch in itertools.count(first):
        loader = training_loader(
            config, dataset, moment.world, epoch, inner * accumulate, pin=False, reshuffles=_reshuffles(moment)
        )
        yield from itertools.islice(_in_groups(iter(loader), accumulate), moment.setting.iters_per_epoch - inner)
        inner = 0


def _reshuffles(moment: Moment) -> list[Reshuffle]:
    data = moment.checkpoint.content.get("data", {}) if moment.checkpoint is not None else {}
    return [Reshuffle(*entry) for entry in data.get("reshuffles", [])]


def _in_groups(batches: Iterator[AnyBatch], size: int) -> Iterator[list[AnyBatch]]:
    while len(group := list(itertools.islice(batches, size))) == size:
        yield group


def find_bundle(run: Path) -> tuple[Path, list[Path]]:
    """The bundle that a path means, and all those it was chosen from.

    In a run's folder it is the first since the run was last continued: later ones may be consequences.

    Raises:
        BevctlError: there is none.
    """
    if run.is_file():
        run = run.parent  # a file of the bundle, or the log of the run
    if (run / DOCUMENT).is_file():
        return run, [run]
    if not run.exists():
        raise BevctlError(f"{run} does not exist.", "Name the folder of a run, or one below its incident/.")
    work_dir = run.parent if run.name == FOLDER else run
    found = find_incidents(work_dir) if work_dir.is_dir() else []
    if not found:
        raise BevctlError(
            f"No incident is recorded in {run}.",
            "--replay needs the folder of a bevctl run that met numbers that are not finite (or one below its "
            "incident/); without --replay, the log is judged.",
        )
    segments = read_run(work_dir)["segments"]
    began = segments[-1].get("iter", 0) if segments else 0
    return next((path for path in found if int(path.name) > began), found[-1]), found


def open_bundle(folder: Path, device: str, rank: int | None = None) -> Bundle:
    """Reads a bundle for a replay on `device` (auto, cpu or cuda).

    Args:
        rank: whose batches; by default the one that the incident names.

    Raises:
        BevctlError: a file is missing or damaged, the device is absent, or neither batches nor data set are there.
    """
    incident = sound_incident(folder)
    checkpoint = read_checkpoint(folder / STATE)
    config = config_of(checkpoint)
    rank = incident.rank if rank is None else rank
    before = moment_of(config, checkpoint, World(rank=rank, size=incident.world), select_device(device))
    dataset, notes = _dataset(config)
    recorded = read_batches(folder, rank)
    bundle = Bundle(folder, incident, before, list(recorded or []), dataset, recorded is not None, notes)
    bundle.batches.extend(() if recorded else next(bundle.steps(before, 1), []))
    if not bundle.batches:
        reason = notes[0] if notes else "The data set has changed since."
        raise BevctlError(f"{folder} holds no batches, and they cannot be made again. {reason}", "Bring the data back.")
    return bundle


def config_of(checkpoint: Checkpoint) -> Config:
    """The config in a checkpoint, which is checked for damage; that beside it is for the reader.

    Raises BevctlError, also where it names code of another project that nobody allowed to run.
    """
    config = checkpoint.meta.get("config")
    if not isinstance(config, dict):
        raise BevctlError(f"{checkpoint.path} holds no config.", "Use a file that bevctl wrote.")
    found = from_dict(config)
    if found.model.mmdet3d is not None:
        check_allowed(found.model.mmdet3d.config)
    return found


def sound_incident(folder: Path) -> Incident:
    """The incident of a bundle. Raises BevctlError for one that is missing, damaged, or was changed."""
    incident = read_incident(folder)
    if not (_numbers(incident) and incident.iteration >= 1 and 0 <= incident.rank < incident.world):
        raise BevctlError(f"{folder / DOCUMENT} contradicts itself.", "The bundle was changed; use another.")
    return incident


def _numbers(incident: Incident) -> bool:
    """Whether everything that is computed with is a number."""
    whole = (incident.iteration, incident.rank, incident.world)
    real = (incident.loss_scale, incident.lr, incident.grad_norm, *incident.losses.values())
    steps = all(isinstance(step, dict) and {"iteration", "loss"} <= step.keys() for step in incident.ring)
    return steps and all(type(n) is int for n in whole) and all(isinstance(n, int | float) for n in real)


def moment_of(config: Config, checkpoint: Checkpoint, world: World, device: torch.device) -> Moment:
    """The moment that a checkpoint of bevctl's own was written at. Raises BevctlError for one of another origin."""
    try:
        setting = Setting(**checkpoint.meta.get("setting", {}))
    except TypeError:
        setting = None
    if setting is None or checkpoint.iteration is None:
        raise BevctlError(f"{checkpoint.path} does not say how it was trained.", "Use a file that bevctl wrote.")
    # `auto` would choose by the device that is here now.
    precision = dataclasses.replace(config.precision, dtype=setting.precision)
    config = dataclasses.replace(config, precision=precision)
    return Moment(config, checkpoint, checkpoint.iteration, setting, world, device)


def moment_earlier(bundle: Bundle, most: int) -> Moment | None:
    """The latest moment before the trouble that a checkpoint, or the start, gives; None: over `most` steps away."""
    before, sound = bundle.before, sound_until(bundle.incident)
    for path in newest_checkpoints(bundle.work_dir):
        try:
            checkpoint = read_checkpoint(path)
        except BevctlError:
            continue  # another will do
        same = checkpoint.meta.get("setting") == vars(before.setting)
        if same and before.iteration - most <= (checkpoint.iteration or 0) <= sound:
            return moment_of(before.config, checkpoint, before.world, before.device)
    if before.iteration <= most and _began_with_own_weights(bundle):
        return Moment(before.config, None, 0, before.setting, before.world, before.device)
    return None


def sound_until(incident: Incident) -> int:
    """Attempted steps after which the loss had not begun to grow, as far as the recorded steps tell."""
    sound, lowest = incident.iteration - 1, math.inf
    for step in incident.ring:
        loss = step["loss"]
        if isinstance(loss, int | float) and math.isfinite(loss):
            lowest = min(lowest, loss)
            sound = step["iteration"] - 1 if loss <= _GROWING * lowest else sound
    return min(sound, incident.iteration - 2)


def _began_with_own_weights(bundle: Bundle) -> bool:
    """Whether the run's first weights follow from its config alone."""
    segments = read_run(bundle.work_dir)["segments"]
    camera = bundle.before.config.model.camera
    fresh = bool(segments) and segments[0].get("load_from") is None and segments[0].get("iter") == 0
    return fresh and not (camera is not None and camera.pretrained)


def _dataset(config: Config) -> tuple[Samples | None, list[str]]:
    try:
        return open_split(config, "train"), []
    except BevctlError as error:
        return None, [f"The run's data set is not here ({error.message}): the steps after it cannot be run."]
