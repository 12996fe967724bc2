"""Public logs that lie beside the checkout, against figures counted here by search and split, not by the readers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bevctl.runs.records import EventRecord, RunLog
from bevctl.runs.source import open_source

MMCV_TEXT = [
    "03_streampetr_r50_fp16_4gpu.log",
    "09_streampetr_eval_crash_4gpu.log",
    "11_streampetr_frozen_det_long.log",
    "18_mmcv_pointpillars_20220821_205041_died_at_start.log",
    "18_mmcv_pointpillars_20220821_205110.log",
    "18_mmcv_pointpillars_20220821_233842.log",
    "30_pasted_bevfusion_mit_heatmap_start_nan.log",
    "31_pasted_bevfusion_mit_centerhead_slow.log",
    "33_pasted_bevdet_fp16_heatmap_nan_from_start.log",
    "37_pasted_streampetr_2d_head_nan_iter7050.log",
    "39_pasted_transfusion_slow_11s_iter.log",
]
MMENGINE_TEXT = ["35_pasted_mmengine_console_no_year_base_lr.log", "36_pasted_mmengine_npu_first_iters_nan.log"]
MMCV_JSON = [
    "01_bevfusion_mit_resumed_fp16_a.log.json",
    "03_streampetr_r50_fp16_4gpu.log.json",
    "18_mmcv_pointpillars_20220821_233842.log.json",
    "23_mmcv_test_fixture.log.json",
]
MMENGINE_JSON = [
    "14_mmengine_smoke_nan_recovers_scalars.json",
    "16_mmengine_pointpillars_scalars.json",
    "17_mmengine_example_detection_scalars.json",
]


@dataclass(frozen=True)
class Counted:
    """What a search over the text finds."""

    train: list[str]
    validation: list[str]


def _counted(path: Path) -> Counted:
    lines = path.read_text().split("\n")
    train = [line for line in lines if re.search(r"(Epoch|Iter)(\(train\) )? ?\[.*(lr|memory): ", line)]
    return Counted(train, [line for line in lines if re.search(r"(Epoch|Iter)\(val\)", line)])


def _numbers(line: str) -> dict[str, float]:
    """Every `name: number` of a line."""
    pairs = re.findall(r"([\w./@-]+): (-?[\d.]+(?:e[+-]?\d+)?|nan|inf)(?=,|\s|$)", line)
    return {name: float(value) for name, value in pairs}


def _objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _same(read: float | None, counted: float | None) -> bool:
    return read == pytest.approx(counted, nan_ok=True)


def _assert_numbers(log: RunLog, index: int, counted: dict[str, float]) -> None:
    """Every number of a line is in its record, under its own name or the project's."""
    step = log.steps[index]
    own = {"time": step.iter_time_s, "data_time": step.data_time_s, "lr": step.lr, "loss": step.loss}
    own |= {"grad_norm": step.grad_norm, "memory": None if step.memory_gib is None else step.memory_gib * 1024}
    everything = {**step.extra, **step.losses, **own}
    for name, value in counted.items():
        if name not in ("eta", "base_lr"):
            assert _same(everything.get(name), value), f"{name}: {everything.get(name)} is not {value}"


