"""`bevctl diagnose accuracy-drop`: two runs' scores, or two checkpoints', and the parts that rounding moves most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.diagnose.sensitivity import deviations, parts_of
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.precision import Precision
from bevctl.models.build import build_model
from bevctl.runs.records import StepRecord
from bevctl.runs.writer import RunWriter

from ..conftest import Outcome
from ..models.nano import nano_config
from . import faults

Invoke = Callable[..., Outcome]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(
    name: str, evaluations: Mapping[int, tuple[float, float]], loss: Callable[[int], float], **segment: Any
) -> Path:
    """A run of bevctl with (mAP, IoU of dividers) by epoch; cars score as mAP, walkways 0.4 always."""
    folder = Path(name)
    writer = RunWriter(folder, 50)
    for iteration in range(1, 201):
        writer.step(StepRecord(1 + (iteration - 1) // 50, iteration, float(iteration), loss=loss(iteration)), 1, 50)
    shared = {"batch": 4, "world": 1, "accumulate": 1, "lr": 2e-5, "iter": 0}
    writer.update(segments=[{**shared, **segment}], iters_per_epoch=50, total_iters=200)
    writer.close()
    for epoch, (mean_ap, divider) in evaluations.items():
        document = {
            "detection": {"mAP": mean_ap, "NDS": 0.9 * mean_ap, "per_class": {"car": {"AP": mean_ap}}},
            "map": {"mIoU": (divider + 0.4) / 2, "per_class": {"divider": divider, "walkway": 0.4}},
        }
        (folder / "eval").mkdir(exist_ok=True)
        (folder / "eval" / f"epoch_{epoch}.json").write_text(json.dumps(document))
    return folder


SCORES = {1: (0.30, 0.20), 2: (0.35, 0.30), 3: (0.40, 0.36), 4: (0.42, 0.40)}


def _falling(iteration: int) -> float:
    return 5.0 - 0.01 * iteration


def _ask(invoke: Invoke, *options: str | Path) -> Outcome:
    return invoke("diagnose", "accuracy-drop", *options, "--json")


def test_two_tenths_of_a_point_are_normal(invoke: Invoke) -> None:
    full = _run("full", SCORES, _falling, precision="fp32")
    half = _run("half", {epoch: (a - 0.002, b) for epoch, (a, b) in SCORES.items()}, _falling, precision="fp16")
    done = _ask(invoke, half, "--against", full)
    assert (done.code, done.document["status"]) == (0, "clear"), done.err
    (finding,) = done.document["findings"]
    assert (finding["id"], finding["severity"]) == ("ACC101", "info")
    assert finding["title"] == "mAP is 0.20 points lower, which is normal"


def test_one_head_that_loses_is_named_with_its_class_and_its_epoch(invoke: Invoke) -> None:
    full = _run("full", SCORES, _falling, precision="fp32")
    lost = {epoch: (a, b - (0.08 if epoch > 2 else 0.001)) for epoch, (a, b) in SCORES.items()}
    half = _run("half", lost, lambda i: _falling(i) * (1.2 if i > 120 else 1.0), precision="fp16")
    done = _ask(invoke, half, "--against", full)
    assert done.code == 1, done.err
    (finding,) = done.document["findings"]
    assert (finding["id"], finding["severity"]) == ("ACC101", "fail")
    assert finding["title"] == "mIoU is 4.00 points lower than without half precision"
    said = {evidence["where"]: evidence["what"] for evidence in finding["evidence"]}
    assert said["mIoU/divider"] == "0.4000 against 0.3200: -8.00 points"
    assert "mIoU/walkway" not in said
    assert said["task"] == "only the map head loses"
    assert said["scores"] == "lower since the evaluation of epoch 3"
    assert said["training loss"] == "apart by more than 5 % from iteration 120 on"
    assert done.document["scores"][0]["score"] == "mIoU"
    assert done.document["scores"][0]["points"] == pytest.approx(-4.0)
    swapped = _ask(invoke, full, "--against", half)
    assert swapped.document["findings"] == done.document["findings"]


def test_runs_that_differ_in_more_are_told_so(invoke: Invoke) -> None:
    full = _run("full", SCORES, _falling, precision="fp32")
    lower = {epoch: (a - 0.02, b) for epoch, (a, b) in SCORES.items()}
    half = _run("half", lower, _falling, precision="fp16", lr=8e-5, batch=1)
    findings = {finding["id"]: finding for finding in _ask(invoke, half, "--against", full).document["findings"]}
    assert findings["ACC101"]["confidence"] < 0.5
    told = {evidence["where"]: evidence["what"] for evidence in findings["ACC102"]["evidence"]}
    assert told == {"samples a step": "4 against 1", "learning rate": "2e-05 against 8e-05"}


@pytest.mark.parametrize("scores", [{5: (0.4, 0.4)}, {4: (0.0, -0.4)}, {}])
def test_without_scores_to_compare_nothing_is_decided(invoke: Invoke, scores: dict[int, tuple[float, float]]) -> None:
    full, half = _run("full", scores, _falling), _run("half", SCORES, _falling)
    done = _ask(invoke, half, "--against", full)
    assert (done.code, done.document["status"], done.document["findings"]) == (3, "inconclusive", [])
    assert "not known" in done.document["looked_at"][-1]


def test_mmcv_scores_of_classes_are_read(invoke: Invoke) -> None:
    scores = '"object/map": %s, "object/car_ap_dist_0.5": %s, "map/divider/iou@max": 0.4'
    line = '{"mode": "val", "epoch": 1, "iter": 9, ' + scores + "}\n"
    step = '{"mode": "train", "epoch": 1, "iter": 50, "lr": 1e-4, "loss": 2.0, "time": 0.5}\n'
    Path("full.log.json").write_text(step + line % (0.5, 0.6))
    Path("half.log.json").write_text(step + line % (0.494, 0.5))
    done = _ask(invoke, "half.log.json", "--against", "full.log.json")
    assert done.code == 1, done.err
    finding = done.document["findings"][0]
    assert (finding["severity"], finding["title"][:3]) == ("warn", "mAP")
    assert "mAP/car" in {evidence["where"] for evidence in finding["evidence"]}


def test_the_parts_of_a_model_are_its_children_with_weights() -> None:
    assert parts_of(build_model(nano_config())) == [
        "encoders.camera.backbone",
        "encoders.camera.neck",
        "encoders.camera.vtransform",
        "encoders.lidar",
        "fuser",
        "decoder",
        "heads.object",
        "heads.map",
    ]


def test_a_part_that_rounding_moves_is_found_on_held_out_samples(invoke: Invoke, tmp_path: Path) -> None:
    data = faults.write_data(tmp_path / "data", samples=4)
    config = faults.write_config(data, Path("c.yaml"), **{"precision.dtype": "bf16"})
    assert invoke("train", config, "--work-dir", "run", "--no-preflight", "--max-iters", "1").code == 0
    checkpoint = read_checkpoint(Path("run/iter_1.pth"))
    said: list[str] = []
    exact = deviations(faults.lidar_config(data), checkpoint, Precision("fp32", "cpu"), CPU, said.append, samples=1)
    assert [deviation.relative for deviation in exact] == [0.0] * 4
    whole, *parts = deviations(faults.lidar_config(data), checkpoint, Precision("bf16", "cpu"), CPU, said.append, 2)
    assert whole.relative > 0
    assert {deviation.part for deviation in parts} == {"encoders.lidar", "decoder", "heads.object"}
    assert [d.relative for d in parts] == sorted(d.relative for d in parts)
    done = _ask(invoke, "run")
    assert done.code in (0, 1)
    assert done.document["findings"][0]["id"] == "ACC103"
    assert done.document["parts"][0]["part in FP32"] == "none"


def test_two_checkpoints_are_evaluated(invoke: Invoke, tmp_path: Path) -> None:
    data = faults.write_data(tmp_path / "data", samples=4)
    config = faults.write_config(data, Path("c.yaml"))
    for name, steps in (("first", "1"), ("second", "2")):
        assert invoke("train", config, "--work-dir", name, "--no-preflight", "--max-iters", steps).code == 0
    done = _ask(invoke, "second/iter_2.pth", "--against", "first/iter_1.pth")
    assert (done.code, done.document["status"]) == (3, "inconclusive")  # two steps teach nothing
    assert done.document["looked_at"][0] == "first/iter_1.pth: evaluated here"
    missing = invoke("diagnose", "accuracy-drop", "second/iter_2.pth", "--against", "nowhere.pth")
    assert (missing.code, "nowhere.pth" in missing.err) == (2, True)
