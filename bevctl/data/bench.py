"""How many samples a second one core prepares, step by step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from bevctl.data.loader import collate
from bevctl.data.nuscenes import Item, NuScenesDataset
from bevctl.errors import BevctlError, ExitCode

STACK = "stack into a batch"

Progress = Callable[[int], None]
"""Called with the number of samples done."""


@dataclass(frozen=True)
class StageCost:
    """Mean cost of one step of preparing a sample."""

    name: str
    cpu_s: float
    """Processor time, of all threads together."""
    wall_s: float
    """Time that passed; more than `cpu_s` where the disk or other processes are waited for."""

    @property
    def samples_per_s(self) -> float:
        """Of one core that does nothing else."""
        return 1 / max(self.cpu_s, 1e-9)


@dataclass(frozen=True)
class DataBench:
    """What a data set's samples cost on this machine."""

    stages: tuple[StageCost, ...]
    samples: int
    problems: tuple[str, ...]

    @property
    def total(self) -> StageCost:
        return StageCost("total", sum(s.cpu_s for s in self.stages), sum(s.wall_s for s in self.stages))


def bench_data(dataset: NuScenesDataset, samples: int, progress: Progress | None = None) -> DataBench:
    """Prepare `samples` samples of epoch 0, evenly spread, after one that is not counted.

    Raises BevctlError (exit 4) where none of them can be read.
    """
    clock = _Clock()
    problems: list[str] = []
    with suppress(BevctlError):  # what cannot be read is told below
        _prepare(dataset, 0, _Clock())
    measured = 0
    for number, position in enumerate(np.linspace(0, len(dataset), samples, endpoint=False).astype(int)):
        try:
            _prepare(dataset, int(position), clock)
            measured += 1
        except BevctlError as error:
            problems.append(error.message)
        if progress is not None:
            progress(number + 1)
    if not measured:
        raise BevctlError(
            f"No sample can be read; the first: {problems[0]}",
            "`bevctl data check` counts what is missing.",
            ExitCode.RUN_FAILED,
        )
    return DataBench(clock.costs(measured), measured, tuple(problems))


def _prepare(dataset: NuScenesDataset, position: int, clock: _Clock) -> None:
    """One sample, as `dataset[(0, position)]` makes it, and a batch of it."""
    info = dataset.info_at(position)
    rng = dataset.generator(0, position)
    sample = dataset.bare_sample(info)
    for name, step in dataset.steps(info, 0).items():
        with clock.running(name):
            sample = step(sample, rng)
    with clock.running(STACK):
        collate([Item(sample)])


class _Clock:
    """Adds up time by name, in the order in which the names came first."""

    def __init__(self) -> None:
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._wall: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self._cpu[name] += time.process_time() - cpu
        self._wall[name] += time.perf_counter() - wall

    def costs(self, samples: int) -> tuple[StageCost, ...]:
        return tuple(StageCost(name, cpu / samples, self._wall[name] / samples) for name, cpu in self._cpu.items())