@pytest.fixture(scope="module")
def logs(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("shared") / "logs"
    return folder


@pytest.mark.parametrize("name", MMCV_TEXT + MMENGINE_TEXT)
def test_text_logs_have_every_train_and_validation_line(logs: Path, name: str) -> None:
    log, counted = open_source(logs / name).read(), _counted(logs / name)
    assert log.format == ("mmengine-text" if name in MMENGINE_TEXT else "mmcv-text")
    assert (log.records, len(log.steps)) == (len(counted.train), len(counted.train))
    assert len(log.validations) == len(counted.validation)
    assert not log.time_estimated
    for index in (0, -1, len(counted.train) // 2):
        if counted.train:
            _assert_numbers(log, index, _numbers(counted.train[index].split("]")[-1]))
    for validation, line in zip(log.validations, counted.validation, strict=True):
        counted_scores = _numbers(line.split("]")[-1])
        assert len(counted_scores) > 10
        assert all(_same(validation.metrics[score], value) for score, value in counted_scores.items())


@pytest.mark.parametrize("name", MMCV_TEXT)
def test_mmcv_lines_stand_where_their_brackets_say(logs: Path, name: str) -> None:
    log = open_source(logs / name).read()
    for step, line in zip(log.steps, _counted(logs / name).train, strict=True):
        in_epoch = re.search(r"Epoch \[(\d+)\]\[(\d+)/(\d+)\]", line)
        of_run = re.search(r"Iter \[(\d+)/(\d+)\]", line)
        if in_epoch:
            epoch, inner, length = map(int, in_epoch.groups())
            assert (step.epoch, step.iter, log.iters_per_epoch) == (epoch, (epoch - 1) * length + inner, length)
        else:
            assert of_run is not None
            assert (step.iter, log.max_iters) == tuple(map(int, of_run.groups()))
    assert log.interval in (50, None)


@pytest.mark.parametrize("name", MMCV_JSON)
def test_mmcv_json_has_every_line(logs: Path, name: str) -> None:
    log, objects = open_source(logs / name).read(), _objects(logs / name)
    train = [item for item in objects if item.get("mode") == "train"]
    validation = [item for item in objects if item.get("mode") == "val"]
    assert log.format == "mmcv-json"
    assert (log.records, len(log.validations), log.unknown_lines) == (len(train), len(validation), 0)
    for index in (0, -1, len(train) // 2):
        plain = {key: value for key, value in train[index].items() if key not in ("mode", "epoch", "iter")}
        _assert_numbers(log, index, plain)
        assert log.steps[index].epoch == train[index]["epoch"]
    nonfinite = sum(
        1
        for item in train
        if item.get("grad_norm") in (float("inf"),) or item.get("grad_norm", 0) != item.get("grad_norm", 0)
    )
    if "grad_norm" in log.metrics:
        assert log.metrics["grad_norm"].nonfinite == nonfinite
    for record, item in zip(log.validations, validation, strict=True):
        scores = {key: value for key, value in item.items() if key not in ("mode", "epoch", "iter", "lr")}
        assert record.epoch == item["epoch"]
        assert all(_same(record.metrics[key], value) for key, value in scores.items())


@pytest.mark.parametrize("name", MMENGINE_JSON)
def test_mmengine_json_has_every_line(logs: Path, name: str) -> None:
    log, objects = open_source(logs / name).read(), _objects(logs / name)
    train = [item for item in objects if "lr" in item]
    validation = [item for item in objects if "lr" not in item]
    assert log.format == "mmengine-json"
    assert (log.records, len(log.validations), log.unknown_lines) == (len(train), len(validation), 0)
    assert [step.iter for step in log.steps] == [item["step"] for item in train]
    assert [step.epoch for step in log.steps] == [item["epoch"] for item in train]
    assert [record.epoch for record in log.validations] == [item["step"] for item in validation]
    for index in (0, -1, len(train) // 2):
        plain = {key: value for key, value in train[index].items() if key not in ("step", "epoch", "iter")}
        _assert_numbers(log, index, plain)


def test_the_text_and_the_json_of_one_run_agree(logs: Path) -> None:
    text = open_source(logs / "03_streampetr_r50_fp16_4gpu.log").read()
    lines = open_source(logs / "03_streampetr_r50_fp16_4gpu.log.json").read()
    assert [step.iter for step in text.steps] == [step.iter for step in lines.steps]
    for one, other in zip(text.steps, lines.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-4, nan_ok=True)
        assert one.memory_gib == other.memory_gib
    assert text.header["config"].split() == lines.header["config"].split()
    assert text.header["precision"] == lines.header["precision"] == {"fp16": True, "loss_scale": "dynamic"}
    assert text.header["env"]["PyTorch"] == lines.header["env"]["PyTorch"] == "1.9.0+cu111"


def test_the_header_of_an_mmcv_log(logs: Path) -> None:
    path = logs / "03_streampetr_r50_fp16_4gpu.log"
    log, text = open_source(path).read(), path.read_text()
    assert log.header["env"]["GPU 0,1,2,3"] in text
    assert log.header["env"]["Distributed training"] == "True"
    assert log.header["config"].startswith("point_cloud_range = ")
    assert text.count(log.header["config"]) == 1
    assert log.header["host"] == "user@host"
    assert (log.max_epochs, log.max_iters) == (24, 42192)
    saved = [int(number) for number in re.findall(r"Saving checkpoint at (\d+) iter", text)]
    assert [event.data["iterations"] for event in _kind(log, "checkpoint")] == saved
    assert log.unknown_lines == 0


def test_the_checkpoint_that_a_run_was_resumed_from(logs: Path) -> None:
    path = logs / "01_bevfusion_mit_resumed_fp16_a.log.json"
    log, meta = open_source(path).read(), _objects(path)[0]
    resume = _kind(log, "resume")[0]
    assert resume.data["loss_scale"] == meta["fp16"]["loss_scaler"]["scale"] == 512.0
    assert log.iters_per_epoch == meta["iter"] // meta["epoch"] == 30895
    assert log.steps[0].iter == meta["iter"] + 50
    later = next(step for step in log.steps if step.epoch == 4)
    assert later.iter == pytest.approx(3 * 30895 + 50, abs=50), "the last window of an epoch is not logged"
    assert [segment.reason for segment in log.segments] == ["resume"]


def test_openpcdet(logs: Path) -> None:
    path = logs / "19_openpcdet_pointpillar_custom_100e.log"
    log, text = open_source(path).read(), path.read_text()
    counted = re.findall(
        r"Train: +(\d+)/100 .*?Loss: (\S+) .*?LR: (\S+) .*?Acc_iter (\d+) .*Batch time: ([\d.]+)", text
    )
    assert log.format == "openpcdet"
    assert [(step.epoch, step.iter) for step in log.steps] == [(int(row[0]), int(row[3])) for row in counted]
    assert [step.loss for step in log.steps] == [float(row[1]) for row in counted]
    assert [step.lr for step in log.steps] == [float(row[2]) for row in counted]
    assert [step.iter_time_s for step in log.steps] == [float(row[4]) for row in counted]
    assert (log.iters_per_epoch, log.max_epochs) == (44, 100)
    memory = [float(used) / 1024 for used in re.findall(r"\| +(\d+) / +\d+ MB", text)]
    assert [s.extra["device_memory_gib"] for s in log.steps if "device_memory_gib" in s.extra] == memory
    assert log.metrics["device_memory_gib"].max == max(memory)
    assert log.validations[0].epoch == 100
    assert log.validations[0].metrics["recall_rcnn_0.5"] == 0.897143
    assert [event.kind for event in log.events] == ["start", "end", "load"]
    assert log.header["precision"]["fp16"] is False


def test_a_killed_worker_is_the_cause_and_its_exit_the_consequence(logs: Path) -> None:
    log = open_source(logs / "06_streampetr_worker_killed.log").read()
    cause, consequence = _kind(log, "failure")
    assert (cause.data["cause"], cause.data["role"], cause.data["signal"]) == ("worker_killed", "cause", "Killed")
    assert (consequence.data["cause"], consequence.data["role"]) == ("worker_exited", "consequence")
    assert cause.where.endswith(":16")
    assert (log.records, log.unknown_lines) == (0, 0)


def test_a_crash_in_evaluation(logs: Path) -> None:
    log = open_source(logs / "09_streampetr_eval_crash_4gpu.log").read()
    (crash,) = _kind(log, "failure")
    assert (crash.data["cause"], crash.iter) == ("size_mismatch", 7000)
    assert "temporal_alignment" in crash.data["frames"][-1]
    assert crash is log.events[-1]
    assert log.last_line.startswith("RuntimeError: Sizes of tensors must match")


@pytest.mark.parametrize("name", ["11_streampetr_frozen_det_long.log", "18_mmcv_pointpillars_20220821_205110.log"])
def test_a_log_that_just_stops_has_no_failure(logs: Path, name: str) -> None:
    log = open_source(logs / name).read()
    assert _kind(log, "failure") == []
    assert log.last_time == log.steps[-1].time


def test_a_checkpoint_that_does_not_fit(logs: Path) -> None:
    path = logs / "21_bevfusion_mit_checkpoint_mismatch_nohup.out"
    log, text = open_source(path).read(), path.read_text()
    (event,) = _kind(log, "checkpoint_mismatch")
    unexpected = re.search(r"unexpected key in source state_dict: (.*)", text)
    missing = re.search(r"missing keys in source state_dict: (.*)", text)
    assert unexpected is not None
    assert missing is not None
    assert event.data["size_mismatch"] == text.count("size mismatch for ")
    assert event.data["unexpected"] == len(unexpected[1].split(","))
    assert event.data["missing"] == len(missing[1].split(","))
    assert event.data["prefixes"]["size_mismatch"] == {"heads.object": 2, "encoders.camera": 1}
    (failure,) = _kind(log, "failure")
    assert failure.data["exception"] == "FileNotFoundError"


def test_healthy_logs_hold_no_failures(logs: Path) -> None:
    healthy = [
        path
        for path in logs.iterdir()
        if path.name.startswith(("01", "03", "16", "17", "18_mmcv_pointpillars_20220821_2338", "19"))
    ]
    assert len(healthy) == 8
    for path in healthy:
        kinds = {event.kind for event in open_source(path).read().events}
        assert kinds <= {"start", "resume", "checkpoint", "load", "end"}, path.name


def test_estimated_times_are_counted_back_from_the_last_write(logs: Path) -> None:
    path = logs / "16_mmengine_pointpillars_scalars.json"
    train = [item for item in _objects(path) if "lr" in item]
    log = open_source(path).read()
    assert log.time_estimated
    assert log.steps[-1].time == pytest.approx(path.stat().st_mtime)
    spans = list(_spans(train))
    assert log.steps[0].time == pytest.approx(path.stat().st_mtime - sum(spans[1:]), rel=1e-9)
    hour = open_source(path).read(since=path.stat().st_mtime - 3600)
    left, expected = 3600.0, 0
    for span in reversed(spans):
        if left < 0:
            break
        expected, left = expected + 1, left - span
    assert hour.records == expected


def _spans(train: list[dict[str, Any]]) -> Iterator[float]:
    before = train[0]["step"] - 1
    for item in train:
        yield item["time"] * (item["step"] - before)
        before = item["step"]


def _kind(log: RunLog, kind: str) -> list[EventRecord]:
    return [event for event in log.events if event.kind == kind]
