"""2N steps against N steps, a new process's worth of objects, and N more: equal bit for bit on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import CameraConfig, Config
from bevctl.engine import parts as engine_parts
from bevctl.engine import run as engine_run
from bevctl.engine.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from bevctl.engine.resume import foreign_parameter_states
from bevctl.errors import BevctlError, ExitCode
from bevctl.runs.writer import read_run
from tests.models.nano import with_value

from .fakes import Bench, point_config

FP16 = {"dtype": "fp16", "init_scale": 256.0, "growth_interval": 3}


def _overflow_once(batch: Batch, loss: Tensor) -> Tensor:
    """The loss, but infinite for the batches that hold sample 3."""
    return loss * float("inf") if "sample-3" in batch.tokens else loss


@pytest.mark.parametrize(
    ("at", "sections"),
    [
        pytest.param(8, {}, id="epoch-boundary"),
        pytest.param(5, {}, id="mid-epoch"),
        pytest.param(3, {"train": {"accumulate": 2, "ema": 0.9}}, id="accumulation-and-average"),
        pytest.param(6, {"precision": FP16}, id="fp16-with-skipped-steps"),
        pytest.param(7, {"precision": {"dtype": "bf16"}}, id="bf16"),
        pytest.param(5, {"optim": {"schedule": "cyclic", "warmup": 0, "cyclic_momentum": True}}, id="cyclic"),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, bench: Bench, at: int, sections: dict[str, Any]) -> None:
    if sections.get("precision") == FP16:
        bench.sabotage = _overflow_once
    straight = bench.train(point_config(tmp_path / "straight", **sections))
    weights, order = bench.weights, bench.order

    config = point_config(tmp_path / "parts", **sections)
    first = bench.train(config, max_iters=at)
    assert (first.code, first.iteration) == (ExitCode.OK, at)
    seen = bench.order
    torch.rand(7)  # whatever else the process does in between
    second = bench.train(config, resume="auto")
    assert second.iteration == straight.iteration
    assert seen + bench.order == order
    for name, value in weights.items():
        assert torch.equal(value, bench.weights[name]), name
    ends = [read_checkpoint(r.checkpoint).content for r in (straight, second) if r.checkpoint]
    assert _same(ends[0]["optimizer"], ends[1]["optimizer"])
    assert _same(ends[0]["ema"], ends[1]["ema"])
    assert _same(ends[0]["scaler"], ends[1]["scaler"])
    assert _same(ends[0]["rng"], ends[1]["rng"])
    if bench.sabotage is not None:
        assert ends[1]["meta"]["skipped_steps"] == 2
        assert ends[1]["scaler"]["scale"] != 256.0
    losses = [_column(tmp_path / name / "log.jsonl", "loss") for name in ("straight", "parts")]
    assert losses[0] == losses[1]


def _column(log: Path, key: str) -> list[Any]:
    return [json.loads(line)[key] for line in log.read_text().splitlines()]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _events(work_dir: Path, kind: str) -> list[str]:
    events = [json.loads(line) for line in (work_dir / "events.jsonl").read_text().splitlines()]
    return [event["message"] for event in events if event["kind"] == kind]


def test_fp32_batch_1_continues_in_fp16_at_batch_4(tmp_path: Path, bench: Bench) -> None:
    config = point_config(tmp_path / "run", train={"batch": 1, "epochs": 3}, optim={"warmup": 0})
    bench.train(config, max_iters=20)
    trained = bench.weights
    changed = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, batch=4),
        precision=dataclasses.replace(config.precision, dtype="fp16"),
    )
    result = bench.train(changed, resume="auto")
    said = _events(tmp_path / "run", "resume")
    assert result.iteration == 3 * 4
    assert "Setting changed: precision fp32 -> fp16, batch 1 -> 4, iters per epoch 16 -> 4" in said
    assert any("Epoch kept: 1 completed, iteration = 1 x 4 = 4" in line for line in said)
    assert "The 4 iterations already done of epoch 2 are done again" in said
    assert "Optimizer state: restored for all 6 parameters" in said
    assert "Loss scale: fresh at 65536, the file has none" in said
    assert not all(torch.equal(v, bench.weights[k]) for k, v in trained.items())
    rates = _column(tmp_path / "run" / "log.jsonl", "lr")
    assert rates[20] == pytest.approx(rates[16]), "iteration 4 of 12 has the rate of iteration 16 of 48"
    segments = json.loads((tmp_path / "run" / "run.json").read_text())["segments"]
    assert [(s["precision"], s["batch"], s["iter"]) for s in segments] == [("fp32", 1, 0), ("fp16", 4, 4)]


def test_falling_back_to_fp32_in_the_same_folder(tmp_path: Path, bench: Bench) -> None:
    config = point_config(tmp_path / "run", precision=FP16)
    bench.train(config, max_iters=8)
    fallback = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype="fp32"))
    result = bench.train(fallback, resume="auto")
    assert (result.code, result.iteration) == (ExitCode.OK, 16)
    assert "Setting changed: precision fp16 -> fp32" in _events(tmp_path / "run", "resume")


def _foreign(path: Path, model: nn.Module, one_group: bool, **meta: Any) -> Checkpoint:
    """epoch_1.pth as mmcv's runner writes it after four steps of AdamW; frozen geometry is numbered, without state."""
    optimizer = torch.optim.AdamW(
        model.parameters() if one_group else [{"params": [p]} for p in model.parameters()], lr=1e-3
    )
    for _ in range(4):
        optimizer.zero_grad()
        sum(p.square().sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
    content = {
        "meta": {"epoch": 1, "iter": 1000, "mmcv_version": "1.4.0", "time": "Mon", **meta},
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, path)
    return read_checkpoint(path)


class _Geometric(nn.Module):
    """Geometry stored as frozen parameters, as mit-bevfusion does, before, between and after trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fuser = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
        self.fuser.register_parameter("dx", nn.Parameter(torch.ones(3), requires_grad=False))
        self.fuser.register_parameter("nx", nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False))
        self.heads = nn.ModuleDict({"map": nn.Linear(3, 2)})


@pytest.mark.parametrize("one_group", [True, False])
def test_foreign_optimizer_state_is_mapped_past_frozen_geometry(tmp_path: Path, one_group: bool) -> None:
    model = _Geometric()
    checkpoint = _foreign(tmp_path / "epoch_1.pth", model, one_group)
    states = foreign_parameter_states(checkpoint)
    assert set(states) == {n for n, p in model.named_parameters() if p.requires_grad}
    numbers = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    for name, state in states.items():
        original = checkpoint.content["optimizer"]["state"][numbers[name]]
        assert state["step"].item() == 4
        assert torch.equal(state["exp_avg"], original["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], original["exp_avg_sq"])


def test_optimizer_state_that_does_not_fit_its_weights_is_dropped(tmp_path: Path) -> None:
    checkpoint = _foreign(tmp_path / "epoch_1.pth", _Geometric(), one_group=True)
    checkpoint.content["optimizer"]["param_groups"][0]["params"].pop()
    assert foreign_parameter_states(checkpoint) == {}


def _point_names(bench: Bench, config: Config) -> nn.Module:
    bench.train(dataclasses.replace(config, work_dir=config.work_dir + "-model"), max_iters=0)  # type: ignore[operator]
    return bench.models[-1]


@pytest.mark.parametrize("scaler", [None, {"scale": 512.0, "_growth_tracker": 5}])
def test_an_mmcv_checkpoint_continues_in_fp16(tmp_path: Path, bench: Bench, scaler: dict[str, Any] | None) -> None:
    config = point_config(tmp_path / "run", precision=FP16, optim={"warmup": 0})
    fp16 = {"fp16": {"loss_scaler": scaler}} if scaler else {}
    _foreign(tmp_path / "epoch_1.pth", _point_names(bench, config), one_group=True, **fp16)
    result = bench.train(config, resume=str(tmp_path / "epoch_1.pth"), max_iters=9)
    said = _events(tmp_path / "run", "resume")
    assert result.iteration == 9
    assert "Setting changed: written by mmcv" in said
    assert any("Epoch kept: 1 completed, iteration = 1 x 8 = 8" in line for line in said)
    assert "Optimizer state: restored for all 6 parameters" in said
    assert ("Loss scale: restored at 512" if scaler else "Loss scale: fresh at 256, the file has none") in said
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert (record["epoch"], record["iter"]) == (2, 9)
    assert record["loss_scale"] == (512 if scaler else 256)


def test_load_from_takes_weights_alone(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "first"), max_iters=8)
    trained = bench.weights
    config = with_value(point_config(tmp_path / "second"), "model.load_from", (str(tmp_path / "first" / "latest"),))
    result = bench.train(config, max_iters=0)
    assert result.iteration == 0
    assert all(torch.equal(value, bench.weights[name]) for name, value in trained.items())
    assert "Weights from" in _events(tmp_path / "second", "resume")[0]


def test_a_fresh_run_starts_from_the_pretrained_image_backbone(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "first"), max_iters=8)
    trained = bench.weights
    camera = CameraConfig(pretrained=str(tmp_path / "first" / "latest"))
    config = point_config(tmp_path / "second", model={"camera": camera})
    bench.train(config, max_iters=0)
    assert all(torch.equal(value, bench.weights[name]) for name, value in trained.items())
    bench.train(dataclasses.replace(config, seed=7), resume="auto", max_iters=3)
    assert "Weights from" not in _events(tmp_path / "second", "resume")[-1]


def test_auto_passes_over_a_damaged_checkpoint(tmp_path: Path, bench: Bench) -> None:
    config = point_config(tmp_path / "run")
    bench.train(config, max_iters=8)
    newest = tmp_path / "run" / "iter_9.pth"
    newest.write_bytes((tmp_path / "run" / "epoch_1.pth").read_bytes()[:-100])
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to(newest.name)
    assert bench.train(config, resume="auto", max_iters=10).iteration == 10
    with pytest.raises(BevctlError, match=r"iter_9\.pth is not a readable checkpoint"):
        bench.train(config, resume="iter_9.pth")


def test_auto_without_a_checkpoint_starts_anew_and_says_so(tmp_path: Path, bench: Bench, console: Any) -> None:
    assert bench.train(point_config(tmp_path / "run"), resume="auto", max_iters=1).iteration == 1
    assert "no checkpoint in" in console.stderr.getvalue()


def test_a_longer_max_iters_continues_and_a_done_run_says_so(tmp_path: Path, bench: Bench) -> None:
    config = point_config(tmp_path / "run")
    for limit in (2, 5, 16, 16):
        assert bench.train(config, resume="auto", max_iters=limit).iteration == limit
    assert (tmp_path / "run" / "iter_16.pth").exists()
    assert _events(tmp_path / "run", "end")[-1] == "Nothing left to train: iteration 16 of 16 is done"
    assert read_run(tmp_path / "run")["status"] == "finished"
    straight = bench.train(point_config(tmp_path / "straight"))
    assert straight.checkpoint is not None
    ends = [read_checkpoint(path).state_dict for path in (straight.checkpoint, tmp_path / "run" / "latest")]
    assert _same(*ends)


def test_an_evaluation_in_between_changes_nothing(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scores:
        def metrics(self) -> dict[str, float]:
            return {"mIoU": 0.5}

        def document(self) -> dict[str, Any]:
            return {}

    def evaluate(*_: Any, **__: Any) -> Scores:
        torch.rand(5)
        return Scores()

    monkeypatch.setattr(engine_run, "evaluate_split", evaluate)
    bench.train(point_config(tmp_path / "plain"))
    plain = bench.weights
    bench.train(point_config(tmp_path / "evaluated", train={"eval_interval": 1, "ema": 0.5}))
    assert all(torch.equal(value, bench.weights[name]) for name, value in plain.items())


def test_a_signal_before_the_first_step_leaves_the_users_file_alone(tmp_path: Path, bench: Bench) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = point_config(run)
    _foreign(run / "epoch_1.pth", _point_names(bench, config), one_group=True)
    before = (run / "epoch_1.pth").read_bytes()

    def interrupt_loading(epoch: int, start: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError((epoch, start))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_parts.Parts, "loader", lambda _, epoch, start: interrupt_loading(epoch, start))
        result = bench.train(config, resume="epoch_1.pth")
    assert (result.code, result.iteration, result.checkpoint) == (ExitCode.PREEMPTED, 8, run / "epoch_1.pth")
    assert (run / "epoch_1.pth").read_bytes() == before


def test_a_model_with_new_entries_continues_by_epoch(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "run"), max_iters=11)
    content = read_checkpoint(tmp_path / "run" / "iter_11.pth").content
    del content["state_dict"]["head.bias"]
    write_checkpoint(tmp_path / "run" / "iter_11.pth", content)
    with pytest.raises(BevctlError, match=r"Only 88\.8 % of this model's entries"):
        bench.train(point_config(tmp_path / "run"), resume="auto", max_iters=12)
    result = bench.train(point_config(tmp_path / "run"), resume="auto", max_iters=9, min_loaded=0.5)
    assert result.iteration == 9
    notes = _events(tmp_path / "run", "resume")
    assert any("Setting changed: 1 entries of the model new" in note for note in notes)
