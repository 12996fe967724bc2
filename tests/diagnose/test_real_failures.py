"""Runs that are stopped, robbed of a loading process, or out of memory for real, and what `diagnose` says of them."""

from __future__ import annotations

import contextlib
import os
import signal
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

from bevctl.diagnose import oom
from bevctl.diagnose.memory_savings import Savings
from tests.conftest import Outcome
from tests.engine.disk import write_run_files

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


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(invoke: Invoke, tmp_path: Path) -> None:
    with training(tmp_path, "--gpus", "2", "--device", "cpu") as (process, run):
        ranks = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
        ranks[0].send_signal(signal.SIGSTOP)
        wait_for(lambda: ranks[0].status() == psutil.STATUS_STOPPED)
        result = invoke("diagnose", "hang", run, "--json")
    told = result.document["findings"][0]
    assert (result.code, told["id"]) == (1, "HANG103")
    assert told["title"] == f"rank 1 (pid {ranks[0].pid}): stopped by a signal (SIGSTOP, SIGTSTP)"
    assert told["fix"][0]["why"] == f"kill -CONT {ranks[0].pid}"


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
