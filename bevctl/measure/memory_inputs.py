"""How large the samples of a config are: points, active cells of the voxel grid, objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevctl.batch import AnyBatch, Batch
from bevctl.config.schema import Config
from bevctl.data.loader import Index, Samples
from bevctl.data.sample import Sample
from bevctl.data.split import open_split
from bevctl.data.synth.street import street_sample
from bevctl.data.transforms import build_transforms
from bevctl.measure.memory_trace import SampleSize
from bevctl.models.lidar import WINDOWS
from bevctl.ops import backend
from bevctl.ops.sites import Sites
from bevctl.ops.voxelize import grid_shape, voxelize

_SAMPLES, _STREETS = 24, 4
"""Samples looked at: of a data set, or made in memory."""


@dataclass(frozen=True)
class Sizes:
    """Of a config's samples, by quantile; each number is a quantile of its own."""

    typical: SampleSize
    """Medians."""
    p95: SampleSize
    p99: SampleSize
    largest: SampleSize
    each: tuple[SampleSize, ...]
    source: str
    """The info file, or "synthetic"."""
    epoch: int | None = None
    """Samples of an epoch; None without a data set."""

    @property
    def samples(self) -> int:
        """How many were looked at."""
        return len(self.each)


def sample_sizes(config: Config, most: int = _SAMPLES) -> Sizes:
    """Sizes of augmented training samples: of the config's data set, or of streets made in memory without one.

    Args:
        most: samples looked at.

    Raises:
        BevctlError: the data set is there and cannot be read.
    """
    blind = _blind(config)
    info = Path(config.data.root) / config.data.info_train
    dataset = open_split(blind, "train") if info.is_file() else None
    found = [_size(config, sample) for sample in (_stored(dataset, most) if dataset is not None else ())]
    sizes = sizes_of(found or [_size(config, s) for s in _streets(blind, most)], str(info) if found else "synthetic")
    return dataclasses.replace(sizes, epoch=len(dataset) if dataset is not None else None)


def sizes_at(config: Config, indices: Callable[[int], Iterable[Index]]) -> list[SampleSize]:
    """Sizes of the training samples that `indices` names of a data set of so many samples, as an epoch reads them.

    Raises:
        BevctlError: the data set cannot be read.
    """
    dataset = open_split(_blind(config), "train")
    samples = (dataset[index].sample for index in indices(len(dataset)))
    return [_size(config, sample) for sample in samples if sample is not None]


def sizes_of(found: Sequence[SampleSize], source: str) -> Sizes:
    """The quantiles of the sizes of samples from `source`."""
    typical, p95, p99, largest = (_quantile(found, share) for share in (0.5, 0.95, 0.99, 1.0))
    return Sizes(typical, p95, p99, largest, tuple(found), source)


def large_sample(config: Config, dataset: Samples) -> Any:
    """The training sample with the most points of those that `sample_sizes` looks at, as `dataset` gives it."""
    blind = open_split(_blind(config), "train")
    return dataset[0, max(_looked_at(dataset), key=lambda index: _points(blind[0, index].sample))]


def _blind(config: Config) -> Config:
    """`config` whose samples are read without images and maps."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, camera=None, map=None))


def _points(sample: Sample | None) -> int:
    return len(sample.points) if sample is not None and sample.points is not None else 0


def _looked_at(dataset: Samples, most: int = _SAMPLES) -> list[int]:
    return [int(index) for index in np.linspace(0, len(dataset) - 1, min(most, len(dataset)))]


def _stored(dataset: Samples, most: int) -> Iterator[Sample]:
    for index in _looked_at(dataset, most):
        sample = dataset[0, index].sample
        if sample is not None:
            yield sample


def _streets(config: Config, most: int) -> Iterator[Sample]:
    transforms = build_transforms(config, train=True).values()
    for seed in range(min(_STREETS, most)):
        sample = street_sample(config, seed)
        for transform in transforms:
            sample = transform(sample, np.random.default_rng([config.seed, seed]))
        yield sample


def _size(config: Config, sample: Sample) -> SampleSize:
    points = _points(sample)
    sites: tuple[int, ...] = ()
    if config.model.lidar is not None and sample.points is not None:
        sites = active_sites(config, torch.from_numpy(np.asarray(sample.points, dtype=np.float32)))
    return SampleSize(points, sites, len(sample.boxes))


def batch_sizes(config: Config, batch: AnyBatch) -> list[SampleSize]:
    """Of each sample of a batch."""
    if not isinstance(batch, Batch):
        return [SampleSize(points=0, sites=())] * batch.size
    clouds = batch.points if batch.points is not None else [None] * batch.size
    return [
        SampleSize(
            0 if points is None else len(points),
            active_sites(config, points) if points is not None and config.model.lidar is not None else (),
            len(boxes),
        )
        for points, boxes in zip(clouds, batch.boxes, strict=True)
    ]


@torch.no_grad()
def active_sites(config: Config, points: Tensor) -> tuple[int, ...]:
    """Voxels of (P, F) points in the LiDAR frame, m, and the sites after each strided convolution of the encoder."""
    lidar, bounds = config.model.lidar, config.model.point_cloud_range
    assert lidar is not None
    x, y, z = grid_shape(lidar.voxel_size, bounds)
    with backend.forced("torch"):
        voxels = voxelize([points], lidar.voxel_size, bounds, lidar.max_points, lidar.max_voxels[0])
        sites = Sites(voxels.coords, (x, y, z + 1), 1)
        counts = [len(sites)]
        for window in WINDOWS:
            sites, _ = sites.strided_rules(window)
            counts.append(len(sites))
    return tuple(counts)


def _quantile(sizes: Sequence[SampleSize], share: float) -> SampleSize:
    def at(values: list[int]) -> int:
        return int(np.quantile(values, share, method="higher"))

    sites = tuple(at(list(level)) for level in zip(*(size.sites for size in sizes), strict=True))
    return SampleSize(at([s.points for s in sizes]), sites, at([s.boxes for s in sizes]))
