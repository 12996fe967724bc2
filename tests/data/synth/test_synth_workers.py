"""Worker processes end when their work is lost, and say so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bevctl.data.synth import SynthOptions, make_dataset
from bevctl.errors import BevctlError, ExitCode

SCRIPT = """
import sys
from pathlib import Path
from bevctl.data.synth import SynthOptions, make_dataset
if __name__ == "__main__":
    make_dataset(Path(sys.argv[1]), SynthOptions(keyframes=6, processes=2))
"""
SMALL = SynthOptions(train_scenes=3, val_scenes=0, keyframes=3, image_scale=0.1, processes=2)
pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: no worker processes")


def children_of(process: int, seconds: float = 30.0) -> list[psutil.Process]:
    """The spawned workers of a process, once there are any."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        workers = [c for c in psutil.Process(process).children() if "spawn_main" in " ".join(c.cmdline())]
        if workers:
            return workers
        time.sleep(0.1)
    raise AssertionError("no worker was started")


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "set")], env=environment) as process:
        workers = children_of(process.pid)
        time.sleep(1.0)  # let them install their watch
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert alive == []
    assert not (tmp_path / "set" / "v1.0-mini").exists()


def test_a_killed_worker_is_one_sentence(tmp_path: Path) -> None:
    def kill_workers(*_: object) -> None:
        for worker in children_of(os.getpid()):
            worker.kill()

    with pytest.raises(BevctlError, match="a worker process ended") as caught:
        make_dataset(tmp_path, SMALL, kill_workers)
    assert caught.value.code == ExitCode.RUN_FAILED
    assert not (tmp_path / "v1.0-mini").exists()
