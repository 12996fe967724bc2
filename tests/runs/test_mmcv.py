"""Text and JSON logs of mmcv, with all that happens to logs on their way."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bevctl.runs.records import EventRecord, RunLog
from bevctl.runs.source import open_source
from tests.runs.logs import START, mmcv_line, mmcv_lines, mmcv_message, moment, write


def _read(path: Path, lines: list[str], end: str = "\n", name: str = "train.log") -> RunLog:
    return open_source(write(path / name, lines, end)).read()


def _kind(log: RunLog, kind: str) -> list[EventRecord]:
    return [event for event in log.events if event.kind == kind]


def test_a_line_is_a_record(tmp_path: Path) -> None:
    log = _read(tmp_path, [mmcv_line(2, 50, seconds=0.0)])
    (step,) = log.steps
    assert (step.epoch, step.iter, step.mode) == (2, 450, "train")
    assert step.time == START.timestamp()
    assert (step.lr, step.iter_time_s, step.data_time_s, step.loss, step.grad_norm) == (2e-5, 0.611, 0.02, 2.1, 4.1)
    assert step.memory_gib == 9.0
    assert step.eta_s == 3723.0
    assert step.losses == {
        "loss/object/loss_heatmap": 1.2,
        "loss/object/layer_-1_loss_bbox": 0.9,
        "stats/object/matched_ious": 0.41,
    }
    assert (log.format, log.iters_per_epoch, log.last_time) == ("mmcv-text", 400, START.timestamp())


def test_a_line_of_petr_has_the_losses_of_each_layer(tmp_path: Path) -> None:
    """Detection and BEV segmentation; a validation line names mAP and NDS behind a prefix."""
    names = [f"{layer}loss_{part}" for part in ("cls", "bbox", "dri", "lan", "vie") for layer in ("", "d0.", "d4.")]
    items = ", ".join(f"{name}: {0.5 + place / 10:.4f}" for place, name in enumerate(names))
    stamp = "2022-08-08 12:00:00,123 - mmdet - INFO - "
    numbers = f"lr: 7.973e-05, eta: 1 day, 20:12:35, time: 1.884, data_time: 0.125, memory: 8345, {items}"
    lines = [
        f"{stamp}Epoch [1][50/3517]\t{numbers}, loss: 22.5123, grad_norm: 45.2000",
        f"{stamp}Epoch(val) [1][6019]\tpts_bbox_NuScenes/NDS: 0.3012, pts_bbox_NuScenes/mAP: 0.2512",
    ]
    log = _read(tmp_path, lines)
    (step,) = log.steps
    assert step.losses == {name: round(0.5 + place / 10, 4) for place, name in enumerate(names)}
    assert (step.loss, step.grad_norm, step.eta_s, log.iters_per_epoch) == (22.5123, 45.2, 159155.0, 3517)
    assert log.validations[0].metrics["NDS"] == 0.3012
    assert log.validations[0].metrics["mAP"] == 0.2512


@pytest.mark.parametrize(
    ("eta", "seconds"),
    [("1 day, 2:03:04", 93784.0), ("12 days, 0:00:00", 1036800.0), ("-1 day, 23:00:00", -3600.0), ("0:00:07", 7.0)],
)
def test_every_way_to_write_an_eta(tmp_path: Path, eta: str, seconds: float) -> None:
    lines = [mmcv_line(1, 50), mmcv_line(1, 100, eta=eta), mmcv_line(1, 150)]
    assert [step.eta_s for step in _read(tmp_path, lines).steps] == [3723.0, seconds, 3723.0]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    lines = mmcv_lines(3)
    lines[1] = mmcv_line(1, 100, grad_norm="inf", loss="nan").replace("loss_heatmap: 1.2000", "loss_heatmap: nan")
    log = _read(tmp_path, lines)
    assert math.isnan(log.steps[1].loss or 0)
    assert log.steps[1].grad_norm == math.inf
    assert math.isnan(log.steps[1].losses["loss/object/loss_heatmap"])
    metric = log.metrics["loss"]
    assert (metric.count, metric.nonfinite, metric.first_nonfinite) == (3, 1, 100)
    assert (metric.min, metric.max, metric.mean) == (1.0, 3.0, 2.0)


def test_items_may_be_missing_or_more(tmp_path: Path) -> None:
    lines = [
        mmcv_line(1, 50, eta="", time="", data_time="", memory="", grad_norm=""),
        mmcv_line(1, 100, lr="", backbone_lr="1.000e-05", head_lr="1.000e-04", momentum="0.9500"),
        mmcv_line(1, 150),
    ]
    first, second, third = _read(tmp_path, lines).steps
    assert (first.eta_s, first.iter_time_s, first.memory_gib, first.grad_norm) == (None, None, None, None)
    assert first.loss == 2.1
    assert (second.lr, second.extra) == (1e-5, {"head_lr": 1e-4, "momentum": 0.95})
    assert third.iter_time_s == 0.611


def test_iterations_without_epochs(tmp_path: Path) -> None:
    lines = [mmcv_line(1, n, seconds=n).replace("Epoch [1]", "Iter ").replace("/400]", "/9000]") for n in (50, 100)]
    log = _read(tmp_path, lines)
    assert [(step.epoch, step.iter) for step in log.steps] == [(1, 50), (1, 100)]
    assert (log.max_iters, log.iters_per_epoch) == (9000, None)


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_other_line_ends(tmp_path: Path, end: str) -> None:
    assert [step.loss for step in _read(tmp_path, mmcv_lines(5), end).steps] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_colours_tabs_lost_and_padding(tmp_path: Path) -> None:
    lines = mmcv_lines(3)
    lines[0] = f"\x1b[32m{lines[0]}\x1b[0m"
    lines[1] = lines[1].replace("\t", "        ").replace("[100/", "[ 100/") + "   "
    log = _read(tmp_path, lines)
    assert (log.records, log.unknown_lines) == (3, 0)


def test_a_progress_bar_with_the_next_line_behind_it(tmp_path: Path) -> None:
    bar = "".join(f"\r[{'>' * n:9}] {n}/9, 3.0 task/s, elapsed: {n}s, ETA: {9 - n}s" for n in range(9))
    lines = [mmcv_lines(1)[0], bar + mmcv_lines(2)[1], mmcv_lines(3)[2]]
    log = _read(tmp_path, lines)
    assert [step.loss for step in log.steps] == [1.0, 2.0, 3.0]
    assert log.unknown_lines == 0


def test_prefixes_of_launchers_and_of_torchpack(tmp_path: Path) -> None:
    lines = mmcv_lines(4)
    stamp, body = lines[3].split(" - mmdet3d - INFO - ")
    lines[1] = f"[1,0]<stdout>:{lines[1]}"
    lines[2] = f"[default0]: {lines[2]}"
    lines[3] = f"{stamp.replace(',', '.')} | mmdet3d:log:87 | INFO     | {body}"
    assert [step.loss for step in _read(tmp_path, lines).steps] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("width", [60, 80, 97, 120, 143, 200])
def test_lines_that_a_terminal_wrapped(tmp_path: Path, width: int) -> None:
    whole = mmcv_lines(4)
    wrapped = [line[n : n + width] for line in whole for n in range(0, len(line), width)]
    expected = _read(tmp_path, whole).steps
    read = _read(tmp_path, wrapped)
    assert [step.losses for step in read.steps] == [step.losses for step in expected]
    assert [(step.iter, step.loss, step.grad_norm) for step in read.steps] == [
        (step.iter, step.loss, step.grad_norm) for step in expected
    ]
    assert read.unknown_lines == 0


@pytest.mark.parametrize("cut", [1, 3, 12, 40, 90, 150, 200])
def test_half_a_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    text = "\n".join(mmcv_lines(4))
    path = tmp_path / "train.log"
    path.write_text(text[:-cut])
    log = open_source(path).read()
    assert [step.loss for step in log.steps] == [1.0, 2.0, 3.0]
    assert any("not complete" in note for note in log.notes)


def test_a_whole_last_line_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(mmcv_lines(4)))
    assert open_source(path).read().records == 4


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "latin-1"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    lines = [mmcv_message(0, "Größe = 日本" if encoding != "latin-1" else "Größe"), *mmcv_lines(3)]
    data = "\r\n".join([*lines, ""]).encode(encoding)
    path = tmp_path / "train.log"
    path.write_bytes(b"\xfe\xff" + data if encoding == "utf-16-be" else data)
    log = open_source(path).read()
    assert (log.records, log.unknown_lines, log.format) == (3, 0, "mmcv-text")


def test_gzip_and_a_gzip_that_is_cut_off(tmp_path: Path) -> None:
    data = gzip.compress("\n".join([*mmcv_lines(3000), ""]).encode()) + gzip.compress(
        "\n".join([*mmcv_lines(3001)[-1:], ""]).encode()
    )
    path = tmp_path / "train.log.gz"
    path.write_bytes(data)
    log = open_source(path).read()
    assert (log.records, log.notes) == (3001, [])
    path.write_bytes(data[: len(data) // 2])
    cut = open_source(path).read()
    assert 500 < cut.records < 3000
    assert "cut off" in cut.notes[-1]


def test_the_later_of_repeated_iterations_wins_and_the_resume_is_an_event(tmp_path: Path) -> None:
    lines = [
        *mmcv_lines(12),
        mmcv_message(900, "load checkpoint from local path: epoch_1.pth"),
        mmcv_message(901, "resumed epoch 1, iter 400"),
        *[mmcv_line(2, inner, seconds=1000 + inner, loss="9.0000") for inner in (50, 100)],
    ]
    log = _read(tmp_path, lines)
    assert [step.loss for step in log.steps] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0]
    (resume,) = _kind(log, "resume")
    assert resume.data == {"epoch": 1, "iteration": 400, "from_iter": 600, "to_iter": 450, "replaced": 4}
    assert resume.where == "train.log:14"
    assert [(s.reason, s.first_iter, s.last_iter) for s in log.segments] == [("start", 50, 600), ("resume", 450, 500)]
    assert log.metrics["loss"].count == 10


def test_a_resume_that_the_log_does_not_tell_of(tmp_path: Path) -> None:
    lines = [*mmcv_lines(12), mmcv_line(2, 50, seconds=2000), mmcv_line(2, 100, seconds=2050)]
    log = _read(tmp_path, lines)
    (resume,) = _kind(log, "resume")
    assert (resume.data["replaced"], log.records) == (4, 10)


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    def header(seconds: float, name: str) -> list[str]:
        return [
            mmcv_message(seconds, "Environment info:"),
            "-" * 60,
            "Python: 3.8.17 (default)",
            "GPU 0,1: Tesla V100S-PCIE-32GB",
            "-" * 60,
            "",
            mmcv_message(seconds, "Distributed training: True"),
            mmcv_message(seconds, f"Config:\nmodel = '{name}'\nfp16 = dict(loss_scale=512.0)\n"),
            mmcv_message(seconds, f"Start running, host: me@here, work_dir: /runs/{name}"),
            mmcv_message(seconds, "workflow: [('train', 1)], max: 7 epochs"),
        ]

    again = [mmcv_line(1, 50, seconds=2000, loss="5.0000"), mmcv_line(1, 100, seconds=2050, loss="4.0000")]
    log = _read(tmp_path, [*header(0, "one"), *mmcv_lines(6), *header(1900, "two"), *again], name="nohup.out")
    assert [event.message for event in log.events] == ["A run starts", "A run starts"]
    assert log.events[1].data["replaced"] == 6
    assert [step.loss for step in log.steps] == [5.0, 4.0]
    assert log.header["config"] == "model = 'two'\nfp16 = dict(loss_scale=512.0)"
    assert log.header["precision"] == {"fp16": True, "loss_scale": 512.0}
    assert log.header["work_dir"] == "/runs/two"
    assert log.header["env"]["GPU 0,1"] == "Tesla V100S-PCIE-32GB"
    assert log.header["env"]["Distributed training"] == "True"
    assert (log.max_epochs, log.unknown_lines) == (7, 0)
    assert [segment.reason for segment in log.segments] == ["start", "start"]


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    lines = mmcv_lines(4)
    lines[2:] = [mmcv_line(1, 150, seconds=-3000), mmcv_line(1, 200, seconds=-2950)]
    log = _read(tmp_path, lines)
    (change,) = _kind(log, "clock_change")
    assert change.data["seconds"] == 3100
    assert log.records == 4


def test_validation_scores(tmp_path: Path) -> None:
    scores = "object/map: 0.4100, object/nds: 0.5200, map/mean/iou@max: 0.6300, object/barrier_vel_err: nan"
    lines = [
        *mmcv_lines(8),
        mmcv_message(500, f"Epoch(val) [1][81]\t{scores}"),
        mmcv_message(600, "Iter(val) [81]\tpts_bbox_NuScenes/mAP: 0.3300, pts_bbox_NuScenes/NDS: 0.4400"),
    ]
    one, two = _read(tmp_path, lines).validations
    assert (one.epoch, one.iter, one.time) == (1, 400, moment(500).timestamp())
    assert (one.metrics["mAP"], one.metrics["NDS"], one.metrics["mIoU"]) == (0.41, 0.52, 0.63)
    assert one.metrics["object/map"] == 0.41
    assert math.isnan(one.metrics["object/barrier_vel_err"])
    assert (two.metrics["mAP"], two.metrics["NDS"]) == (0.33, 0.44)


def test_overflows_of_apex_give_the_scale(tmp_path: Path) -> None:
    overflow = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}"
    lines = mmcv_lines(3)
    lines[1:1] = [overflow.format("32768.0"), overflow.format("16384.0")]
    log = _read(tmp_path, lines)
    assert [(step.loss_scale, step.skipped_steps) for step in log.steps] == [(None, None), (16384.0, 2), (16384.0, 2)]
    assert [event.data["loss_scale"] for event in _kind(log, "skipped_step")] == [32768.0, 16384.0]


def test_lines_that_nobody_understands_are_counted(tmp_path: Path) -> None:
    lines = [*mmcv_lines(2), "Formatting the boxes", "car   0.733   0.373", "", *mmcv_lines(4)[2:]]
    log = _read(tmp_path, lines)
    assert (log.records, log.unknown_lines) == (4, 2)
    assert log.last_line == lines[-1]


def _json_lines(path: Path, items: list[dict[str, Any]], name: str = "run.log.json") -> RunLog:
    return _read(path, [json.dumps(item) for item in items], name=name)


def _json_step(epoch: int, inner: int, **changes: Any) -> dict[str, Any]:
    numbers = {"lr": 0.1, "memory": 2048, "data_time": 0.1, "loss_cls": 0.5, "loss": 1.5, "time": 2.0}
    return {"mode": "train", "epoch": epoch, "iter": inner, **numbers, **changes}


def test_json_lines(tmp_path: Path) -> None:
    meta = {"env_info": "Python: 3.8\nGPU 0: Tesla T4", "config": "fp16 = None\ntotal_epochs = 3\n", "seed": 0}
    steps = [_json_step(epoch, inner) for epoch in (1, 2) for inner in (50, 100)]
    steps[1]["loss"] = math.nan
    log = _json_lines(tmp_path, [meta, *steps, {"mode": "val", "epoch": 2, "iter": 9, "lr": 0.1, "mAP": 0.25}])
    assert (log.format, log.max_epochs, log.interval) == ("mmcv-json", 3, 50)
    assert [(step.epoch, step.iter) for step in log.steps] == [(1, 50), (1, 100), (2, 150), (2, 200)]
    assert math.isnan(log.steps[1].loss or 0)
    assert (log.steps[0].memory_gib, log.steps[0].losses) == (2.0, {"loss_cls": 0.5})
    assert (log.header["precision"]["fp16"], log.header["env"]["GPU 0"]) == (False, "Tesla T4")
    assert (log.validations[0].epoch, log.validations[0].metrics) == (2, {"mAP": 0.25})
    assert log.time_estimated
    modified = (tmp_path / "run.log.json").stat().st_mtime
    assert [step.time for step in log.steps] == pytest.approx(
        [modified - 300, modified - 200, modified - 100, modified]
    )
    assert "counted back" in log.notes[0]


def test_json_of_a_resumed_run(tmp_path: Path) -> None:
    meta = {"epoch": 2, "iter": 800, "mmcv_version": "1.7.0", "fp16": {"loss_scaler": {"scale": 1024.0}}}
    log = _json_lines(tmp_path, [meta, _json_step(3, 50), _json_step(3, 100), _json_step(4, 50)])
    assert [step.iter for step in log.steps] == [850, 900, 950]
    assert log.iters_per_epoch == 400
    (resume,) = _kind(log, "resume")
    assert resume.data["loss_scale"] == 1024.0


def test_json_with_odd_values_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.log.json"
    lines = [
        json.dumps(_json_step(1, 50, note="text", list=[1], big=10**400)),
        "{broken",
        json.dumps(_json_step(1, 100)),
    ]
    path.write_text("\n".join(lines) + '\n{"mode": "train", "epoch": 1, "it')
    log = open_source(path).read()
    assert [step.loss for step in log.steps] == [1.5, 1.5]
    assert log.steps[0].extra == {"big": math.inf}
    assert log.unknown_lines == 1
    assert any("not complete" in note for note in log.notes)
