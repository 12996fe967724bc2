"""mmdet3d's CenterPoint under our engine, on the CPU: it trains, resumes exactly, and mmengine reads what it wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bevctl.config.load import from_dict, load
from bevctl.config.mmdet3d import allow, read_mmdet3d
from bevctl.config.mmdet3d_keys import translate
from bevctl.config.schema import Config
from bevctl.config.sections import sections_of
from bevctl.data.mmdet3d import Mmdet3dSamples
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.schedule import Schedule
from bevctl.engine.step import total_loss
from bevctl.foreign_batch import ForeignBatch
from bevctl.models.build import build_model
from bevctl.models.mmdet3d import Detector, _objects

from ..conftest import Outcome
from .conftest import CONFIG

Invoke = Callable[..., Outcome]
STEPS = 20


def _train(invoke: Invoke, synth: Path, work_dir: Path, *options: str | Path) -> Outcome:
    arguments = ("--engine", "mmdet3d", "--device", "cpu", "--work-dir", work_dir, "--set", f"data.root={synth}")
    outcome = invoke("train", CONFIG, *arguments, *options)
    assert outcome.code == 0, outcome.err
    return outcome


def _records(work_dir: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (work_dir / "log.jsonl").read_text().splitlines())
    return [{"loss": r["loss"], "lr": r["lr"], "grad_norm": r["grad_norm"], **r["losses"]} for r in records]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def config(synth: Path) -> Config:
    allow()
    return load(CONFIG, options={"device": "cpu", "data.root": str(synth)}, read=read_mmdet3d).config


def _detector(config: Config) -> Any:
    model = build_model(config)
    assert isinstance(model, Detector)
    return model.detector


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trains_twenty_steps_and_resumes_exactly(invoke: Invoke, synth: Path, runs: Path, precision: str) -> None:
    whole, parts = runs / precision, runs / f"{precision}_parts"
    _train(invoke, synth, whole, f"--{precision}", "--max-iters", str(STEPS))
    _train(invoke, synth, parts, f"--{precision}", "--max-iters", "12")
    told = _train(invoke, synth, parts, f"--{precision}", "--max-iters", str(STEPS), "--resume", "auto").err
    assert "Same setting: continuing at iteration 12" in told
    losses = [record["loss"] for record in _records(whole)]
    print(f"{precision}: loss {losses[0]:.1f} to {losses[-1]:.1f}")
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.8 * losses[0]
    assert _records(whole) == _records(parts)
    first, second = (read_checkpoint(folder / f"iter_{STEPS}.pth").state_dict for folder in (whole, parts))
    assert all(torch.equal(first[key], second[key]) for key in first)
    events = map(json.loads, (whole / "events.jsonl").read_text().splitlines())
    told = next(event["message"] for event in events if event["kind"] == "precision")
    print(f"{precision}: {told}")
    assert told.startswith({"fp32": "FP32: 100%", "bf16": "BF16 active"}[precision])


def test_mmengine_reads_the_checkpoint(runs: Path, config: Config) -> None:
    """Needs the run above."""
    from mmengine.runner.checkpoint import load_checkpoint

    path = runs / "fp32" / f"iter_{STEPS}.pth"
    detector = _detector(config)
    before = {key: value.clone() for key, value in detector.state_dict().items()}
    loaded = load_checkpoint(detector, str(path), map_location="cpu", strict=True)
    ours = read_checkpoint(path).state_dict
    after = detector.state_dict()
    assert set(after) == set(ours)
    assert all(torch.equal(after[key], ours[key]) for key in ours)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert loaded["meta"]["iter"] == STEPS
    assert loaded["meta"]["dataset_meta"]["classes"][0] == "car"
    assert "CenterPoint" in loaded["meta"]["cfg"]


def test_tools_of_mmdet3d_take_the_checkpoint(runs: Path) -> None:
    """Needs the run above."""
    from mmdet3d.apis import init_model

    path = runs / "fp32" / f"iter_{STEPS}.pth"
    model = init_model(str(CONFIG), str(path), device="cpu")
    assert model.dataset_meta["classes"][0] == "car"
    ours = read_checkpoint(path).state_dict
    assert all(torch.equal(value, ours[key]) for key, value in model.state_dict().items())


def test_losses_are_those_that_mmdet3d_computes(config: Config) -> None:
    """The same samples through mmdet3d's own path."""
    model = build_model(config).train()
    assert isinstance(model, Detector)
    detector, samples = model.detector, Mmdet3dSamples(config, "train")

    def batch() -> ForeignBatch:
        return samples.collate([samples[0, 0], samples[0, 1]])

    expected, _ = detector.parse_losses(detector(**detector.data_preprocessor(batch().content, True), mode="loss"))
    torch.testing.assert_close(total_loss(model(batch())), expected.float(), rtol=1e-6, atol=0)


