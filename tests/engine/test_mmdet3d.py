"""A model and data set of mmdet3d under our engine, with a small fake in mmdet3d's place."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bevctl.config import mmdet3d as gate
from bevctl.config.load import load
from bevctl.config.mmdet3d import read_mmdet3d
from bevctl.config.schema import Config
from bevctl.data.mmdet3d import Mmdet3dSamples
from bevctl.data.split import open_split
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.incident import find_incidents, read_batches
from bevctl.engine.resume import RandomCapture
from bevctl.engine.step import total_loss
from bevctl.errors import BevctlError
from bevctl.foreign_batch import ForeignBatch
from bevctl.models.build import build_model
from bevctl.models.mmdet3d import Detector

from ..conftest import Outcome
from .mmdet3d_stage import CONFIG, fake_mmdet3d, write_config

Invoke = Callable[..., Outcome]
ENGINE = ("--engine", "mmdet3d", "--device", "cpu", "--no-preflight")


@pytest.fixture(autouse=True)
def _stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:  # noqa: ARG001
    monkeypatch.chdir(tmp_path)
    with fake_mmdet3d(monkeypatch):
        yield


def _config(changes: Mapping[str, Any] | None = None) -> Config:
    gate.allow()
    return load(CONFIG, options={"device": "cpu", **(changes or {})}, read=read_mmdet3d).config


def _batch(config: Config, *positions: int) -> ForeignBatch:
    samples = Mmdet3dSamples(config, "train")
    return samples.collate([samples[0, position] for position in positions])


def _losses(work_dir: str) -> list[dict[str, Any]]:
    records = map(json.loads, Path(work_dir, "log.jsonl").read_text().splitlines())
    return [{"loss": r["loss"], "lr": r["lr"], **r["losses"]} for r in records]


def _weights(path: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(path)).state_dict


@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_twenty_steps_and_the_same_with_a_stop_in_between(invoke: Invoke, precision: str) -> None:
    whole = invoke("train", CONFIG, *ENGINE, precision, "--work-dir", "whole", "--max-iters", "20")
    assert whole.code == 0, whole.err
    assert f"{precision[2:].upper()}" in whole.err
    first = invoke("train", CONFIG, *ENGINE, precision, "--work-dir", "parts", "--max-iters", "11")
    assert first.code == 0, first.err
    second = invoke("train", *ENGINE, "--work-dir", "parts", "--resume", "auto", "--max-iters", "20")
    assert second.code == 0, second.err
    assert "Same setting: continuing at iteration 11 (epoch 2, 3 of 8 done)" in second.err
    assert _losses("whole") == _losses("parts")
    assert len(_losses("whole")) == 20
    ours, theirs = _weights("whole/iter_20.pth"), _weights("parts/iter_20.pth")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_holds_what_mmengine_reads(invoke: Invoke) -> None:
    assert invoke("train", CONFIG, *ENGINE, "--work-dir", "run", "--max-iters", "8").code == 0
    content = torch.load("run/epoch_1.pth", weights_only=True)
    toy = importlib.import_module("toy")
    assert list(content["state_dict"]) == list(toy.ToyDetector().state_dict())
    meta = content["meta"]
    assert (meta["epoch"], meta["iter"]) == (1, 8)
    assert "ToyDetector" in meta["cfg"]
    assert meta["dataset_meta"] == {"classes": ["car", "pedestrian"]}


def test_what_counts_of_the_config_is_said_once(invoke: Invoke) -> None:
    told = invoke("train", CONFIG, *ENGINE, "--work-dir", "run", "--max-iters", "1", "--batch", "4").err
    assert told.count("optim.lr = 0.01 (optim_wrapper.optimizer.lr)") == 1
    assert told.count("not taken over: default_hooks (bevctl logs and saves by itself).") == 1
    saved = load(Path("run/config.yaml")).config
    assert (saved.train.batch, saved.train.epochs, saved.optim.clip, saved.optim.warmup) == (4, 4, 35.0, 4)
    assert saved.model.mmdet3d is not None
    assert saved.model.mmdet3d.config == str(CONFIG)


def test_preflight_judges_such_a_run_without_its_code(invoke: Invoke) -> None:
    assert invoke("train", CONFIG, *ENGINE, "--work-dir", "run", "--max-iters", "2").code == 0
    gate._allowed.clear()
    outcome = invoke("preflight", "run/config.yaml", "--resume", "run/latest", "--device", "cpu", "--json")
    checks = {check["id"]: check for check in outcome.document["checks"]}
    assert checks["FILE006"]["status"] == "skip"
    assert {checks[name]["status"] for name in ("FILE003", "FILE004", "FILE005", "FILE007")} == {"pass"}


def test_without_being_asked_nothing_of_the_config_is_run(invoke: Invoke, tmp_path: Path) -> None:
    trap = write_config(tmp_path / "trap.py", "open('executed', 'w').close()\n")
    refused = invoke("train", trap)
    assert (refused.code, Path("executed").exists()) == (2, False)
    assert "add --engine mmdet3d" in refused.err
    Path("run.yaml").write_text(f"model: {{type: mmdet3d, mmdet3d: {{config: {trap}}}}}\n")
    for command in (("train",), ("bench",), ("eval", "--checkpoint", "x")):
        outcome = invoke(command[0], "run.yaml", *command[1:])
        assert outcome.code == 2
        assert "If you trust it, add --engine mmdet3d." in outcome.err
    assert invoke("preflight", "run.yaml", "--device", "cpu").code in (1, 3)
    assert invoke("preflight", trap, "--device", "cpu").code in (0, 1, 3)
    assert not Path("executed").exists()


def test_the_engine_and_the_config_must_fit(invoke: Invoke) -> None:
    outcome = invoke("train", "tiny", *ENGINE)
    assert outcome.code == 2
    assert "describes a model of bevctl's own" in outcome.err


def test_a_missing_package_is_one_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [p for p in importlib.import_module("sys").path if "fake_mmdet3d" not in p])
    outcome = invoke("train", CONFIG, *ENGINE)
    assert outcome.code == 2
    assert "--engine mmdet3d: mmengine is not installed here." in outcome.err
    assert "pip install 'bevctl[mmdet3d]'" in outcome.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 / 0\n", "fails: ZeroDivisionError"),
        ("custom_imports = {'imports': ['their_plugin']}\n", "imports their_plugin, which is not here"),
        ("model['type'] = 'Nothing'\n", "mmdet3d cannot build the model: KeyError: 'Nothing is not in the registry'"),
        ("dataset['wrong'] = 1\ntrain_dataloader['dataset'] = dataset\n", "mmdet3d cannot build the data set"),
        ("del train_dataloader\n", "has no train_dataloader"),
    ],
)
def test_broken_configs_are_one_sentence(invoke: Invoke, tmp_path: Path, line: str, message: str) -> None:
    outcome = invoke("train", write_config(tmp_path / "broken.py", line), *ENGINE, "--work-dir", "run")
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_samples_do_not_depend_on_workers_or_on_what_was_drawn_before(invoke: Invoke) -> None:
    for workers in ("0", "2"):
        arguments = ("--workers", workers, "--work-dir", f"run{workers}", "--max-iters", "5")
        assert invoke("train", CONFIG, *ENGINE, *arguments).code == 0
    assert _losses("run0") == _losses("run2")
    samples = open_split(_config(), "train")
    before = RandomCapture.now().plain()
    one = samples[0, 3].content["inputs"]["points"]
    after = RandomCapture.now().plain()
    assert all(torch.equal(before[name]["words"], after[name]["words"]) for name in ("numpy", "python"))
    assert torch.equal(before["torch"], after["torch"])
    np.random.random(5)  # noqa: NPY002
    assert torch.equal(samples[0, 3].content["inputs"]["points"], one)
    assert not torch.equal(samples[1, 3].content["inputs"]["points"], one)


def test_root_and_info_files_can_be_set() -> None:
    samples = Mmdet3dSamples(_config({"data.root": "elsewhere"}), "val")
    assert samples._set.files == ("elsewhere", "toy_infos_val.pkl")
    with pytest.raises(BevctlError, match=r"Cannot read elsewhere/toy_infos_val\.pkl"):
        _ = samples.info


def test_an_unreadable_sample_is_replaced_and_told(invoke: Invoke, tmp_path: Path) -> None:
    config = write_config(tmp_path / "lost.py", "train_dataloader['dataset'] = {**dataset, 'lost': 3}\n")
    outcome = invoke("train", config, *ENGINE, "--work-dir", "run", "--max-iters", "8")
    assert outcome.code == 0, outcome.err
    assert "Sample sample-3: FileNotFoundError: samples/3.bin." in outcome.err


def test_numbers_that_are_not_finite_are_skipped_kept_and_explained(invoke: Invoke, tmp_path: Path) -> None:
    config = write_config(tmp_path / "bad.py", "train_dataloader['dataset'] = {**dataset, 'poisoned': 3}\n")
    outcome = invoke("train", config, *ENGINE, "--work-dir", "run", "--max-iters", "8")
    assert outcome.code == 0, outcome.err
    weights = _weights("run/epoch_1.pth")
    assert all(value.isfinite().all() for value in weights.values())
    (folder,) = find_incidents(Path("run"))
    assert read_batches(folder) is None
    gate._allowed.clear()
    gate.run_config.cache_clear()
    refused = invoke("diagnose", "nan", "run", "--replay", "--device", "cpu")
    assert refused.code == 2
    assert "say so: --engine mmdet3d" in refused.err
    replay = invoke("diagnose", "nan", "run", "--replay", "--engine", "mmdet3d", "--device", "cpu", "--json")
    assert replay.code == 1, replay.err
    cause, cured = replay.document["findings"][0], {"data.skip_samples": ["sample-3"]}
    assert [remedy["verified"] for remedy in cause["fix"] if remedy["set"] == cured] == [True]


def test_predictions_come_in_our_boxes_best_first() -> None:
    config = _config()
    model = build_model(config).eval()
    assert isinstance(model, Detector)
    found = model.predict(_batch(config, 0, 1))
    assert found.boxes is not None
    assert found.scores is not None
    assert found.labels is not None
    assert len(found.boxes) == 2
    assert found.boxes[0][0].tolist() == pytest.approx([1.0, 2.0, 0.75, 4.0, 2.0, 1.5, 0.1, 0.0, 0.0])
    assert found.labels[0].tolist() == [1, 0]
    assert found.scores[0][0] > found.scores[0][1]
    assert model.predict(_batch(config)).boxes == []


def test_weights_of_mmengine_are_taken_under_their_own_names(invoke: Invoke) -> None:
    config = _config()
    theirs = build_model(config)
    optimizer = torch.optim.AdamW(theirs.parameters())
    total_loss(theirs(_batch(config, 0, 1))).backward()
    optimizer.step()
    state = {key: value.clone() for key, value in theirs.state_dict().items()}
    meta = {"epoch": 1, "iter": 8, "mmengine_version": "0.10.7"}
    torch.save({"meta": meta, "state_dict": state, "optimizer": optimizer.state_dict()}, "theirs.pth")
    outcome = invoke("train", CONFIG, *ENGINE, "--resume", "theirs.pth", "--work-dir", "run", "--max-iters", "8")
    assert outcome.code == 0, outcome.err
    assert "Optimizer state: restored for all 7 parameters" in outcome.err
    assert "iteration = 1 x 8 = 8" in outcome.err


def test_a_submission_is_left_to_mmdet3d(invoke: Invoke) -> None:
    outcome = invoke("eval", CONFIG, "--engine", "mmdet3d", "--checkpoint", "x.pth", "--submission", "s.json")
    assert outcome.code == 2
    assert "tools/test.py" in outcome.err


def test_frozen_modules_stay_in_evaluation_mode() -> None:
    model = build_model(_config({"model.freeze": ["norm"]})).train()
    assert isinstance(model, Detector)
    assert model.detector.training
    assert not model.get_submodule("norm").training
    assert not next(model.get_submodule("norm").parameters()).requires_grad


def test_memory_is_measured_and_never_predicted(invoke: Invoke) -> None:
    outcome = invoke("memory", CONFIG, "--engine", "mmdet3d", "--device", "cpu")
    assert outcome.code == 3
    assert "there is no GPU to measure it on" in outcome.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_fp16_and_memory_on_a_gpu(invoke: Invoke) -> None:
    where = ("--engine", "mmdet3d", "--device", "cuda")
    trained = invoke("train", CONFIG, *where, "--fp16", "--no-preflight", "--work-dir", "run", "--max-iters", "20")
    assert trained.code == 0, trained.err
    assert "FP16 active" in trained.err
    assert _losses("run")[-1]["loss"] < _losses("run")[0]["loss"]
    measured = invoke("memory", CONFIG, *where, "--json")
    assert measured.code == 0, measured.err
    assert measured.document["source"] == "measured"
    assert measured.document["peak"]["allocated_bytes"] > 0


def test_bench_measures_it(invoke: Invoke) -> None:
    outcome = invoke(
        "bench", CONFIG, "--engine", "mmdet3d", "--device", "cpu", "--steps", "2", "--precision", "fp32", "--json"
    )
    assert outcome.code == 0, outcome.err
    split = outcome.document["results"][0]["split"]
    assert {"backbone", "bbox_head"} <= set(split["forward_by_part"])
