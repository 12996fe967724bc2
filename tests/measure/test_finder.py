"""`train --batch auto` and `--workers auto`: the search, its limits, and that ranks agree."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from bevctl.engine.dist import World
from bevctl.errors import BevctlError, ExitCode
from bevctl.measure import finder
from bevctl.measure.finder import Tuned, Wanted, confirmed, largest_within, settle, try_batch
from tests.engine.disk import lidar_config, write_run_files
from tests.models.nano import nano_batch, nano_config

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(("room", "batch"), [(35, 3), (40, 4), (1000, 4), (5, 1)])
def test_the_largest_batch_that_there_is_room_for(room: float, batch: int) -> None:
    assert largest_within([10, 20, 30, 40], room) == batch


def test_a_batch_that_runs_out_of_memory_is_lowered_until_one_does_not() -> None:
    tried: list[int] = []

    def confirm(batch: int) -> float | None:
        tried.append(batch)
        return 0.5 if batch <= 6 else None

    assert confirmed(9, confirm) == Tuned(6, 0.5)
    assert tried == [9, 7, 6]


def test_not_even_one_sample() -> None:
    with pytest.raises(BevctlError, match="Not even one sample") as caught:
        confirmed(2, lambda _: None)
    assert caught.value.code == ExitCode.RUN_FAILED


def test_a_cpu_keeps_the_configured_batch_and_says_so() -> None:
    said: list[str] = []
    config = nano_config(**{"train.batch": 3})
    assert settle(config, World(), CPU, Wanted(batch=True), said.append) == config
    assert "batch 3 as configured" in said[0]


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(finder.os, "sched_getaffinity", lambda _: set(range(12)))
    return tmp_path


def test_loading_processes_are_limited_by_cores_memory_and_need(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_files(on_disk)
    config = lidar_config(on_disk)
    said: list[str] = []

    def found(world: World = World()) -> int:
        return settle(config, world, CPU, Wanted(workers=True), said.append).train.workers

    assert found() == 11  # a core is left to the training itself
    monkeypatch.setattr(finder, "_loading", lambda _: (0.1, 100))
    assert finder._find_workers(config, World(), 0.1, said.append) == 3  # two samples of 0.1 s in 0.1 s, and a quarter
    assert "the step's time" in said[-1]
    monkeypatch.setattr(finder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1700}))
    assert found() == 2
    assert "/dev/shm" in said[-1]
    monkeypatch.setattr(finder, "gather", lambda _, value: [value, "elsewhere" if isinstance(value, str) else 1])
    assert found(World(0, 2)) == 1
    assert "another rank" in said[-1]


def test_a_rank_that_runs_out_of_memory_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank fits one sample less."""
    config = nano_config(**{"train.batch": 1})
    batches: list[int] = []

    def gather(_: World, value: object) -> list[object]:
        other = value if value is None or isinstance(value, int) else (value if batches[-1] < 4 else None)
        return [value, other]

    def attempt(made: object, *_: object) -> float:
        batches.append(made.train.batch)  # type: ignore[attr-defined]
        return 0.25

    class Dataset:
        def __len__(self) -> int:
            return 100

        def collate(self, items: list[object]) -> list[object]:
            return items

    class Linear:
        def __init__(self, *_: object) -> None:
            pass

        def need(self, _: str, batch: int, __: object) -> object:
            return type("Need", (), {"reserved": batch * GIB})

    fakes = {"gather": gather, "try_batch": attempt, "open_split": lambda *_: Dataset(), "Predictor": Linear}
    fakes |= {"sample_sizes": lambda _: type("Sizes", (), {"p99": None}), "large_sample": lambda *_: 1}
    fakes |= {"on_main": lambda _, work: work(), "resolve_precision": lambda *_: type("P", (), {"name": "fp16"})}
    for name, fake in fakes.items():
        monkeypatch.setattr(finder, name, fake)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * GIB, 8 * GIB))
    said: list[str] = []
    found = settle(config, World(0, 2), torch.device("cuda"), Wanted(batch=True), said.append)
    assert (found.train.batch, batches) == (3, [4, 3])
    assert "4 by prediction for 5.0 GiB" in said[0]


def test_what_the_first_step_takes_while_algorithms_are_tried_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [0]

    def steps(_: object, __: object, number: int) -> list[float]:
        peak[0] = 3 * GIB if peak[0] else 30 * GIB
        return [0.5] * number

    monkeypatch.setattr(finder, "build_step", lambda *_: None)
    monkeypatch.setattr(finder, "step_seconds", steps)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: peak[0])
    config = nano_config(**{"train.batch": 1})
    assert try_batch(config, "fp32", nano_batch(config), torch.device("cuda"), room=4 * GIB) == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_batch_is_refused_under_a_cap_and_accepted_without() -> None:
    device = torch.device("cuda")
    config = nano_config(**{"train.batch": 8})
    batch = nano_batch(config).pin_memory()
    assert try_batch(config, "fp16", batch, device, room=8 * GIB) is not None
    assert try_batch(config, "fp16", batch, device, room=2**20) is None
    torch.cuda.set_per_process_memory_fraction(2**21 / torch.cuda.get_device_properties(device).total_memory)
    try:
        assert try_batch(config, "fp16", batch, device, room=8 * GIB) is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