def test_boxes_of_mmdet3d_are_ours(config: Config) -> None:
    """Its ground truth, read as predictions, is that of our own reader: centre, size, heading and velocity."""
    samples = Mmdet3dSamples(config, "val")
    seen = 0
    for index, own in enumerate(samples.info.samples):
        truth = samples._set.get_data_info(index)["eval_ann_info"]
        boxes, labels = truth["gt_bboxes_3d"], torch.as_tensor(truth["gt_labels_3d"])
        found = SimpleNamespace(bboxes_3d=boxes, scores_3d=torch.ones(len(labels)), labels_3d=labels)
        rows, _, order = _objects(SimpleNamespace(pred_instances_3d=found))
        assert own.boxes is not None
        expected = torch.as_tensor(own.boxes, dtype=torch.float32)
        for row, label in zip(rows, order, strict=True):
            nearest = int((expected[:, :3] - row[:3]).norm(dim=1).argmin())
            torch.testing.assert_close(row[:6], expected[nearest, :6], rtol=1e-4, atol=1e-4)
            turned = (row[6] - expected[nearest, 6]) / (2 * torch.pi)
            assert abs(float(turned - turned.round())) < 1e-4
            torch.testing.assert_close(row[7:], expected[nearest, 7:].nan_to_num(), rtol=1e-4, atol=1e-4)
            assert config.data.classes[int(label)] == own.names[nearest]
            seen += 1
    print(f"{seen} boxes are the same")
    assert seen > 100


@pytest.mark.parametrize(
    "schedulers",
    [
        [
            {"type": "LinearLR", "start_factor": 0.001, "by_epoch": False, "begin": 0, "end": 10},
            {"type": "CosineAnnealingLR", "T_max": 6, "eta_min": 1e-6, "by_epoch": True, "end": 6},
        ],
        [
            {"type": "LinearLR", "start_factor": 1 / 3, "by_epoch": False, "begin": 0, "end": 10},
            {"type": "MultiStepLR", "begin": 0, "end": 6, "by_epoch": True, "milestones": [4, 5], "gamma": 0.1},
        ],
        [
            {
                "type": "CosineAnnealingLR",
                "T_max": 2,
                "eta_min": 2e-3,
                "begin": 0,
                "end": 2,
                "by_epoch": True,
                "convert_to_iter_based": True,
            },
            {
                "type": "CosineAnnealingLR",
                "T_max": 4,
                "eta_min": 2e-8,
                "begin": 2,
                "end": 6,
                "by_epoch": True,
                "convert_to_iter_based": True,
            },
        ],
    ],
    ids=["warmup and cosine by epoch", "warmup and steps", "cyclic"],
)
def test_the_schedule_is_that_of_mmengine(schedulers: list[dict[str, Any]]) -> None:
    """To an iteration: mmengine turns round one before the peak of a cycle."""
    import mmengine.optim  # noqa: F401
    from mmengine.registry import PARAM_SCHEDULERS

    length, lr = 500, 2e-4
    translated = translate(
        {
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": lr}},
            "param_scheduler": schedulers,
            "train_cfg": {"by_epoch": True, "max_epochs": 6},
        }
    )
    ours = Schedule(from_dict(sections_of(translated.values)).optim, total=6 * length)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    built = []
    for scheduler in schedulers:
        options = dict(scheduler)
        if options.pop("convert_to_iter_based", False):
            cls = PARAM_SCHEDULERS.get(options.pop("type"))
            built.append(cls.build_iter_from_epoch(optimizer=optimizer, **options, epoch_length=length))
        else:
            built.append(PARAM_SCHEDULERS.build(options, default_args={"optimizer": optimizer}))
    found, expected = [], []
    for iteration in range(6 * length):
        found.append(lr * ours.lr_factor(iteration))
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in built:
            if not scheduler.by_epoch or (iteration + 1) % length == 0:
                scheduler.step()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-10)


def test_evaluates_and_measures(invoke: Invoke, synth: Path, runs: Path) -> None:
    """Needs the run above."""
    where = ("--engine", "mmdet3d", "--device", "cpu", "--set", f"data.root={synth}", "--json")
    scored = invoke("eval", CONFIG, *where, "--checkpoint", runs / "fp32" / f"iter_{STEPS}.pth")
    assert scored.code == 0, scored.err
    assert scored.document["samples"] == 16
    assert 0 <= scored.document["detection"]["mAP"] <= 1
    timed = invoke("bench", CONFIG, *where, "--precision", "bf16", "--steps", "2")
    assert timed.code == 0, timed.err
    parts = timed.document["results"][0]["split"]["forward_by_part"]
    assert {"pts_backbone", "pts_neck"} <= set(parts)
