"""The commands on data, one after the other: synthetic data, training, resuming, evaluation; and one real frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Outcome

NANO = [
    "model.point_cloud_range=[-25.6,-25.6,-5.0,25.6,25.6,3.0]",
    "model.camera.image_size=[32,96]",
    "model.camera.view.xbound=[-25.6,25.6,0.8]",
    "model.camera.view.ybound=[-25.6,25.6,0.8]",
    "model.camera.view.dbound=[1.0,31.0,2.0]",
    "model.map.xbound=[-20.0,20.0,1.0]",
    "model.map.ybound=[-20.0,20.0,1.0]",
    "data.image.resize=[0.06,0.07]",
    "data.image.resize_eval=0.065",
    "train.log_interval=1",
    "train.workers=0",
]
"""`tiny` on a quarter of its area, with images of 32 × 96 pixels."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic set of four samples, with info files, as `bevctl data synth` makes it."""
    from bevctl.cli.main import run
    from bevctl.console import Console

    root = tmp_path_factory.mktemp("set") / "data"
    small = ["--train-scenes", "1", "--val-scenes", "1", "--keyframes", "2", "--image-scale", "0.2"]
    assert run(["data", "synth", str(root), *small], Console(quiet=True)) == 0
    return root


@pytest.fixture
def tiny(invoke: Callable[..., Outcome], dataset: Path) -> Callable[..., Outcome]:
    """Runs `bevctl COMMAND tiny` on the set with the small sizes above."""

    def call(command: str, *arguments: str | Path) -> Outcome:
        sets = [word for value in [f"data.root={dataset}", *NANO] for word in ("--set", value)]
        return invoke(command, "tiny", "--device", "cpu", *sets, *arguments)

    return call


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_train_resume_and_evaluate(tiny: Callable[..., Outcome], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = tiny("train", "--fp32", "--work-dir", run, "--max-iters", "1")
    assert first.code == 0, first.err
    assert "FP32" in first.err
    second = tiny("train", "--fp32", "--work-dir", run, "--resume", "auto", "--max-iters", "3")
    assert second.code == 0, second.err
    assert [record["iter"] for record in _records(run)] == [1, 2, 3]
    assert len(json.loads((run / "run.json").read_text())["segments"]) == 2

    pictures = tmp_path / "pictures"
    scored = tiny("eval", "--checkpoint", run / "iter_3.pth", "--show", pictures, "--json")
    assert scored.code == 0, scored.err
    document = scored.document
    assert document["schema"] == "bevctl.eval/1"
    assert document["samples"] == 2
    assert 0 <= document["detection"]["mAP"] <= 1
    assert set(document["map"]["per_class"]) >= {"drivable_area", "divider"}
    assert len(list(pictures.glob("*.png")) + list(pictures.glob("*.jpg"))) >= 1


def test_falls_back_to_fp32_in_the_same_folder(tiny: Callable[..., Outcome], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert tiny("train", "--bf16", "--work-dir", run, "--max-iters", "1").code == 0
    fallen = tiny("train", "--fp32", "--work-dir", run, "--resume", "auto", "--max-iters", "2")
    assert fallen.code == 0, fallen.err
    segments = json.loads((run / "run.json").read_text())["segments"]
    assert [segment["precision"] for segment in segments] == ["bf16", "fp32"]


@pytest.mark.slow
def test_tiny_learns_one_real_frame(shared: Path, invoke: Callable[..., Outcome], tmp_path: Path) -> None:
    """Six real images, 34,688 points and 69 boxes: the loss falls by half within 40 steps on the CPU."""
    torch.manual_seed(0)
    frame = shared / "nuscenes_frame"
    (info,) = frame.glob("*.pkl")
    run = tmp_path / "run"
    sets = [
        f"data.root={frame}",
        f"data.info_train={info.name}",
        f"data.info_val={info.name}",
        "data.augment=false",
        "model.map=null",
        "train.batch=1",
        "train.workers=0",
        "train.schedule_iters=40",
        "train.checkpoint_interval=null",
        "optim.warmup=5",
    ]
    arguments = [word for value in sets for word in ("--set", value)]
    trained = invoke("train", "tiny", "--device", "cpu", "--fp32", "--work-dir", run, *arguments)
    assert trained.code == 0, trained.err
    losses = [record["loss"] for record in _records(run)]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
