"""Event files of a run, written by the package and read by bevctl's own reader."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from bevctl.engine.tensorboard import EventFiles
from bevctl.errors import BevctlError
from bevctl.runs.records import StepRecord
from bevctl.runs.source import open_source

from .fakes import Bench, point_config


def _logged(work_dir: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (work_dir / "log.jsonl").read_text().splitlines()]
    return {record["iter"]: record for record in records}


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")


@pytest.mark.usefixtures("installed")
def test_a_run_writes_a_point_with_every_text_line(tmp_path: Path, bench: Bench) -> None:
    run = tmp_path / "run"
    bench.train(point_config(run, train={"tensorboard": True}), max_iters=11)
    bench.train(point_config(run, train={"tensorboard": True}), resume="auto")
    read = open_source(run / "tensorboard").read()
    assert (read.format, [step.iter for step in read.steps]) == ("tensorboard", [4, 8, 12, 16])
    logged = _logged(run)
    for step in read.steps:
        record = logged[step.iter]
        assert step.losses == pytest.approx(record["losses"])
        assert (step.loss, step.lr) == (pytest.approx(record["loss"]), pytest.approx(record["lr"]))
        assert (step.epoch, step.grad_norm) == (record["epoch"], pytest.approx(record["grad_norm"]))
        assert step.time == pytest.approx(record["time"])
    assert open_source(run).read().format == "bevctl"


@pytest.mark.usefixtures("installed")
def test_scores_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, 0)
    files.step(StepRecord(1, 1, 1e9, loss=math.nan, losses={"loss/map/focal": math.inf}, grad_norm=1.5))
    files.evaluation({"mAP": 0.25, "NDS": 0.5}, 1)
    files.close()
    read = open_source(tmp_path).read()
    assert math.isnan(read.steps[0].loss or 0)
    assert (read.steps[0].losses, read.steps[0].grad_norm) == ({"loss/map/focal": math.inf}, 1.5)
    assert read.validations[0].metrics == {"mAP": 0.25, "NDS": 0.5}


def test_without_the_package_a_run_stops_before_it_writes(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BevctlError, match="needs the package tensorboard") as caught:
        bench.train(point_config(tmp_path / "run", train={"tensorboard": True}))
    assert caught.value.hint == "pip install 'bevctl[tensorboard]'"
    assert not (tmp_path / "run").exists()
