"""`bevctl memory`: parameters, the predicted peak, plans and the file of the chosen one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bevctl.config.load import load
from bevctl.engine import dist
from bevctl.measure import memory_plans, memory_report
from bevctl.measure.memory import Need
from bevctl.measure.memory_inputs import sizes_of
from bevctl.measure.memory_measured import Measured
from bevctl.measure.memory_trace import SampleSize
from bevctl.measure.parameters import count_parameters
from tests.conftest import Outcome
from tests.diagnose.cases import CRASHING_FP16, header, mmcv_config, windows
from tests.runs.logs import write

Invoke = Callable[..., Outcome]

CAMERA = {"encoders.camera.backbone": 27_520_506, "encoders.camera.neck": 1_591_296}
LIDAR = {"encoders.lidar": 2_694_352}
FUSED = {"fuser": 774_656, "decoder": 4_576_768}
DEPTH_LSS = {"encoders.camera.vtransform": 1_610_726}
LSS = {"encoders.camera.vtransform": 224_166}
OBJECT = {"heads.object": 1_034_910}
MAP = {"heads.map": 4_723_718}


@pytest.mark.parametrize(
    ("name", "total", "parts"),
    [
        ("bevfusion_det", 39_803_214, CAMERA | DEPTH_LSS | LIDAR | FUSED | OBJECT),
        ("bevfusion_seg", 42_105_462, CAMERA | LSS | LIDAR | FUSED | MAP),
        ("bevfusion_multitask_fp16", 44_526_932, CAMERA | DEPTH_LSS | LIDAR | FUSED | OBJECT | MAP),
    ],
)
def test_the_counts_are_those_of_the_published_models(name: str, total: int, parts: dict[str, int]) -> None:
    counts = count_parameters(load(name).config)
    assert (counts.trainable, counts.by_part) == (total, parts)


LIDAR_ONLY = ("tiny", "--set", "model.camera=null", "--set", "model.map=null")


def test_the_document_adds_up_and_the_plan_can_be_trained(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    options = ("--fit", "16GB", "--write", str(file), "--step-time", "0.5", "--gpus", "2", "--price", "3")
    outcome = invoke("memory", *LIDAR_ONLY, "--json", *options)
    assert outcome.code == 0
    document = outcome.document
    assert (document["schema"], document["source"]) == ("bevctl.memory/1", "estimated")
    assert set(document["parameters"]["by_part"]) == {"encoders.lidar", "decoder", "heads.object"}
    sizes = {entry["name"]: entry["bytes"] for entry in document["components"]}
    peak = document["peak"]
    assert sum(sizes.values()) == peak["allocated_bytes"] + sizes["CUDA context"] + sizes["NCCL"]
    assert peak["allocated_bytes"] < peak["reserved_bytes"] < peak["device_bytes"]
    assert 4 * document["parameters"]["trainable"] <= sizes["parameters"] < sizes["optimizer"]
    assert list(document["by_size"]) == ["p50", "p95", "p99", "max"]
    plans = {plan["name"]: plan for plan in document["plans"]}
    assert {"fp16", "fp16_batch2", "fp32"} <= set(plans)
    assert (plans["fp16_batch2"]["s_per_iter"], plans["fp16_batch2"]["s_per_iter_measured"]) == (0.5, True)
    assert all(plan["cost"] > 0 and plan["finish"] for plan in plans.values())
    chosen = load("tiny", sets=(str(file),)).config
    assert document["fit"] == document["chosen"]["name"] == "fp16_batch8"
    assert (chosen.train.batch, chosen.precision.dtype) == (8, "fp16")
    assert chosen.optim.lr == plans["fp16_batch8"]["lr"]


def test_a_plan_is_taken_by_its_letter_and_times_from_a_log(invoke: Invoke, tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", [*header(mmcv_config(2, more=CRASHING_FP16), "0"), *windows(30, time="0.420")])
    file = tmp_path / "plan.yaml"
    outcome = invoke("memory", *LIDAR_ONLY, "--plan", "A", "--write", str(file), "--times", str(log))
    assert outcome.code == 0
    assert "0.42 s a batch of 2 in FP16" in outcome.err
    assert "fp16_batch4 (A)" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("fp16_batch4 (plan A): ")
    assert load("tiny", sets=(str(file),)).config.train.batch == 4
    assert invoke("memory", *LIDAR_ONLY, "--plan", "fp17").code == 2


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction that takes no time: 1 GiB, and half of one for a sample, twice that in FP32."""

    class Guess:
        def __init__(self, *_: object) -> None: ...

        def need(self, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Need:
            part = batch * (2 if precision == "fp32" else 1) * (2**28 if checkpointing else 2**29)
            return Need({"parameters": 2**30 + part}, 2**30 + part, 2**30 + part, 2**30 + part)

    size = SampleSize(1000, (), 3)
    monkeypatch.setattr(memory_report, "Predictor", Guess)
    monkeypatch.setattr(memory_plans, "Predictor", Guess)
    monkeypatch.setattr(memory_report, "sample_sizes", lambda _: sizes_of([size, size], "synthetic"))


@pytest.mark.usefixtures("guessed")
def test_a_measurement_is_shown_beside_its_prediction(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    measured = Measured({"parameters": gib, "decoder": 3 * gib}, {}, 4 * gib, 5 * gib, 6 * gib, 51 * gib, 0.25)
    fakes = {
        "measure_memory": measured,
        "predict": Need({"parameters": gib, "workspace": gib}, 3 * gib, 5 * gib, 6 * gib),
        "resolve_precision": SimpleNamespace(name="fp32"),
        "make_inputs": SimpleNamespace(batches=[None]),
        "batch_sizes": [],
    }
    for name, value in fakes.items():
        monkeypatch.setattr(memory_report, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(dist, "select_device", lambda _: torch.device("cuda"))
    outcome = invoke("memory", *LIDAR_ONLY, "--measure", "--set", "precision.dtype=fp32")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in outcome.out.splitlines()]
    assert ["decoder", "-", "3.0 GiB"] in rows
    assert ["allocated", "3.0 GiB", "4.0 GiB", "-25.0%"] in rows
    assert ["reserved by the first steps", "-", "51.0 GiB", "-"] in rows
    document = invoke("memory", *LIDAR_ONLY, "--measure", "--set", "precision.dtype=fp32", "--json").document
    assert (document["source"], document["start_reserved_bytes"]) == ("measured", 51 * gib)
    assert document["predicted"]["errors"] == {"allocated": -0.25, "reserved": 0.0, "device": 0.0}
    plans = {plan["name"]: plan for plan in document["plans"]}
    assert (plans["fp32_batch2"]["s_per_iter"], plans["fp32_batch2"]["s_per_iter_measured"]) == (0.25, True)


@pytest.mark.usefixtures("guessed")
def test_a_card_that_nothing_fits_hears_what_takes_the_least(invoke: Invoke) -> None:
    outcome = invoke("memory", *LIDAR_ONLY, "--fit", "1100MiB")
    assert outcome.code == 1
    assert "No plan fits into 1.1 GiB" in outcome.err
    assert "fp16_checkpoint takes the least" in outcome.err


def test_without_a_gpu_nothing_is_measured(invoke: Invoke) -> None:
    outcome = invoke("memory", *LIDAR_ONLY, "--measure", "--device", "cpu")
    assert (outcome.code, "No GPU to measure on" in outcome.err) == (3, True)
    assert invoke("memory", *LIDAR_ONLY, "--times", "none.json").code == 2


def test_a_plan_is_written_only_for_a_card(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("memory", "tiny", "--write", str(tmp_path / "plan.yaml"))
    assert outcome.code == 2
    assert "--fit" in outcome.err


@pytest.mark.parametrize(
    ("size", "told"), [("lots", "is not a size"), ("5MB", "holds no model"), ("32", "has no unit"), ("31.5", "no unit")]
)
def test_a_card_that_is_none_is_a_usage_error(invoke: Invoke, size: str, told: str) -> None:
    outcome = invoke("memory", "tiny", "--fit", size)
    assert (outcome.code, told in outcome.err) == (2, True)


@pytest.mark.usefixtures("guessed")
def test_a_plan_that_does_not_fit_the_card_is_a_finding(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plan.yaml"
    outcome = invoke("memory", *LIDAR_ONLY, "--plan", "fp32_batch8_checkpoint", "--fit", "5GB", "--write", file)
    assert (outcome.code, file.is_file()) == (1, True)
    assert "fp32_batch8_checkpoint does not fit with 10% to spare" in outcome.out
    assert outcome.out.count("│ fp32_batch8_checkpoint ") == 3, "names are not broken on a narrow screen"
    assert "p50 to max" in outcome.out


def test_a_config_that_does_not_fit_together_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke("memory", "tiny", "--set", "model.lidar.voxel_size=[0.3, 0.2, 0.2]", "--json")
    assert outcome.code == 2
    assert "model.lidar.voxel_size" in outcome.document["error"]["message"]
