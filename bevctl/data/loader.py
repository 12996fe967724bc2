"""Samples in batches: the order of an epoch, stacking, and worker processes that outlive no one."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from bevctl.batch import AnyBatch, Batch, Calibration
from bevctl.config.schema import Config
from bevctl.data.info import InfoFile
from bevctl.data.sample import Item, Sample
from bevctl.geometry import invert_rigid

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Index = tuple[int, int]
"""(epoch, position in the data set)"""


class Samples(Protocol):
    """A split of a data set: `collate` makes a batch of what some indices gave."""

    @property
    def config(self) -> Config: ...

    @property
    def info(self) -> InfoFile | None:
        """The annotations that predictions are scored with."""

    @property
    def notes(self) -> Sequence[str]:
        """What the data set lacks, to be said once."""

    @property
    def checkpoint_meta(self) -> Mapping[str, Any]:
        """What the `meta` of checkpoints says beside bevctl's own entries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index) -> Any: ...

    def collate(self, items: Sequence[Any]) -> AnyBatch: ...


class Reshuffle(NamedTuple):
    """From batch `batch` of epoch `epoch` (both from 0) on, the rest of the epoch comes in order `number`."""

    epoch: int
    batch: int
    number: int


@dataclass(frozen=True, eq=False)
class EpochSampler(Sampler[list[Index]]):
    """Batches of (epoch, index) for one rank; every rank gets the same number of batches.

    Training (`shuffle`) goes through a permutation that depends on (seed, epoch) alone; consecutive samples go to
    consecutive ranks. `reshuffles` change the order of what is left of it. A last short batch is dropped with
    `drop_last`, else filled from the start of the order, and a data set smaller than one batch is repeated to fill it.
    Evaluation keeps the order and never repeats a sample, so that its last batches may be short or empty.
    `start_batch` skips the batches that were seen before a stop.
    """

    length: int
    batch: int
    epoch: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1
    start_batch: int = 0
    shuffle: bool = True
    drop_last: bool = True
    reshuffles: tuple[Reshuffle, ...] = ()

    def __post_init__(self) -> None:
        if self.length < 1 or self.batch < 1 or not 0 <= self.rank < self.world or self.start_batch < 0:
            raise ValueError(f"impossible {self}")

    @property
    def batches(self) -> int:
        """Batches of the whole epoch."""
        whole = self.length / (self.batch * self.world)
        return max(1, math.floor(whole) if self.drop_last else math.ceil(whole))

    def __len__(self) -> int:
        return max(0, self.batches - self.start_batch)

    def __iter__(self) -> Iterator[list[Index]]:
        mine = self._order()[self.rank :: self.world]
        for number in range(self.start_batch, self.batches):
            part = mine[number * self.batch : (number + 1) * self.batch]
            yield [(self.epoch, int(index)) for index in part]

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.length)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        order = np.resize(order, self.batches * self.batch * self.world)
        for reshuffle in self.reshuffles:
            if reshuffle.epoch == self.epoch:
                left = order[reshuffle.batch * self.batch * self.world :]
                left[:] = np.random.default_rng([self.seed, self.epoch, reshuffle.number]).permutation(left)
        return order


def make_loader(dataset: Samples, sampler: EpochSampler, *, workers: int, pin: bool = False) -> DataLoader[Any]:
    """The batches that `sampler` names, in its order.

    They are the same for any number of `workers`, and torch's global random state is left alone.
    """
    return _Loader(
        dataset,  # type: ignore[arg-type]  # any object with __getitem__ and __len__ will do
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=dataset.collate,
        pin_memory=pin,
        worker_init_fn=_start_worker,
        generator=torch.Generator().manual_seed(sampler.seed),
        prefetch_factor=2 if workers else None,
    )


class _Loader(DataLoader[Any]):
    """Starts its workers with the stop signals held back, so that none is lost before `_start_worker` runs."""

    def __iter__(self) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(number: int) -> None:
    """Leave stop signals to the parent, which saves a checkpoint first; but obey the parent, and never outlive it."""
    del number
    gc.freeze()  # looking for garbage among what the parent loaded would copy the memory that all of it lies in
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()
    threading.Thread(target=_end_when_told_by, args=(parent,), daemon=True).start()
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request took effect
        os._exit(1)


def _end_when_told_by(parent: int) -> None:
    """Ends this process on a SIGTERM that `parent` itself sent: multiprocessing waits for that when it exits."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)


def collate(items: Sequence[Item]) -> Batch:
    """The samples of `items` as one batch; those that could not be read leave their sentence only."""
    samples = [item.sample for item in items if item.sample is not None]
    return Batch(
        images=_images(samples),
        points=_points(samples),
        calibration=_calibration(samples),
        boxes=[_float(sample.boxes) for sample in samples],
        labels=[torch.from_numpy(sample.labels) for sample in samples],
        bev_map=_maps(samples),
        has_boxes=torch.tensor([sample.has_boxes for sample in samples], dtype=torch.bool),
        has_map=torch.tensor([sample.bev_map is not None for sample in samples], dtype=torch.bool),
        tokens=[sample.token for sample in samples],
        padding=_padding(samples),
        problems=[problem for item in items for problem in item.problems],
    )


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _stack(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> Tensor:
    """(B, *shape) float32; `shape` counts where there is nothing to stack."""
    return _float(np.stack(arrays)) if arrays else torch.zeros((0, *shape))


def _images(samples: Sequence[Sample]) -> Tensor | None:
    """(B, V, 3, H, W) uint8."""
    if not samples or samples[0].images is None:
        return None
    height, width, _ = samples[0].images[0].shape
    stacked = np.empty((len(samples), len(samples[0].images), 3, height, width), dtype=np.uint8)
    for row, sample in zip(stacked, samples, strict=True):
        for target, image in zip(row, sample.images or (), strict=True):
            target[...] = image.transpose(2, 0, 1)
    return torch.from_numpy(stacked)


def _padding(samples: Sequence[Sample]) -> Tensor | None:
    """(B, V, H, W) bool."""
    padded = [sample.padding for sample in samples if sample.padding is not None]
    return torch.from_numpy(np.stack(padded)) if padded else None


def _points(samples: Sequence[Sample]) -> list[Tensor] | None:
    if not samples or samples[0].points is None:
        return None
    return [_float(sample.points) for sample in samples if sample.points is not None]


def _calibration(samples: Sequence[Sample]) -> Calibration:
    cameras = (0, 4, 4)
    lidar2image = [sample.intrinsics @ invert_rigid(sample.camera2lidar) for sample in samples]
    return Calibration(
        intrinsics=_stack([sample.intrinsics for sample in samples], cameras),
        camera2lidar=_stack([sample.camera2lidar for sample in samples], cameras),
        lidar2image=_stack(lidar2image, cameras),
        image_aug=_stack([sample.image_aug for sample in samples], cameras),
        lidar_aug=_stack([sample.lidar_aug for sample in samples], (4, 4)),
        times=_stack([sample.times for sample in samples], (0,)),
    )


def _maps(samples: Sequence[Sample]) -> Tensor | None:
    """Masks of the samples that have one, zeros for the others; None where none has."""
    known = [sample.bev_map for sample in samples if sample.bev_map is not None]
    if not known:
        return None
    blank = np.zeros_like(known[0])
    return _stack([blank if sample.bev_map is None else sample.bev_map for sample in samples], blank.shape)
