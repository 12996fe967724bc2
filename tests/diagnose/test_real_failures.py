"""Runs that are stopped, robbed of a loading process, or out of memory for real, and what `diagnose` says of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import multiprocessing

from bevctl.console import Console
from bevctl.data.sample import Item
from bevctl.diagnose import oom, rank_processes
from bevctl.diagnose.memory_savings import Savings
from bevctl.engine import parts as engine_parts
from bevctl.engine import run as engine_run
from bevctl.engine.dist import World
from bevctl.monitor import state
from bevctl.runs.heartbeat import read_beats
from bevctl.runs.records import Beat
from bevctl.runs.writer import read_run
from tests.conftest import Outcome
from tests.engine.disk import write_run_files
from tests.engine.fakes import Bench, PointData, point_config

Invoke = Callable[..., Outcome]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
PATIENCE_S = 120.0


@contextmanager
def training(folder: Path, *arguments: str, **overrides: object) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run of hundreds of epochs in a process of its own, from its first record on."""
    settings: dict[str, Any] = {"train.epochs": 500, **overrides}
    config, run = write_run_files(folder, **settings), folder / "run"
    command = [
        sys.executable,
        "-m",
        "bevctl",
        "train",
        str(config),
        "--work-dir",
        str(run),
        "--no-preflight",
        *arguments,
    ]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: (run / "log.jsonl").is_file() and (run / "log.jsonl").stat().st_size > 0)
            yield process, run
        finally:
            end_with_children(process.pid)


def end_with_children(pid: int) -> None:
    """Kills a process and all below it: ranks live in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it took too long"
        time.sleep(0.05)


def last_words(run: Path) -> list[Beat]:
    """Of the ranks, by rank."""
    return read_beats(run, read_run(run))


@pytest.fixture
def _without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes.shutil, "which", lambda _: None)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls a run stalled that is silent for ten of its short iterations, and a second at least."""
    monkeypatch.setattr(state, "LEAST_SILENCE_S", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("_without_py_spy", "_impatient")
def test_a_rank_that_is_stopped_is_named(invoke: Invoke, tmp_path: Path) -> None:
    with training(tmp_path, "--gpus", "2", "--device", "cpu") as (process, run):
        ranks = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
        ranks[0].send_signal(signal.SIGSTOP)
        wait_for(lambda: ranks[0].status() == psutil.STATUS_STOPPED)
        beat = last_words(run)[1]
        result = invoke("diagnose", "hang", run, "--json")
    told = result.document["findings"][0]
    assert (result.code, told["id"]) == (1, "HANG103")
    assert told["title"] == f"rank 1 (pid {ranks[0].pid}): stopped by a signal (SIGSTOP, SIGTSTP)"
    assert told["fix"][0]["why"] == f"kill -CONT {ranks[0].pid}"
    assert "HANG104" not in [finding["id"] for finding in result.document["findings"]], "one verdict"
    shown = [result.document["ranks"][1][name] for name in ("rank", "iteration", "doing", "host")]
    assert shown == [1, beat.iteration, beat.doing.value, beat.host]
    evidence = [entry for entry in told["evidence"] if re.match(r"rank 1$|ranks 0-1$", entry["where"])]
    assert any(f"iteration {beat.iteration} for" in entry["what"] for entry in evidence)


SLEEPS_IN = 6
"""Iteration in which rank 1 waits for ever."""


class _Sleeper(PointData):
    """Data that come no more from the first sample of one iteration on, of two a rank."""

    def __getitem__(self, index: tuple[int, int]) -> Item:
        self.drawn = getattr(self, "drawn", 0) + 1
        if self.drawn == 2 * SLEEPS_IN - 1:
            time.sleep(3600)
        return super().__getitem__(index)


def _rank(rank: int, run: Path, port: int, device: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch, Console(io.StringIO(), io.StringIO()))
        if rank == 1:
            patch.setattr(engine_parts, "open_split", _Sleeper)
        bench.plain = True  # nothing in its forward pass waits for the other rank
        config = dataclasses.replace(point_config(run, train={"epochs": 9}), device=device)
        engine_run.train(config, engine_run.RunOptions(), World(rank, 2, rank), bench.console)


@pytest.mark.parametrize(
    ("device", "waits"),
    [
        pytest.param("cpu", "computes gradients", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            "waits for the device",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
            ],
        ),
    ],
)
@pytest.mark.usefixtures("_without_py_spy", "_impatient")
def test_a_rank_that_sleeps_is_named(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, waits: str
) -> None:
    run = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = multiprocessing.spawn(_rank, (run, port, device), nprocs=2, join=False)
    try:
        wait_for(lambda: [beat.iteration for beat in last_words(run)] == [SLEEPS_IN] * 2)
        wait_for(lambda: invoke("diagnose", "hang", run).code == 1)  # silent for long enough
        result = invoke("diagnose", "hang", run, "--json")
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        afar = invoke("diagnose", "hang", run, "--json")
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    for document in (result.document, afar.document):
        told = document["findings"][0]
        assert (told["id"], told["severity"]) == ("HANG104", "fail")
        assert re.fullmatch(
            rf"rank 1 waits for data in iteration {SLEEPS_IN} for \d+ s; rank 0 {waits} in iteration {SLEEPS_IN}",
            told["title"],
        )
        steps = [(row["rank"], row["iteration"], row["doing"]) for row in document["ranks"]]
        assert steps == [(0, SLEEPS_IN, waits), (1, SLEEPS_IN, "waits for data")]
    assert [row["rank"] for row in result.document["processes"]] == [0, 1]
    assert "processes" not in afar.document
    assert (result.code, afar.code) == (1, 1)


@pytest.mark.slow
def test_a_loading_process_that_is_killed_is_named(invoke: Invoke, tmp_path: Path) -> None:
    with training(tmp_path, "--device", "cpu", **{"train.workers": 1}) as (process, run):
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # it may end any moment
                for worker in parent.children():
                    worker.kill()
            time.sleep(0.02)
        assert process.returncode == 4
        result = invoke("diagnose", "oom", run, "--json")
        hang = invoke("diagnose", "hang", run, "--json")
    assert "LOAD002" in [finding["id"] for finding in result.document["findings"]]
    assert result.code == 1
    assert "LOAD002" in [finding["id"] for finding in hang.document["findings"]]
    assert [(row["rank"], row["doing"]) for row in hang.document["ranks"]] == [(0, "left the training")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_run_under_a_memory_cap_is_named(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "predicted_savings", lambda *_: Savings())
    settings: dict[str, Any] = {"device": "cuda", "precision.dtype": "fp16"}
    config = write_run_files(tmp_path, **settings)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(4 * 2**20 / torch.cuda.get_device_properties(0).total_memory)
    try:
        trained = invoke("train", config, "--work-dir", tmp_path / "run", "--no-preflight")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trained.code == 4
    assert "GPU memory ran out" in trained.err
    result = invoke("diagnose", "oom", tmp_path / "run", "--json")
    assert (result.code, result.document["findings"][0]["id"]) == (1, "MEM002")
