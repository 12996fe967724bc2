"""The loop, through whole small runs."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.batch import Batch
from bevctl.console import Console
from bevctl.engine import run as engine_run
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.errors import BevctlError, ExitCode
from bevctl.runs.heartbeat import Heartbeat, read_beats
from bevctl.runs.records import Doing

from .fakes import Bench, PointData, point_config


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run_json(work_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((work_dir / "run.json").read_text())
    return document


def test_a_run_learns_and_leaves_its_files(tmp_path: Path, bench: Bench) -> None:
    result = bench.train(point_config(tmp_path / "run", train={"epochs": 12}, optim={"lr": 3e-2}))
    assert (result.code, result.iteration) == (ExitCode.OK, 96)
    records = _read(tmp_path / "run" / "log.jsonl")
    assert [r["iter"] for r in records] == list(range(1, 97))
    assert [r["epoch"] for r in records[:9]] == [1] * 8 + [2]
    losses = [r["loss"] for r in records]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    assert records[0]["loss"] == pytest.approx(sum(v for k, v in records[0]["losses"].items() if k.startswith("loss/")))
    assert records[-1]["eta_s"] == 0
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {
        "run.json",
        "config.yaml",
        "log.txt",
        "log.jsonl",
        "events.jsonl",
        "latest",
        "epoch_12.pth",
        "ranks",
    } <= names
    assert {"epoch_10.pth", "epoch_11.pth"} <= names
    assert "epoch_9.pth" not in names
    meta = read_checkpoint(tmp_path / "run" / "latest").meta
    assert (meta["epoch"], meta["iter"], meta["config"]["name"]) == (12, 96, "points")
    run = _run_json(tmp_path / "run")
    assert (run["status"], run["iter"], run["segments"][0]["precision"]) == ("finished", 96, "fp32")
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "Epoch [1][4/8]\tlr: " in text
    assert "FP32: 100% of matmul/conv work in FP32" in text


def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path: Path, bench: Bench) -> None:
    bench.plain = True
    bench.train(point_config(tmp_path / "large", train={"batch": 4}), max_iters=2)
    large, order = bench.weights, bench.order
    bench.train(point_config(tmp_path / "small", train={"batch": 1, "accumulate": 4}), max_iters=2)
    assert list(itertools.chain(*bench.order)) == list(itertools.chain(*order))
    for name, value in large.items():
        assert torch.allclose(value, bench.weights[name], atol=1e-6), name
    records = [_read(tmp_path / name / "log.jsonl")[0] for name in ("large", "small")]
    assert records[0]["loss"] == pytest.approx(records[1]["loss"])
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-4)
    assert records[1]["samples_per_s"] == pytest.approx(4 / records[1]["iter_time_s"])


def test_gradients_are_clipped_and_the_norm_is_logged_before(tmp_path: Path, bench: Bench) -> None:
    bench.plain = True
    bench.train(point_config(tmp_path / "free", optim={"clip": None}), max_iters=1)
    bench.train(point_config(tmp_path / "clipped", optim={"clip": 1e-3}), max_iters=1)
    free, clipped = (_read(tmp_path / name / "log.jsonl")[0]["grad_norm"] for name in ("free", "clipped"))
    assert free == clipped > 0.1
    norm = torch.stack([p.grad.norm() for p in bench.models[-1].parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def _nan_from(first: int) -> Callable[[Batch, Tensor], Tensor]:
    calls = [0]

    def sabotage(_: Batch, loss: Tensor) -> Tensor:
        calls[0] += 1
        return loss * float("nan") if calls[0] >= first else loss

    return sabotage


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_endless_nan_stops_with_clean_weights(tmp_path: Path, bench: Bench, dtype: str) -> None:
    bench.sabotage = _nan_from(4)
    config = point_config(tmp_path / "run", train={"epochs": 20}, precision={"dtype": dtype})
    with pytest.raises(BevctlError, match="loss/object/loss_heatmap") as caught:
        bench.train(config)
    assert caught.value.code == ExitCode.NONFINITE
    assert "sample-" in caught.value.message
    assert "50 steps in a row, up to iteration 53" in caught.value.message
    assert all(value.isfinite().all() for value in bench.weights.values())
    assert _run_json(tmp_path / "run")["status"] == "nonfinite"
    records = _read(tmp_path / "run" / "log.jsonl")
    assert records[52]["skipped_steps"] == 50
    assert records[3]["loss"] is None


def test_a_collapsing_loss_scale_stops_an_fp16_run(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _nan_from(1)
    config = point_config(tmp_path / "run", train={"epochs": 20}, precision={"dtype": "fp16", "init_scale": 16.0})
    with pytest.raises(BevctlError, match=r"up to iteration 6 \(loss scale 0\.5\)") as caught:
        bench.train(config)
    assert caught.value.code == ExitCode.NONFINITE
    scales = [r["loss_scale"] for r in _read(tmp_path / "run" / "log.jsonl")]
    assert scales[:6] == [16, 8, 4, 2, 1, 0.5]


def test_single_bad_steps_are_skipped_and_told(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = lambda batch, loss: loss * float("inf") if "sample-3" in batch.tokens else loss
    bench.train(point_config(tmp_path / "run"))
    events = [e for e in _read(tmp_path / "run" / "events.jsonl") if e["kind"] == "nonfinite"]
    assert len(events) == 2
    told = events[0]["data"]
    assert "sample-3" in told["tokens"]
    assert (told["class"], told["phase"], told["task"]) == ("forward", "forward", "object")
    assert told["losses"] == ["loss/object/loss_heatmap"]
    assert "loss/object/loss_heatmap" in events[0]["message"]


def test_unreadable_samples_are_counted_and_end_the_run(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PointData, "unreadable", frozenset({1, 2}))
    assert bench.train(point_config(tmp_path / "few")).code == ExitCode.OK
    monkeypatch.setattr(PointData, "unreadable", frozenset({1, 2, 5}))
    with pytest.raises(BevctlError, match="3 unreadable samples in epoch 1") as caught:
        bench.train(point_config(tmp_path / "many"))
    assert caught.value.code == ExitCode.RUN_FAILED
    assert "samples/LIDAR_TOP/5.bin" in caught.value.message
    events = [e["message"] for e in _read(tmp_path / "many" / "events.jsonl") if e["kind"] == "bad_sample"]
    assert len(events) == 3


@pytest.mark.parametrize("at", [3, 8])
def test_a_signal_finishes_the_step_and_resumes_exactly(tmp_path: Path, bench: Bench, at: int) -> None:
    bench.train(point_config(tmp_path / "straight"))
    weights = bench.weights
    calls = [0]

    def interrupt(_: Batch, loss: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    bench.sabotage = interrupt
    config = point_config(tmp_path / "run")
    result = bench.train(config)
    assert (result.code, result.iteration) == (ExitCode.PREEMPTED, at)
    assert _run_json(tmp_path / "run")["status"] == "preempted"
    assert len(_read(tmp_path / "run" / "log.jsonl")) == at
    bench.sabotage = None
    bench.train(config, resume="auto")
    assert all(torch.equal(value, bench.weights[name]) for name, value in weights.items())


def test_a_signal_while_waiting_for_data_saves_the_steps_done(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = PointData.__getitem__
    loaded: list[int] = []

    def slow(self: PointData, index: tuple[int, int]) -> Any:
        loaded.append(index[1])
        if len(loaded) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the wait was not left")
        return load(self, index)

    monkeypatch.setattr(PointData, "__getitem__", slow)
    result = bench.train(point_config(tmp_path / "run"))
    assert (result.code, result.iteration) == (ExitCode.PREEMPTED, 2)
    assert (tmp_path / "run" / "iter_2.pth").exists()


def test_checkpoints_inside_an_epoch(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "run", train={"checkpoint_interval": 3, "keep": 9}))
    names = {p.name for p in (tmp_path / "run").glob("*.pth")}
    assert names == {"iter_3.pth", "iter_6.pth", "epoch_1.pth", "iter_11.pth", "iter_14.pth", "epoch_2.pth"}


def test_evaluates_on_its_cadence_and_keeps_the_best(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.3, 0.2])
    monkeypatch.setattr(engine_run, "_evaluate", lambda *_: ({"mIoU": next(scores)}, {"samples": 4}))
    bench.train(point_config(tmp_path / "run", train={"epochs": 6, "eval_interval": 2, "keep": 1}))
    assert [json.loads(p.read_text())["epoch"] for p in sorted((tmp_path / "run" / "eval").iterdir())] == [2, 4, 6]
    assert _run_json(tmp_path / "run")["best"] == {"metric": "mIoU", "value": 0.3, "epoch": 4}
    assert read_checkpoint(tmp_path / "run" / "best.pth").epoch == 4
    assert {p.name for p in (tmp_path / "run").glob("*.pth")} == {"epoch_6.pth", "best.pth"}


def test_a_work_dir_in_use_is_refused(tmp_path: Path, bench: Bench) -> None:
    config = point_config(tmp_path / "run")
    bench.train(config, max_iters=1)
    with pytest.raises(BevctlError, match="is not empty") as caught:
        bench.train(config)
    assert "--resume auto" in caught.value.hint
    with pytest.raises(BevctlError, match=r"no checkpoint epoch_7\.pth"):
        bench.train(config, resume="epoch_7.pth")


def test_the_schedule_can_be_given_in_iterations(tmp_path: Path, bench: Bench) -> None:
    result = bench.train(point_config(tmp_path / "run", train={"schedule_iters": 11}, optim={"warmup": 0}))
    assert result.iteration == 11
    rates = [r["lr"] for r in _read(tmp_path / "run" / "log.jsonl")]
    assert rates[0] == pytest.approx(1e-2)
    assert rates[-1] < 3e-4


def test_more_accumulation_than_data_is_an_error(tmp_path: Path, bench: Bench) -> None:
    with pytest.raises(BevctlError, match=r"fewer than train\.accumulate"):
        bench.train(point_config(tmp_path / "run", train={"accumulate": 9}))
    assert not (tmp_path / "run").exists()


def test_deterministic_algorithms_only_during_the_run(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "run", train={"deterministic": True}), max_iters=1)
    assert not torch.are_deterministic_algorithms_enabled()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_an_epoch_and_lines_above_it(tmp_path: Path, bench: Bench) -> None:
    screen = _Terminal()
    bench.console = Console(io.StringIO(), screen)
    bench.train(point_config(tmp_path / "run"))
    shown = screen.getvalue()
    assert "epoch 1" in shown
    assert "epoch 2" in shown
    assert "8/8" in shown
    assert "Epoch [2][8/8]" in shown
    assert "Finished (iteration 16)" in shown


def test_a_rank_says_what_it_is_at(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    turn_to = Heartbeat.turn_to

    def note(heartbeat: Heartbeat, doing: Doing, iteration: int) -> None:
        told.append((doing.value, iteration))
        turn_to(heartbeat, doing, iteration)

    monkeypatch.setattr(Heartbeat, "turn_to", note)
    work_dir = tmp_path / "run"
    bench.train(point_config(work_dir, train={"checkpoint_interval": 7}), max_iters=8)
    step = ("waits for data", 2), ("computes gradients", 2), ("waits for the device", 1), ("updates the weights", 2)
    assert tuple(told[5:9]) == step
    saved = ("updates the weights", 7), ("waits for the device", 7), ("saves a checkpoint", 7), ("waits for data", 8)
    assert tuple(told[told.index(saved[0]) :][:4]) == saved
    last = [("saves a checkpoint", 8), ("evaluates", 8), ("saves a checkpoint", 8), ("left the training", 8)]
    assert told[-4:] == last
    (beat,) = read_beats(work_dir, _run_json(work_dir))
    assert (beat.rank, beat.pid, beat.turn, beat.iteration) == (0, os.getpid(), len(told), 8)
    bench.train(point_config(work_dir), resume="auto", max_iters=9)
    assert [beat.iteration for beat in read_beats(work_dir, _run_json(work_dir))] == [9]
    assert not [e for e in _read(work_dir / "events.jsonl") if e["kind"] == "heartbeat"]


def test_training_goes_on_where_no_heartbeat_can_be_written(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bevctl.runs.heartbeat.os.pwrite", full)
    assert bench.train(point_config(tmp_path / "run")).code == ExitCode.OK
    (warning,) = [e["message"] for e in _read(tmp_path / "run" / "events.jsonl") if e["kind"] == "heartbeat"]
    assert "No space left on device" in warning
