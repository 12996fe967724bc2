"""Checkpoints are written beside the training: with the values of their moment, one at a time, failures told."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.checkpoint_writer import CheckpointWriter
from bevctl.engine.shelf import Shelf
from bevctl.errors import BevctlError, ExitCode

from .fakes import Bench, point_config

PATIENCE_S = 20.0


def _content(device: str) -> dict[str, Any]:
    shared = torch.arange(6.0, device=device)
    return {
        "state_dict": {"weight": shared, "odd": torch.arange(3, device=device, dtype=torch.int16), "none": None},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0, device=device)}}, "groups": [{"names": ["weight"]}]},
        "empty": torch.empty(0, 4, device=device),
        "rng": [torch.arange(4, dtype=torch.uint8)],
        "meta": {"iter": 3},
    }


def _tensors(content: Mapping[str, Any]) -> list[Tensor]:
    state, optimizer = content["state_dict"], content["optimizer"]["state"][0]
    return [state["weight"], state["odd"], optimizer["step"], content["empty"], *content["rng"]]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
            ],
        ),
    ],
)
def test_what_is_written_is_what_was_there_at_the_start(device: str) -> None:
    content, expected = _content(device), _content("cpu")
    writer: CheckpointWriter[Mapping[str, Any]] = CheckpointWriter()
    changed = threading.Event()

    def write(copy: Mapping[str, Any]) -> Mapping[str, Any]:
        assert changed.wait(PATIENCE_S)
        return copy

    for _ in range(2):  # the second goes through the same page-locked memory
        content = _content(device)
        writer.start(content, write)
        content["state_dict"]["weight"].mul_(-1)
        content["optimizer"]["state"][0]["step"] += 1
        content["rng"][0].zero_()
        changed.set()
        written = writer.wait()
        assert written is not None
        assert written.keys() == expected.keys()
        assert written["optimizer"]["groups"] == expected["optimizer"]["groups"]
        assert written["state_dict"]["none"] is None
        for a, b in zip(_tensors(written), _tensors(expected), strict=True):
            assert a.device.type == "cpu"
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert writer.wait() is None


def test_a_failure_is_raised_where_it_is_waited_for() -> None:
    writer: CheckpointWriter[None] = CheckpointWriter()

    def fail(_: Mapping[str, Any]) -> None:
        raise BevctlError("full", code=ExitCode.RUN_FAILED)

    writer.start({}, fail)
    with pytest.raises(BevctlError, match="full"):
        writer.wait()
    assert writer.wait() is None
    assert not writer.has_written


class _SlowShelf:
    """Holds the first checkpoint back until the model has seen `batches` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Bench, batches: int) -> None:
        self.seen_meanwhile = 0
        put = Shelf.put

        def slow(shelf: Shelf, name: str, content: Mapping[str, Any]) -> Path:
            if name == "iter_2.pth":
                pause = threading.Event()
                for _ in range(int(PATIENCE_S / 0.01)):
                    self.seen_meanwhile = len(bench.models[-1].batches)
                    if self.seen_meanwhile >= batches:
                        break
                    pause.wait(0.01)
            return put(shelf, name, content)

        monkeypatch.setattr(Shelf, "put", slow)


def test_training_goes_on_meanwhile(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = _SlowShelf(monkeypatch, bench, batches=4)
    config = point_config(tmp_path / "slow", train={"checkpoint_interval": 2})
    bench.train(config, max_iters=4)
    assert shelf.seen_meanwhile >= 4
    monkeypatch.undo()
    weights = read_checkpoint(tmp_path / "slow" / "iter_2.pth")
    assert weights.iteration == 2
    events = [json.loads(line) for line in (tmp_path / "slow" / "events.jsonl").read_text().splitlines()]
    assert [e["data"]["iteration"] for e in events if e["kind"] == "checkpoint"] == [2, 4]
    assert events[-1]["kind"] == "end"


def test_a_late_checkpoint_holds_the_state_of_its_iteration(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        _SlowShelf(patched, bench, batches=4)
        bench.train(point_config(tmp_path / "late", train={"checkpoint_interval": 2}), max_iters=4)
    bench.train(point_config(tmp_path / "plain"), max_iters=2)
    late, plain = (read_checkpoint(tmp_path / name / "iter_2.pth").content for name in ("late", "plain"))
    torch.testing.assert_close(late["state_dict"], plain["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(late["optimizer"]["state"], plain["optimizer"]["state"], rtol=0, atol=0)
    assert torch.equal(late["rng"][0]["torch"], plain["rng"][0]["torch"])
    assert late["data"] == plain["data"]


@pytest.mark.parametrize(("max_iters", "failing"), [(6, "iter_2.pth"), (2, "iter_2.pth")])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, max_iters: int, failing: str
) -> None:
    put = Shelf.put

    def refuse(shelf: Shelf, name: str, content: Mapping[str, Any]) -> Path:
        if name == failing:
            raise BevctlError(f"Cannot write {name}: full.", code=ExitCode.RUN_FAILED)
        return put(shelf, name, content)

    monkeypatch.setattr(Shelf, "put", refuse)
    config = point_config(tmp_path / "run", train={"checkpoint_interval": 2})
    with pytest.raises(BevctlError, match="Cannot write") as caught:
        bench.train(config, max_iters=max_iters)
    assert caught.value.code == ExitCode.RUN_FAILED
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert len(bench.models[-1].batches) <= 4, "the next checkpoint is where it is found out"
