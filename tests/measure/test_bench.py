"""A benchmark's report: complete, repeatable, and readable by `--compare`."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.console import Console
from bevctl.errors import BevctlError
from bevctl.measure.bench import bench, default_precisions, matmul_rate
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.bench_picture import draw
from bevctl.measure.bench_report import Report, Result, Spread
from bevctl.measure.bench_text import tables
from bevctl.measure.timing import build_step, loss_of, step_seconds
from tests.models.nano import nano_batch, nano_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return nano_config(**{"data.root": str(tmp_path_factory.mktemp("empty")), "data.sweeps": 0, "train.batch": 2})


@pytest.fixture(scope="module")
def report(config: Config) -> Report:
    torch.set_num_threads(1)
    return bench(config, ("fp32", "bf16"), CPU, steps=2)


def test_every_precision_has_all_that_a_cpu_can_tell(report: Report) -> None:
    for result in report.results:
        assert result.step_s is not None
        assert result.step_s.n == 2
        assert result.step_s.p10 <= result.step_s.median <= result.step_s.p90
        assert result.mfu is not None
        assert 0 < result.mfu < 2
        assert result.allocated_bytes is None
        assert result.error is None
    assert report.inputs["source"] == "synthetic"
    assert report.forward_flops > 1e6


def test_the_split_names_every_part_and_adds_up(report: Report) -> None:
    split = report.results[0].split
    assert split is not None
    expected = {"encoders.camera.backbone", "encoders.lidar", "fuser", "decoder", "heads.object", "map loss"}
    assert expected < split.forward_by_part.keys()
    assert expected < split.backward_by_part.keys()
    assert split.forward == pytest.approx(sum(split.forward_by_part.values()))
    assert split.backward == pytest.approx(sum(split.backward_by_part.values()))
    assert min(*split.forward_by_part.values(), *split.backward_by_part.values(), split.optimizer, split.data) > 0


def test_losses_of_two_precisions_differ_by_rounding_only(report: Report) -> None:
    ratio = report.ratios()["bf16/fp32"]
    fp32, bf16 = (result.loss for result in report.results)
    assert fp32 is not None
    assert bf16 is not None
    assert ratio["loss_difference"] == bf16 - fp32
    assert 0 < abs(bf16 - fp32) < 0.03 * fp32
    assert ratio["memory"] is None


def test_equal_seeds_give_equal_losses(config: Config, report: Report) -> None:
    assert bench(config, ("fp32",), CPU, steps=1).results[0].loss == report.results[0].loss


def test_the_picture_shows_what_was_measured(report: Report) -> None:
    result = dataclasses.replace(report.results[0], allocated_bytes=2**30)
    with_memory = dataclasses.replace(report, results=[result])
    picture = draw(with_memory)
    colors = {color for _, color in picture.getcolors(picture.width * picture.height) or ()}
    assert picture.width == 960
    assert {(33, 118, 214), (235, 108, 20), (0, 146, 136)} <= colors  # forward, backward, memory
    assert isinstance(picture, Image.Image)


def test_the_tables_show_what_the_host_launches(report: Report) -> None:
    launched = {"data": 1e-3, "forward/fuser": 2e-3, "backward/fuser": 3e-3}
    result = dataclasses.replace(report.results[0], host_s=6e-3, host_by_part=launched)
    out = io.StringIO()
    for shown in tables(dataclasses.replace(report, results=[result])):
        Console(out, out).result(shown)
    assert "2.00 / 3.00" in out.getvalue()
    assert "Launching" in out.getvalue()


def test_a_precision_without_memory_keeps_the_others() -> None:
    ran = Result("fp16", 4, step_s=Spread.of([1.0, 3.0, 2.0]), loss=2.0, allocated_bytes=10)
    failed = Result("fp32", 4, error="GPU memory ran out in fp32")
    report = Report({}, {}, {}, {}, 1, [failed, ran])
    assert report.ratios() == {}
    assert report.document()["results"][1]["step_s"] == {"median": 2.0, "p10": 1.0, "p90": 3.0, "n": 3}


def test_a_cpu_is_spared_what_it_cannot_do() -> None:
    assert default_precisions(CPU) == ("fp32", "bf16")


def test_the_matrix_rate_is_of_this_machine() -> None:
    assert 1e8 < matmul_rate("fp32", CPU) < 1e13


def test_a_timed_step_trains() -> None:
    config = nano_config(**{"optim.lr": 2e-3, "optim.warmup": 0})
    step = build_step(config, "fp32", CPU)
    batch = nano_batch(config)
    before = loss_of(step, batch).item()
    assert len(step_seconds(step, [batch], 30)) == 30
    assert loss_of(step, batch).item() < 0.8 * before


def test_batches_come_from_the_data_set_where_there_is_one(synth_root: Path) -> None:
    config = load("tiny", options={"data.root": str(synth_root), "train.workers": 0}).config
    inputs = make_inputs(config, 2, pin=False)
    assert inputs.source == str(synth_root / "synth_infos_train.pkl")
    assert len(inputs.batches) == 2
    assert inputs.loading_s is not None
    json.dumps(dataclasses.asdict(dataclasses.replace(inputs, batches=[])))


def test_an_unreadable_sample_is_told(synth_root: Path, tmp_path: Path) -> None:
    shutil.copytree(synth_root, tmp_path / "set")
    for cloud in (tmp_path / "set").rglob("*.pcd.bin"):
        cloud.write_bytes(b"")
    config = load("tiny", options={"data.root": str(tmp_path / "set"), "train.workers": 0}).config
    with pytest.raises(BevctlError, match=r"pcd\.bin"):
        make_inputs(config, 1, pin=False)
