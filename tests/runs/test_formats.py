"""Logs of mmengine, OpenPCDet, home-made loops and bevctl itself."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from bevctl.runs.readers import READERS, detect
from bevctl.runs.records import EventRecord, RunLog, StepRecord
from bevctl.runs.source import open_source
from bevctl.runs.writer import RunWriter
from tests.runs.logs import START, mmcv_lines, mmcv_message, moment, write


def _read(path: Path, lines: list[str], name: str = "any.log") -> RunLog:
    return open_source(write(path / name, lines)).read()


def _mmengine_line(seconds: float, place: str, items: str, year: str = "%Y/") -> str:
    return f"{moment(seconds):{year}%m/%d %H:%M:%S} - mmengine - INFO - {place}  {items}"


MMENGINE_ITEMS = (
    "base_lr: 4.0000e-05 lr: 2.0000e-05  eta: 1 day, 0:00:10  time: 0.5000  data_time: 0.0100  memory: 8192  "
    "grad_norm: 12.5000  loss: 3.0000  loss_heatmap: 2.0000  layer_-1_loss_cls: 1.0000  matched_ious: 0.2000"
)


@pytest.mark.parametrize("year", ["%Y/", ""])
def test_mmengine_text(tmp_path: Path, year: str) -> None:
    lines = [
        _mmengine_line(0, "Epoch(train) [1][  50/100]", MMENGINE_ITEMS, year),
        _mmengine_line(25, "Epoch(train) [1][ 100/100]", MMENGINE_ITEMS.replace("12.5000", "nan"), year),
        _mmengine_line(
            30, "Epoch(val) [1][ 5/10]  ", "eta: 0:00:03  time: 0.1000  data_time: 0.0100  memory: 500", year
        ),
        _mmengine_line(40, "Epoch(val) [1][10/10]  ", "NuScenes metric/x/mAP: 0.2500  time: 0.1  a NDS: nan", year),
    ]
    path = write(tmp_path / "any.log", lines)
    os.utime(path, (START.timestamp() + 60, START.timestamp() + 60))
    log = open_source(path).read()
    assert (log.format, log.iters_per_epoch, log.unknown_lines) == ("mmengine-text", 100, 0)
    first, second = log.steps
    assert first.time == START.replace(microsecond=0).timestamp()
    assert (first.iter, first.lr, first.iter_time_s, first.memory_gib, first.eta_s) == (50, 2e-5, 0.5, 8.0, 86410.0)
    assert first.losses == {"loss_heatmap": 2.0, "layer_-1_loss_cls": 1.0}
    assert first.extra == {"base_lr": 4e-5, "matched_ious": 0.2}
    assert math.isnan(second.grad_norm or 0)
    (scores,) = log.validations
    assert (scores.epoch, scores.iter, scores.metrics["mAP"]) == (1, 100, 0.25)
    assert scores.metrics.keys() == {"NuScenes metric/x/mAP", "a NDS", "mAP"}


def test_a_console_without_years_over_new_year(tmp_path: Path) -> None:
    lines = [
        f"{day} 23:00:00 - mmengine - INFO - Epoch(train) [1][{n}/9]  loss: 1.0000"
        for n, day in enumerate(("12/31", "01/01"), 1)
    ]
    path = write(tmp_path / "any.log", lines)
    modified = time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, -1))
    os.utime(path, (modified, modified))
    assert [time.localtime(step.time).tm_year for step in open_source(path).read().steps] == [2025, 2026]


def test_the_header_of_mmengine(tmp_path: Path) -> None:
    stamp = "2026/02/03 04:05:06 - mmengine - INFO -"
    lines = [
        f"{stamp} ",
        "-" * 60,
        "System environment:",
        "    sys.platform: linux",
        "    GPU 0: NVIDIA A100-SXM4-80GB",
        "",
        "Runtime environment:",
        "    cudnn_benchmark: False",
        "-" * 60,
        "",
        f"{stamp} Config:",
        "optim_wrapper = dict(loss_scale='dynamic', type='AmpOptimWrapper')",
        "train_cfg = dict(by_epoch=True, max_epochs=24)",
        "",
        f"{stamp} Auto resumed from the latest checkpoint /runs/a/epoch_3.pth.",
        f"{stamp} resumed epoch: 3, iter: 300",
        _mmengine_line(0, "Epoch(train) [4][ 50/100]", MMENGINE_ITEMS),
        "2026/02/03 04:05:07 - mmengine - WARNING - /x/hook.py - before_run - 12 - something odd",
        "2026/02/03 04:05:08 - mmengine - INFO - Saving checkpoint at 4 epochs",
    ]
    log = _read(tmp_path, lines)
    assert log.header["env"] == {
        "sys.platform": "linux",
        "GPU 0": "NVIDIA A100-SXM4-80GB",
        "cudnn_benchmark": "False",
    }
    assert log.header["precision"] == {"fp16": True, "loss_scale": "dynamic"}
    assert log.max_epochs == 24
    assert [event.kind for event in log.events] == ["resume", "resume", "checkpoint"]
    assert log.events[0].data["checkpoint"] == "/runs/a/epoch_3.pth"
    assert log.segments[0].reason == "resume"
    assert log.unknown_lines == 0


def test_mmengine_json_by_iterations(tmp_path: Path) -> None:
    step = {"lr": 0.1, "loss": 1.0, "time": 0.5, "memory": 1024}
    lines = [json.dumps({**step, "step": 50}), json.dumps({"mIoU": 41.0, "time": 9.0, "step": 50})]
    log = _read(tmp_path, lines, "scalars.json")
    assert (log.format, log.steps[0].iter, log.steps[0].epoch) == ("mmengine-json", 50, 1)
    assert (log.validations[0].epoch, log.validations[0].metrics) == (1, {"mIoU": 41.0})


OPENPCDET = (
    "{time:%Y-%m-%d %H:%M:%S},000   INFO  Train: {epoch:4d}/3 ( 33%) [{inner:4d}/20 (  0%)]  Loss: {loss} (2.50)  "
    "LR: 1.000e-03  Time cost: 00:01/00:10 [{total}]  Acc_iter {acc:<10d}  Data time: 0.05(0.06)  "
    "Forward time: 0.20(0.21)  Batch time: 0.25(0.27)"
)


def test_openpcdet(tmp_path: Path) -> None:
    def line(epoch: int, inner: int, loss: str, total: str = "00:01/01:30") -> str:
        at = (epoch - 1) * 20 + inner
        return OPENPCDET.format(time=moment(at), epoch=epoch, inner=inner, loss=loss, total=total, acc=at + 1)

    lines = [
        f"{START:%Y-%m-%d %H:%M:%S},000   INFO  **********************Start logging**********************",
        f"{START:%Y-%m-%d %H:%M:%S},000   INFO  use_amp          True",
        line(1, 0, "3.500"),
        "[0] NVIDIA GeForce RTX 3090 | 61'C,  85 % |  6144 / 24576 MB | me(6100M)",
        line(1, 19, "nan", "01:00/1:00:30"),
        line(2, 0, "1.500"),
        f"{moment(40):%Y-%m-%d %H:%M:%S},000   INFO  *************** Performance of EPOCH 2 *****************",
        f"{moment(40):%Y-%m-%d %H:%M:%S},000   INFO  recall_rcnn_0.5: 0.750000",
        "Traceback (most recent call last):",
        "KeyError: 'gt_boxes'",
    ]
    log = _read(tmp_path, lines)
    assert (log.format, log.iters_per_epoch, log.max_epochs) == ("openpcdet", 20, 3)
    assert [(step.epoch, step.iter) for step in log.steps] == [(1, 1), (1, 20), (2, 21)]
    first, second, _ = log.steps
    assert (first.loss, first.lr, first.iter_time_s, first.data_time_s, first.eta_s) == (3.5, 1e-3, 0.25, 0.05, 90.0)
    assert second.eta_s == 3630.0
    assert math.isnan(second.loss or 0)
    assert (second.extra["gpu_util"], second.extra["device_memory_gib"]) == (85.0, 6.0)
    assert log.header["precision"]["fp16"] is True
    assert log.validations[0].metrics == {"recall_rcnn_0.5": 0.75}
    assert [event.kind for event in log.events] == ["start", "failure"]
    assert log.unknown_lines == 0


@pytest.mark.parametrize(
    ("line", "epoch", "iteration", "loss"),
    [
        ("Epoch: 1, Batch: 100, Loss: 0.25", 1, 100, 0.25),
        ("epoch=3 step=700 loss=1.5e-2 lr=0.001", 3, 700, 0.015),
        ("[Epoch 10] Loss: 0.125 - mAP: 0.415 - NDS: 0.508", 10, 10, 0.125),
        ("Epoch: [2][ 40/200]\tTime  0.512 ( 0.600)\tData  0.010 ( 0.020)\tLoss 6.5e-01 (7.0e-01)", 2, 40, 0.65),
        ("2026-02-03 04:05:06,789 - root - INFO - Epoch 2/9 iter 30/50 - train_loss: 0.75", 2, 30, 0.75),
        ("INFO:root:Epoch [5/20], Step [30/60], Loss: nan", 5, 30, math.nan),
        ("Epoch 1:  45%|####5     | 450/1000 [01:23<01:40,  5.00it/s, loss=0.25, lr=0.01]", 1, 450, 0.25),
        ('{"epoch": 4, "train_loss": 0.5, "test_acc1": 61.0}', 4, 4, 0.5),
    ],
)
def test_home_made_lines(tmp_path: Path, line: str, epoch: int, iteration: int, loss: float) -> None:
    log = _read(tmp_path, ["Using device cuda:0", line])
    (step,) = log.steps
    assert log.format == "generic"
    assert (step.epoch, step.iter) == (epoch, iteration)
    assert step.loss == pytest.approx(loss, nan_ok=True)
    assert log.unknown_lines == 1


def test_what_home_made_lines_hold_besides(tmp_path: Path) -> None:
    lines = [
        "Epoch: [0]  [ 10/50]  eta: 0:01:40  lr: 0.002  loss: 2.5 (2.7)  loss_cls: 1.5  grad norm: 3.5  max mem: 2048",
        "Epoch: [0]  [ 20/50]  eta: 0:01:20  lr: 0.002  loss: 2.0 (2.5)  loss_cls: 1.0  grad norm: 3.0  max mem: 2048",
        "Epoch: [1]  [ 10/50]  eta: 0:01:00  lr: 0.001  loss: 1.5 (1.5)  loss_cls: 0.5  grad norm: 2.0  max mem: 2048",
        "Val Epoch: 1 loss: 1.75 mAP: 0.25",
    ]
    log = _read(tmp_path, lines)
    assert [(step.epoch, step.iter) for step in log.steps] == [(1, 10), (1, 20), (2, 60)]
    step = log.steps[0]
    assert (step.lr, step.losses, step.memory_gib, step.grad_norm, step.eta_s) == (
        0.002,
        {"loss_cls": 1.5},
        2.0,
        3.5,
        100.0,
    )
    assert log.iters_per_epoch == 50
    assert log.validations[0].metrics == {"loss": 1.75, "mAP": 0.25}


def test_a_progress_bar_is_read_to_its_last_state(tmp_path: Path) -> None:
    states = [
        f"Epoch 1:  {n}%|{'#' * (n // 10):10}| {n}/100 [00:{n // 2:02d}<00:10,  2.00it/s, loss={1 / n:.3f}]"
        for n in range(1, 60)
    ]
    path = tmp_path / "bar.txt"
    path.write_text("\r" + "\r".join(states))
    log = open_source(path).read()
    assert [step.iter for step in log.steps] == list(range(1, 60))
    assert (log.steps[-1].loss, log.steps[-1].iter_time_s) == (0.017, 0.5)
    assert log.events == []


def test_text_that_only_looks_like_a_log(tmp_path: Path) -> None:
    lines = ["Step 3: mix the flour", "The loss of the iteration: none", "batch of 12 cookies", "items: 5", "", "epoch"]
    log = _read(tmp_path, lines)
    assert (log.records, log.unknown_lines, log.format) == (0, 5, "generic")


def test_the_format_is_told_by_content() -> None:
    assert detect(mmcv_lines(2)) == ("mmcv-text", 2.0)
    assert detect([mmcv_message(0, "hello"), mmcv_message(1, "Epoch: 1, Loss: 0.5", logger="root")])[0] == "generic"
    assert detect([])[0] == "generic"
    assert all(reader.recognises("") == 0 for reader in READERS.values())


def _write_own_run(folder: Path) -> None:
    writer = RunWriter(folder, log_interval=2)
    writer.update(name="nano", iters_per_epoch=4, total_iters=8, status="running", host="here")
    writer.update(
        segments=[{"precision": "fp16", "loss_scale": "dynamic", "device": "CPU", "versions": {"torch": "2.4"}}]
    )
    writer.event(EventRecord("start", "CPU, FP16", 1000.0))
    for iteration in (1, 2, 3):
        writer.step(_own_step(iteration), iteration, 4)
    data = {"tokens": ["t"], "loss_scale": 65536.0}
    writer.event(EventRecord("skipped_step", "Iteration 2 skipped", 1002.0, 2, 1, data))
    writer.event(EventRecord("resume", "Resumed from iter_2.pth", 1005.0))
    writer.step(_own_step(3, time=1006.0, loss=math.nan, losses={"loss/object/a": math.inf}), 3, 4)
    writer.event(EventRecord("evaluation", "Epoch 1 evaluated", 1010.0, data={"metrics": {"mAP": 0.2}, "epoch": 1}))
    writer.event(EventRecord("end", "GPU memory ran out: CUDA out of memory.", 1011.0, data={"status": "failed"}))
    writer.close()
    (folder / "config.yaml").write_text("name: nano\n")


def _own_step(iteration: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "epoch": 1,
        "iter": iteration,
        "time": 1000.0 + iteration,
        "lr": 1e-3,
        "loss": 2.0,
        "losses": {"loss/object/a": 2.0},
        "grad_norm": 1.0,
        "loss_scale": 65536.0,
        "skipped_steps": 0,
        "iter_time_s": 1.0,
        "data_time_s": 0.1,
        "samples_per_s": 4.0,
        "eta_s": 5.0,
    }
    return StepRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "log.jsonl", "events.jsonl"])
def test_bevctls_own_run(tmp_path: Path, name: str) -> None:
    _write_own_run(tmp_path)
    log = open_source(tmp_path / name).read()
    assert log.format == "bevctl"
    assert [step.iter for step in log.steps] == [1, 2, 3]
    assert log.steps[0] == _own_step(1)
    assert math.isnan(log.steps[2].loss or 0)
    assert log.steps[2].losses == {"loss/object/a": math.inf}
    kinds = [event.kind for event in log.events]
    assert kinds == ["start", "skipped_step", "resume", "evaluation", "end", "failure"]
    assert log.events[1].data["loss_scale"] == 65536.0
    assert log.events[2].data == {"from_iter": 3, "to_iter": 3, "replaced": 1}
    assert log.events[5].data["cause"] == "cuda_oom"
    assert (log.validations[0].epoch, log.validations[0].iter, log.validations[0].metrics) == (1, 3, {"mAP": 0.2})
    assert (log.iters_per_epoch, log.max_iters, log.max_epochs) == (4, 8, 2)
    assert log.header["precision"] == {"fp16": True, "loss_scale": "dynamic", "name": "fp16"}
    assert log.header["env"] == {"torch": "2.4", "device": "CPU"}
    assert (log.header["name"], log.header["config"]) == ("nano", "name: nano\n")
    assert log.metrics["samples_per_s"].mean == 4.0
    assert (log.unknown_lines, log.time_estimated, log.interval) == (0, False, 1)


def test_the_text_of_bevctls_own_run(tmp_path: Path) -> None:
    _write_own_run(tmp_path)
    log = open_source(tmp_path / "log.txt").read()
    assert (log.format, [step.iter for step in log.steps]) == ("mmcv-text", [2])
    assert log.steps[0].loss_scale == 65536.0


def test_a_run_without_its_other_files(tmp_path: Path) -> None:
    _write_own_run(tmp_path)
    for name in ("run.json", "config.yaml", "events.jsonl"):
        (tmp_path / name).unlink()
    log = open_source(tmp_path).read()
    assert (log.records, log.events) == (3, [])
    assert "config.yaml" in log.notes[0]


def test_bevctls_own_run_goes_on(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, log_interval=2)
    writer.step(_own_step(1), 1, 4)
    writer.event(EventRecord("start", "CPU", 1000.0))
    source = open_source(tmp_path)
    first = source.read()
    assert (first.records, len(first.events)) == (1, 1)
    writer.event(EventRecord("skipped_step", "Iteration 2 skipped", 1001.5))
    writer.step(_own_step(2), 2, 4)
    writer.event(EventRecord("checkpoint", "Saved", 1002.5))
    writer.close()
    log = source.read()
    fresh = open_source(tmp_path).read()
    assert (log.steps, log.events) == (fresh.steps, fresh.events)
    assert [event.iter for event in log.events] == [None, 1, 2]


def test_a_window_of_a_home_made_log_without_times(tmp_path: Path) -> None:
    lines = [f"epoch 1 iter {n} loss: 0.5 time: 10.0" for n in range(1, 101)]
    source = open_source(write(tmp_path / "any.log", lines))
    modified = (tmp_path / "any.log").stat().st_mtime
    log = source.read(since=modified - 100)
    assert log.time_estimated
    assert [step.iter for step in log.steps] == list(range(90, 101))


def test_a_window_of_a_home_made_log_with_times(tmp_path: Path) -> None:
    lines = [f"[{moment(10 * n):%Y-%m-%d %H:%M:%S}] epoch 1 iter {n} loss: 0.5" for n in range(1, 101)]
    source = open_source(write(tmp_path / "any.log", lines))
    last = source.last_time()
    assert last == moment(1000).replace(microsecond=0).timestamp()
    assert [step.iter for step in source.read(since=last - 100).steps] == list(range(90, 101))
