"""Batches for `bevctl bench`: from the data set of a config, or from a street made in memory."""

from __future__ import annotations

import dataclasses
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bevctl.batch import AnyBatch, Batch
from bevctl.config.schema import Config
from bevctl.data.loader import EpochSampler, collate, make_loader
from bevctl.data.sample import Item
from bevctl.data.split import brings_data, open_split
from bevctl.data.synth.street import street_sample
from bevctl.data.transforms import build_transforms
from bevctl.errors import BevctlError


@dataclass(frozen=True)
class Inputs:
    """Batches in host memory, page-locked for a GPU, and where they are from."""

    batches: list[AnyBatch]
    source: str
    """The info file, or "synthetic"."""
    loading_s: float | None
    """Time that one batch took to load with the config's workers, the first left out; None where made in memory."""

    @property
    def points_per_sample(self) -> int | None:
        """Mean number of LiDAR points; None without a LiDAR."""
        own = [batch for batch in self.batches if isinstance(batch, Batch)]
        counts = [len(cloud) for batch in own for cloud in batch.points or ()]
        return round(sum(counts) / len(counts)) if counts else None


def make_inputs(config: Config, count: int, pin: bool) -> Inputs:
    """`count` training batches of `config`, the same every time.

    Raises:
        BevctlError: the data set is there and cannot be read.
    """
    info = Path(config.data.root) / config.data.info_train
    stored = info.is_file() or brings_data(config)
    inputs = _from_data_set(config, count, info) if stored else _from_streets(config, count)
    return dataclasses.replace(inputs, batches=[b.pin_memory() for b in inputs.batches]) if pin else inputs


def _from_data_set(config: Config, count: int, info: Path) -> Inputs:
    dataset = open_split(config, "train")
    sampler = EpochSampler(len(dataset), config.train.batch, seed=config.seed)
    loader = make_loader(dataset, sampler, workers=min(config.train.workers, count))
    batches, instants = [], []
    for batch in itertools.islice(loader, count):
        if batch.problems:
            raise BevctlError(
                f"The data set cannot be read: {batch.problems[0]}", "Repair it, or set data.root elsewhere."
            )
        instants.append(time.perf_counter())
        batches.append(batch)
    waits = len(batches) - 1
    return Inputs(batches, str(info), (instants[-1] - instants[0]) / waits if waits else None)


def street_item(config: Config, seed: int) -> Item:
    """A training sample made in memory, augmented; the same `seed` gives the same one."""
    made = street_sample(config, seed)
    rng = np.random.default_rng([config.seed, seed])
    for transform in build_transforms(config, train=True).values():
        made = transform(made, rng)
    return Item(made)


def _from_streets(config: Config, count: int) -> Inputs:
    size = config.train.batch
    items = [street_item(config, seed) for seed in range(size)]
    return Inputs([collate(_rotated(items, shift)) for shift in range(count)], "synthetic", None)


def _rotated(items: list[Item], shift: int) -> list[Item]:
    return items[shift % len(items) :] + items[: shift % len(items)]
