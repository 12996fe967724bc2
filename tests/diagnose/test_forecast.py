"""`bevctl diagnose nan --forecast`: what FP16 could not hold, told from a run that is healthy in FP32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bevctl.diagnose import nan_forecast

from ..conftest import Outcome
from . import faults

Invoke = Callable[..., Outcome]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nan_forecast, "STEPS", 1)


def test_a_healthy_run_is_clear(invoke: Invoke, data: Path) -> None:
    config = faults.write_config(data, Path("c.yaml"))
    assert invoke("train", config, "--work-dir", "run", "--no-preflight", "--max-iters", "2").code == 0
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    done = invoke("diagnose", "nan", "run", "--forecast", "--json")
    assert (done.code, done.document["status"]) == (0, "clear"), done.err
    assert all(finding["severity"] == "info" for finding in done.document["findings"])
    assert done.document["lowest_loss_scale"] <= done.document["highest_loss_scale"]
    assert 0 < done.document["headroom"][0]["largest"] < 65504 / 8
    assert before == {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}


def test_a_weight_that_fp16_could_not_hold_is_foretold(invoke: Invoke, data: Path) -> None:
    config = faults.write_config(data, Path("c.yaml"), **{"optim.lr": 1e-6})
    name = "heads.object.prediction_heads.0.height.1.weight"
    weights = faults.scaled_weights(faults.lidar_config(data), name, 1e7, Path("scaled.pth"))
    started = invoke("train", config, "--work-dir", "run", "--no-preflight", "--load-from", weights, "--max-iters", "1")
    assert started.code == 0, started.err
    done = invoke("diagnose", "nan", "run", "--forecast", "--json", "--write-fix", "fix.yaml")
    assert (done.code, done.document["status"]) == (1, "found"), done.err
    finding = done.document["findings"][0]
    assert (finding["id"], finding["severity"]) == ("NAN211", "fail")
    assert "heads.object.prediction_heads.0.height.1" in finding["title"]
    remedy = finding["fix"][0]
    assert any(name.startswith(module) for module in remedy["set"]["precision.fp32_modules"])
    assert remedy["verified"] is True
    assert "fp32_modules" in Path("fix.yaml").read_text()


def test_what_it_needs_is_said(invoke: Invoke) -> None:
    Path("empty").mkdir()
    nothing = invoke("diagnose", "nan", "empty", "--forecast")
    assert (nothing.code, "No checkpoint is in empty" in nothing.err) == (2, True)
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, "other.pth")
    foreign = invoke("diagnose", "nan", "--checkpoint", "other.pth", "--forecast")
    assert (foreign.code, "was not written by bevctl" in foreign.err) == (2, True)
