"""`train --batch auto` and `--workers auto`: the largest batch that fits, and as many loading processes as it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.data.loader import Samples
from bevctl.data.split import open_split
from bevctl.engine.dist import World, gather, on_main
from bevctl.engine.precision import resolve_precision
from bevctl.errors import BevctlError, ExitCode
from bevctl.measure.memory import Predictor, running_on
from bevctl.measure.memory_inputs import large_sample, sample_sizes
from bevctl.measure.memory_plans import MARGIN
from bevctl.measure.timing import build_step, step_seconds
from bevctl.sizes import format_gib

LARGEST_BATCH = 64
MOST_WORKERS = 16
CONFIRMED = 0.95
"""Share of the free memory that the confirming steps may reserve."""
SPARE = 1.25
"""Loading processes over those that keep up on average: samples differ, and the first batches are awaited."""
_PREFETCHED = 2
"""Batches that a loading process has ready."""
SHM = Path("/dev/shm")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    batch: int
    step_s: float | None = None
    """Seconds of a step with it; None where none was taken."""


@dataclass(frozen=True)
class Wanted:
    """What to find."""

    batch: bool = False
    workers: bool = False


def settle(config: Config, world: World, device: torch.device, wanted: Wanted, tell: Tell) -> Config:
    """`config` with the batch and the loading processes that were asked to be found; the same on every rank.

    Args:
        tell: gets a sentence about each.

    Raises:
        BevctlError: not even one sample fits (exit code 4), the data set cannot be read, or Triton is not installed.
    """
    tuned = Tuned(config.train.batch)
    if wanted.batch and device.type != "cuda":
        tell(f"--batch auto: there is no GPU whose memory it could fill; batch {config.train.batch} as configured")
    elif wanted.batch:
        tuned = _find_batch(config, world, device, tell)
        config = _with_batch(config, tuned.batch)
    if wanted.workers:
        workers = _find_workers(config, world, tuned.step_s, tell)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, workers=workers))
    return config


def _with_batch(config: Config, batch: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch=batch))


def _find_batch(config: Config, world: World, device: torch.device, tell: Tell) -> Tuned:
    free = min(gather(world, torch.cuda.mem_get_info(device)[0]))
    dataset = open_split(config, "train")
    most = max(1, min(LARGEST_BATCH, len(dataset) // world.size))
    precision = resolve_precision(config.precision.dtype, device).name

    def reserved() -> list[int]:
        predictor = Predictor(config, sample_sizes(config).p99, world.size)
        with running_on():
            return [predictor.need(precision, n, config.model.checkpointing).reserved for n in range(1, most + 1)]

    estimated = largest_within(on_main(world, reserved), free * (1 - MARGIN))
    tell(f"--batch auto: {estimated} by prediction for {format_gib(free)} free memory with {MARGIN:.0%} to spare")
    sample = large_sample(config, dataset)

    def confirm(batch: int) -> float | None:
        made = _with_batch(config, batch)
        seconds = try_batch(made, precision, dataset.collate([sample] * batch), device, free * CONFIRMED)
        times = gather(world, seconds)
        return None if None in times else max(times)

    found = confirmed(estimated, confirm)
    tell(f"--batch auto: batch {found.batch}, confirmed by two steps on large samples")
    return found


def largest_within(needs: Sequence[int], room: float) -> int:
    """The largest batch whose need (of 1, 2, ... samples) there is room for; 1 where not even that fits."""
    return max((batch for batch, need in enumerate(needs, start=1) if need <= room), default=1)


def confirmed(batch: int, confirm: Callable[[int], float | None]) -> Tuned:
    """The first of `batch` and smaller ones that `confirm` has seconds for.

    Raises:
        BevctlError: not even one sample fits (exit code 4).
    """
    while (seconds := confirm(batch)) is None:
        if batch == 1:
            raise BevctlError(
                "Not even one sample a step fits into the GPU's memory.",
                "Use --fp16 or --grad-checkpoint, or see `bevctl memory --fit`.",
                ExitCode.RUN_FAILED,
            )
        batch = max(1, min(batch - 1, batch * 7 // 8))
    return Tuned(batch, seconds)


def try_batch(config: Config, precision: str, batch: AnyBatch, device: torch.device, room: float) -> float | None:
    """Seconds of the second of two training steps; None where the first fails, or the second takes more than `room`.

    In the first, cuDNN tries algorithms in all of the memory that is free, and makes do with what there is.
    """
    try:
        with _released(device):
            step = build_step(config, precision, device)
            step_seconds(step, [batch], 1)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            seconds = step_seconds(step, [batch], 1)[0]
            return seconds if torch.cuda.max_memory_reserved(device) <= room else None
    except torch.cuda.OutOfMemoryError:
        return None


@contextlib.contextmanager
def _released(device: torch.device) -> Iterator[None]:
    """Random states are kept, and memory is given back, that training starts as if nothing had been tried."""
    with torch.random.fork_rng([device]):
        try:
            yield
        finally:
            gc.collect()  # a recorded part and its module refer to each other
            torch.cuda.empty_cache()


def _find_workers(config: Config, world: World, step_s: float | None, tell: Tell) -> int:
    here = gather(world, socket.gethostname()).count(socket.gethostname())
    loading_s, size = _loading(open_split(config, "train"))
    batch = config.train.batch
    limits = {
        "cores": max(1, len(os.sched_getaffinity(0)) // here - 1),
        "/dev/shm": _by_shared_memory(batch * size, here),
        "the step's time": MOST_WORKERS if step_s is None else math.ceil(SPARE * batch * loading_s / step_s),
        "the limit": MOST_WORKERS,
    }
    workers = min(gather(world, min(limits.values())))
    reason = next((name for name, limit in limits.items() if limit <= workers), "another rank")
    tell(f"--workers auto: {workers} loading processes a GPU, by {reason}; a sample takes {loading_s:.2f} s to load")
    return workers


def _loading(dataset: Samples) -> tuple[float, int]:
    """Seconds that a sample takes to load, the first left out, and its bytes."""
    started = time.perf_counter()
    for number in range(3):
        item = dataset[0, number % len(dataset)]
        if number == 0:
            started = time.perf_counter()
    seconds = (time.perf_counter() - started) / 2
    sizes: list[int] = []

    def weigh(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    dataset.collate([item]).map_tensors(weigh)
    return seconds, sum(sizes)


def _by_shared_memory(batch_bytes: int, ranks: int) -> int:
    """Loading processes whose batches half of /dev/shm holds; no limit where there is none."""
    if not SHM.is_dir():
        return MOST_WORKERS
    return int(shutil.disk_usage(SHM).free / 2 / ranks / max(1, _PREFETCHED * batch_bytes))
