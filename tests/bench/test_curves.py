"""The loss curves of a tiny model, ended by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import bench_curves
from tests.bench.bench_convergence import Run
from tests.test_end_to_end import NANO


def test_means_of_windows_leave_out_what_was_not_finite() -> None:
    losses = [2.0, None, *[4.0] * 48, *[None] * 50, 1.0]
    assert bench_curves.windows(Run("fp16", 0, {}, losses, 1.0, "CPU", {})) == [
        pytest.approx((2.0 + 48 * 4.0) / 49),
        None,
        1.0,
    ]


def test_a_run_is_ended_by_the_clock_and_read(synth_root: Path, tmp_path: Path) -> None:
    sizes = [word for value in [*NANO, "train.epochs=500", "data.sweeps=0"] for word in ("--set", value)]
    folders = ["--data", str(synth_root), "--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "runs")]
    assert (
        bench_curves.main(
            [*folders, "--config", "tiny", "--arms", "bf16", "--minutes", "0.02", "--device", "cpu", *sizes]
        )
        == 0
    )
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    (run,) = document["runs"]
    assert run["arm"] == "bf16"
    assert run["losses"]
    assert json.loads((tmp_path / "runs" / "bf16" / "run.json").read_text())["status"] == "preempted"
    assert (tmp_path / "out" / "losses.png").stat().st_size > 1000


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    choice = ["--arms", "fp32", "--out", str(tmp_path), "--work-dir", str(tmp_path / "runs"), "--device", "cpu"]
    with pytest.raises(RuntimeError, match=r"ended with \d+:\n(.|\n)*nowhere"):
        bench_curves.main(["--data", str(tmp_path / "nowhere"), "--config", "tiny", *choice])
