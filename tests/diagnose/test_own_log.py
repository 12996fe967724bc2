"""Runs of bevctl itself, told from their files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from torch import Tensor

from bevctl.batch import Batch
from bevctl.console import Console
from bevctl.diagnose.report import Status
from tests.engine.fakes import Bench, point_config

from .cases import ask, evidence, found, the

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, Console(io.StringIO(), io.StringIO()))


def _spoil(batch: Batch, loss: Tensor) -> Tensor:
    return loss * float("nan") if "sample-3" in batch.tokens else loss


def test_a_sample_that_is_in_every_bad_step(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _spoil
    bench.train(point_config(tmp_path / "run", train={"epochs": 4, "batch": 2}))
    answer = ask("nan", tmp_path / "run")
    assert found(answer) == {"NAN116": "warn", "NAN117": "warn"}
    finding = the(answer, "NAN116")
    assert "sample-3 was in 4 of 4 steps" in finding.title
    assert finding.fix[0].set == {"data.skip_samples": ["sample-3"]}
    told = evidence(the(answer, "NAN117"))
    assert "steps not finite: forward 4" in told
    assert "loss/object/loss_heatmap" in told
    assert any("weights, statistics, optimizer and loss scale are finite" in said for said in answer.looked_at)


def test_an_incidents_folder_stands_for_its_run(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _spoil
    bench.train(point_config(tmp_path / "run", train={"epochs": 2, "batch": 2}))
    (incident, *_) = sorted((tmp_path / "run" / "incident").iterdir())
    assert found(ask("nan", incident)) == {"NAN117": "warn"}


def test_a_healthy_run_is_clear(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "run", train={"epochs": 2}))
    for topic in ("nan", "fp16-inactive"):
        answer = ask(topic, tmp_path / "run")
        assert (answer.status, found(answer)) == (Status.CLEAR, {})
