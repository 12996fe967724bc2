"""A real mmcv-full 1.x: BEVCTL_TEST_LEGACY_PYTHON names an interpreter with torch 1.12.1 and mmcv-full 1.7.0.

docs/external.md says how such an environment is made. The tree is legacy/; it trains on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.errors import ExitCode
from bevctl.external.process import left_behind

PYTHON = os.environ.get("BEVCTL_TEST_LEGACY_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="BEVCTL_TEST_LEGACY_PYTHON names no Python with mmcv-full"),
]
CONFIG = "configs/tiny_fp16_8x4.py"
WAIT_S = 180.0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).with_name("legacy"), tmp_path / "tree"))


def bevctl(*words: object, timeout: float = WAIT_S) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    command = [sys.executable, "-m", "bevctl", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def external(tree: Path, *more: object) -> list[object]:
    run = tree.parent / "run"
    given: list[object] = ["train", CONFIG, "--engine", "external", "--python", PYTHON, "--repo", tree]
    return [*given, "--work-dir", run, "--no-preflight", "--fp16", "--batch", 8, *more]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def monitored(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(bevctl("monitor", run, "--once", "--json")[1])
    return document


def test_preflight_reports_it_right(tree: Path) -> None:
    words = ["preflight", tree / CONFIG, "--python", PYTHON, "--repo", tree, "--device", "cpu", "--fp16", "--json"]
    checks = {check["id"]: check for check in json.loads(bevctl(*words, "--skip", "data")[1])["checks"]}
    assert "torch 1.12.1" in checks["SOFT002"]["found"]
    assert checks["SOFT004"]["found"] == "mmcv-full 1.7.0"
    software = {check["status"] for check in checks.values() if check["section"] == "software"}
    assert software <= {"pass", "skip"}
    assert checks["FILE002"]["status"] == "pass"
    assert "optimizer_config is a Fp16OptimizerHook, loss scale dynamic" in checks["FILE002"]["found"]
    assert checks["FILE010"]["status"] == "pass"


def test_launched_monitored_interrupted_resumed_and_diagnosed(tree: Path) -> None:
    run = tree.parent / "run"
    words = external(tree, "--epochs", 3, "--set", "model.pause=0.15")
    process = subprocess.Popen([sys.executable, "-m", "bevctl", *map(str, words)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for((run / "epoch_1.pth").exists, process)
        seen = monitored(run)
        assert (seen["state"], seen["source"]["format"]) == ("running", "mmcv-text")
        assert (seen["progress"]["iters_per_epoch"], seen["progress"]["max_epochs"]) == (8, 3)
        assert seen["precision"]["fp16"] is True
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ExitCode.PREEMPTED
    assert "Stopped by SIGTERM" in said
    assert left_behind(str(run)) == []
    assert monitored(run)["state"] == "ended"

    code, _, said = bevctl(*external(tree, "--epochs", 3, "--resume", "auto"))
    assert code == ExitCode.OK, said
    assert "resumed epoch" in (run / "console.out").read_text()
    assert (run / "epoch_3.pth").is_file()
    seen = monitored(run)
    assert (seen["state"], seen["progress"]["iter"]) == ("finished", 24)
    assert len(json.loads((run / "run.json").read_text())["segments"]) == 2

    code, out, _ = bevctl("diagnose", "nan", run, "--json")
    assert (code, json.loads(out)["status"]) == (ExitCode.OK, "clear")
    assert not list(tree.rglob("bevctl"))


def test_not_finite_losses_are_found(tree: Path) -> None:
    run = tree.parent / "run"
    code, _, said = bevctl(*external(tree, "--set", "model.nan_from=9"))
    assert code == ExitCode.OK, said
    code, out, _ = bevctl("diagnose", "nan", run, "--json")
    diagnosis = json.loads(out)
    assert (code, diagnosis["status"]) == (ExitCode.FINDINGS, "found")
    assert monitored(run)["metrics"]["loss"]["nonfinite"] == 8


def test_precision_and_sizes_reach_the_program(tree: Path) -> None:
    """In FP32 with an own rate: what its log says of its config is what was asked for."""
    words = [*external(tree, "--lr-scaling", "sqrt", "--set", "data.samples=32")]
    words[words.index("--fp16")] = "--fp32"
    code, _, said = bevctl(*words)
    assert code == ExitCode.OK, said
    log = next((tree.parent / "run").glob("*.log")).read_text()
    assert "Fp16OptimizerHook" not in log
    assert "samples_per_gpu=8" in log
    assert "lr=0.0005" in log
    assert "Epoch [3][4/4]" in log


def test_two_processes_by_torchrun(tree: Path) -> None:
    code, _, said = bevctl(*external(tree, "--gpus", 2, "--epochs", 1))
    assert code == ExitCode.OK, said
    log = next((tree.parent / "run").glob("*.log")).read_text()
    assert "Distributed training: True" in log
    assert "Epoch [1][4/4]" in log
    assert "torch.distributed.run" in (tree.parent / "run" / "run.json").read_text()
