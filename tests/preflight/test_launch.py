"""Checks of how the processes meet, and of batch, learning rate, loss scale and resume."""

from __future__ import annotations

import dataclasses
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.config.foreign import read_foreign
from bevctl.errors import BevctlError
from bevctl.finding import CheckStatus
from bevctl.preflight import all_reduce, launch
from bevctl.preflight.checks import Context, Outcome
from tests.engine.bad_checkpoints import mmcv, save

from .conftest import MakeContext


def judge(context: Context, id: str) -> Outcome:
    (spec,) = [spec for spec in launch.CHECKS if spec.id == id]
    return spec.function(context)


def foreign(tmp_path: Path, context: Context, text: str, **changes: Any) -> Context:
    path = tmp_path / "det_8xb4-cyclic-20e_nus.py"
    path.write_text(text)
    return dataclasses.replace(context, config=None, foreign=read_foreign(path), **changes)


@pytest.fixture(autouse=True)
def _no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "PORT"):
        monkeypatch.delenv(name, raising=False)


# LAUNCH001


def test_a_port_that_is_free_or_taken(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(make_context(gpus=8), "LAUNCH001").status == CheckStatus.SKIP
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
        outcome = judge(make_context(), "LAUNCH001")
        assert outcome.status == CheckStatus.FAIL
        assert "in use" in outcome.found
    assert judge(make_context(), "LAUNCH001").status == CheckStatus.PASS


@pytest.mark.parametrize(
    ("environment", "gpus", "wanted"),
    [
        ({}, 8, ("", 29500)),
        ({}, 1, None),
        ({"PORT": "28500"}, 1, ("", 28500)),
        ({"MASTER_PORT": "1234", "MASTER_ADDR": "localhost"}, 1, ("", 1234)),
        ({"MASTER_PORT": "1234", "MASTER_ADDR": "node-1.example"}, 8, None),
        ({"MASTER_PORT": "no number"}, 8, ("", 29500)),
    ],
)
def test_which_port_another_project_uses(
    tmp_path: Path, make_context: MakeContext, environment: dict[str, str], gpus: int, wanted: tuple[str, int] | None
) -> None:
    context = foreign(tmp_path, make_context(gpus=gpus), "data = dict()\n")
    assert launch._port(context, environment) == wanted


def test_a_port_that_does_not_exist(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "99999")
    assert judge(make_context(), "LAUNCH001").status == CheckStatus.FAIL


# LAUNCH002


def test_names_resolve(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert judge(make_context(), "LAUNCH002").status == CheckStatus.PASS
    for name in ("no-such-host.invalid", "a" * 300, "é" * 80):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        outcome = judge(make_context(), "LAUNCH002")
        assert outcome.status == CheckStatus.FAIL
        assert name in outcome.found


# LAUNCH003


@pytest.mark.slow
def test_two_ranks_agree(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "parameters", lambda _: 1000)
    outcome = judge(make_context("device=cpu", deep=True), "LAUNCH003")
    assert outcome.status == CheckStatus.PASS, outcome.found
    assert "2 ranks, gloo" in outcome.found


def test_ranks_that_fail_or_hang(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "parameters", lambda _: 1000)

    def fails(*_: object) -> None:
        raise BevctlError("rank 1 failed: connection refused")

    def hangs(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(all_reduce, "run", fails)
    assert judge(make_context("device=cpu"), "LAUNCH003").status == CheckStatus.FAIL
    monkeypatch.setattr(all_reduce, "run", hangs)
    assert judge(make_context("device=cpu"), "LAUNCH003").status == CheckStatus.UNKNOWN
    assert judge(make_context("device=cpu", python="/usr/bin/python3"), "LAUNCH003").status == CheckStatus.SKIP


def test_a_rank_that_dies_and_one_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "rank"
    program.write_text("#!/bin/sh\n[ $RANK = 0 ] && exec sleep 60\necho 'ValueError: no route' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(all_reduce.sys, "executable", str(program))
    with pytest.raises(BevctlError, match="rank 1 failed: ValueError: no route"):
        all_reduce.run("gloo", 2, 4, 30.0)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(TimeoutError):
        all_reduce.run("gloo", 2, 4, 0.2)


# LAUNCH004


@pytest.mark.parametrize(
    ("lr", "batch", "status"),
    [
        (2e-4, 32, "pass"),
        (5e-5, 8, "pass"),  # linear
        (1e-4, 8, "pass"),  # square root
        (7e-5, 8, "pass"),  # in between
        (2e-4, 8, "warn"),
        (1e-5, 8, "warn"),
        (4e-4, 64, "pass"),
        (2e-3, 64, "warn"),
    ],
)
def test_learning_rates(make_context: MakeContext, lr: float, batch: int, status: str) -> None:
    sets = (f"optim.lr={lr}", "optim.base_lr=2e-4", "optim.base_batch=32", f"train.batch={batch}")
    outcome = judge(make_context(*sets), "LAUNCH004")
    assert outcome.status == status
    assert "linear rule gives" in outcome.found
    assert "square-root rule" in outcome.found


def test_gpus_and_accumulation_count(make_context: MakeContext) -> None:
    sets = ("optim.lr=2e-4", "optim.base_lr=2e-4", "optim.base_batch=32", "train.batch=2", "train.accumulate=2")
    assert "global batch 32" in judge(make_context(*sets, gpus=8), "LAUNCH004").found


def test_without_a_base_there_is_no_rule(make_context: MakeContext) -> None:
    assert judge(make_context("optim.base_lr=null", "optim.base_batch=null"), "LAUNCH004").status == CheckStatus.SKIP


def test_a_rule_that_is_switched_on(make_context: MakeContext) -> None:
    sets = ("optim.base_lr=2e-4", "optim.base_batch=32", "train.batch=8", "optim.lr_scaling=sqrt", "optim.lr=1")
    outcome = judge(make_context(*sets), "LAUNCH004")
    assert outcome.status == CheckStatus.PASS
    assert "learning rate 0.0001: sqrt rule" in outcome.found


@pytest.mark.parametrize(("batch", "status"), [(4, "pass"), (1, "warn")])
def test_the_base_in_the_name_of_an_mm_config(
    tmp_path: Path, make_context: MakeContext, batch: int, status: str
) -> None:
    text = "train_dataloader = dict(batch_size=4)\noptim_wrapper = dict(optimizer=dict(lr=1e-4))\n"
    context = foreign(tmp_path, make_context(), text, batch=batch, gpus=8)
    outcome = judge(context, "LAUNCH004")
    assert outcome.status == status
    assert "at batch 32" in outcome.found


# LAUNCH005


@pytest.mark.parametrize(
    ("scale", "status"),
    [("dynamic", "pass"), ("512", "pass"), ("128", "pass"), ("16", "warn"), ("65536", "warn"), ("1e30", "fail")],
)
def test_loss_scales(make_context: MakeContext, scale: str, status: str) -> None:
    outcome = judge(make_context("precision.dtype=fp16", f"precision.loss_scale={scale}"), "LAUNCH005")
    assert outcome.status == status
    assert judge(make_context("precision.dtype=bf16"), "LAUNCH005").status == CheckStatus.SKIP


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("fp16 = dict(loss_scale=512.)", "pass", "does not adapt"),
        ("fp16 = dict(loss_scale='dynamic')", "pass", "dynamic"),
        ("fp16 = dict(loss_scale=0.)", "fail", "fixed at 0"),
        ("fp16 = None", "skip", "no FP16"),
    ],
)
def test_loss_scales_of_mmcv(tmp_path: Path, make_context: MakeContext, text: str, status: str, words: str) -> None:
    outcome = judge(foreign(tmp_path, make_context(), "data = dict()\n" + text), "LAUNCH005")
    assert outcome.status == status
    assert words in outcome.found


# LAUNCH006


def resumed(tmp_path: Path, make_context: MakeContext, content: dict[str, Any], *sets: str) -> Context:
    return make_context(*sets, resume=str(save(content, tmp_path / "x.pth")))


@pytest.mark.parametrize(("epochs", "status"), [(8, "pass"), (1, "warn")])
def test_epochs_that_are_left(tmp_path: Path, make_context: MakeContext, epochs: int, status: str) -> None:
    content = mmcv(optimizer={"state": {}, "param_groups": []})
    outcome = judge(resumed(tmp_path, make_context, content, f"train.epochs={epochs}"), "LAUNCH006")
    assert outcome.status == status
    assert f"1 of {epochs} epochs done" in outcome.found


SCHEDULE = (
    "train.epochs=4",
    "optim.lr=2e-4",
    "optim.schedule=cosine",
    "optim.min_ratio=0",
    "train.schedule_iters=null",
    "optim.warmup=40",
    "optim.warmup_ratio=0.25",
)


@pytest.mark.parametrize(("lr", "status"), [(1.5e-4, "pass"), (2e-6, "warn")])
def test_a_learning_rate_that_goes_on_or_jumps(
    tmp_path: Path, make_context: MakeContext, lr: float, status: str
) -> None:
    content = mmcv(optimizer={"state": {}, "param_groups": [{"lr": lr, "params": []}, {"lr": 0.0, "params": []}]})
    sets = SCHEDULE
    outcome = judge(resumed(tmp_path, make_context, content, *sets), "LAUNCH006")
    assert outcome.status == status
    assert "0.000171 after" in outcome.found  # a quarter of the cosine: 2e-4 * (1 + cos(pi / 4)) / 2


def test_a_checkpoint_of_the_warm_up(tmp_path: Path, make_context: MakeContext) -> None:
    meta = {"format": "bevctl", "epoch": 0, "iter": 20, "setting": {"iters_per_epoch": 100}}
    content = mmcv(meta=meta, optimizer={"state": {}, "param_groups": [{"lr": 1.2e-4, "params": []}]})
    outcome = judge(resumed(tmp_path, make_context, content, *SCHEDULE), "LAUNCH006")
    assert outcome.status == CheckStatus.PASS
    # half of the warm-up: 2e-4 * (0.25 + 0.75 / 2), times the cosine after a twentieth of the run
    assert "0.000124 after" in outcome.found


def test_what_cannot_be_compared(tmp_path: Path, make_context: MakeContext) -> None:
    assert judge(make_context(), "LAUNCH006").status == CheckStatus.SKIP
    assert judge(make_context(resume="gone.pth"), "LAUNCH006").status == CheckStatus.SKIP
    bare = {"state_dict": {"a": torch.ones(1)}, "meta": {"epoch": math.nan}}
    assert judge(resumed(tmp_path, make_context, bare), "LAUNCH006").status == CheckStatus.WARN


def test_mmcv_continues_with_the_files_initial_learning_rate(tmp_path: Path, make_context: MakeContext) -> None:
    context = resumed(tmp_path, make_context, mmcv())
    text = "data = dict()\noptimizer = dict(lr={lr})\nrunner = dict(max_epochs=6)\n"
    assert judge(foreign(tmp_path, context, text.format(lr=2e-4)), "LAUNCH006").status == CheckStatus.PASS
    context = dataclasses.replace(context, _shared={})
    outcome = judge(foreign(tmp_path, context, text.format(lr=4e-4)), "LAUNCH006")
    assert outcome.status == CheckStatus.WARN
    assert "initial learning rate is 0.0002, the config's 0.0004" in outcome.found


# LAUNCH007


@pytest.mark.parametrize(
    ("text", "gpus", "status"),
    [
        ("model = dict(head=dict(with_cp=True))", 8, "pass"),
        ("find_unused_parameters = True", 8, "pass"),
        ("model = dict(head=dict(layers=[dict(with_cp=True)]))\nfind_unused_parameters = True", 8, "fail"),
        ("model = dict(head=dict(with_cp=False))\nfind_unused_parameters = True", 8, "pass"),
        ("model = dict(head=dict(norm_cfg=dict(type='naiveSyncBN2d')))", 1, "fail"),
        ("model = dict(head=dict(norm_cfg=dict(type='naiveSyncBN2d')))", 8, "pass"),
        ("model = dict(head=dict(norm_cfg=dict(type='BN2d')))", 1, "pass"),
    ],
)
def test_settings_that_exclude_each_other(
    tmp_path: Path, make_context: MakeContext, text: str, gpus: int, status: str
) -> None:
    context = foreign(tmp_path, make_context(gpus=gpus), "data = dict()\n" + text)
    assert judge(context, "LAUNCH007").status == status
    assert judge(make_context(), "LAUNCH007").status == CheckStatus.SKIP
