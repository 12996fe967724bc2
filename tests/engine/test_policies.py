"""Policies for steps that are not finite, in whole small runs."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.batch import Batch
from bevctl.engine import parts as engine_parts
from bevctl.engine import run as engine_run
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.incident import find_incidents
from bevctl.errors import BevctlError, ExitCode
from bevctl.monitor.report import Circumstances, report_on
from bevctl.runs.source import open_source

from .fakes import Bench, OverflowingNet, PointNet, point_config


def _events(work_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (work_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def _log(work_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work_dir / "log.jsonl").read_text().splitlines()]


def _infinite_with_sample_3(batch: Batch, loss: Tensor) -> Tensor:
    return loss * float("inf") if "sample-3" in batch.tokens else loss


def _status(work_dir: Path) -> str:
    status: str = json.loads((work_dir / "run.json").read_text())["status"]
    return status


def test_halt_ends_with_code_5_and_clean_weights(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    with pytest.raises(BevctlError, match=r"train\.on_nonfinite is halt") as caught:
        bench.train(point_config(tmp_path / "run", train={"on_nonfinite": "halt"}))
    assert caught.value.code == ExitCode.NONFINITE
    assert _status(tmp_path / "run") == "nonfinite"
    assert len(find_incidents(tmp_path / "run")) == 1
    assert all(value.isfinite().all() for value in bench.weights.values())
    assert not list((tmp_path / "run").glob("*.pth"))


@pytest.mark.parametrize("dynamic", [True, False])
def test_lower_scale_stays_below_what_overflowed_and_survives_a_resume(
    tmp_path: Path, bench: Bench, dynamic: bool
) -> None:
    precision = {"dtype": "fp16", "loss_scale": "dynamic" if dynamic else 256.0}
    precision |= {"init_scale": 256.0, "growth_interval": 3}
    bench.sabotage = _infinite_with_sample_3
    config = point_config(
        tmp_path / "run", train={"on_nonfinite": "lower_scale", "checkpoint_interval": 1}, precision=precision
    )
    bench.train(config, max_iters=12)
    bench.sabotage = None
    bench.train(config, resume="auto")
    records = _log(tmp_path / "run")
    (overflow,) = [r for r in records[:8] if r["skipped_steps"] == 1 and r["grad_norm"] is None]
    limit = overflow["loss_scale"] / 2
    assert {r["loss_scale"] for r in records[overflow["iter"] :]} <= {limit, limit / 2}
    assert records[-1]["loss_scale"] == (limit if len(_events(tmp_path / "run", "lower_scale")) == 1 else limit / 2)
    message = _events(tmp_path / "run", "lower_scale")[0]["message"]
    assert message == f"The loss scale stays at {limit:g} or below from here on"


def test_lower_scale_without_a_scale_only_skips(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    result = bench.train(point_config(tmp_path / "run", train={"on_nonfinite": "lower_scale"}))
    assert result.code == ExitCode.OK
    assert not _events(tmp_path / "run", "lower_scale")
    assert len(_events(tmp_path / "run", "nonfinite")) == 2


class _Poisoned:
    """Every loss is NaN from the `first`-th iteration of the run until the run has been rewound."""

    def __init__(self, work_dir: Path, first: int, cured_by: int = 1) -> None:
        self.work_dir, self.first, self.cured_by = work_dir, first, cured_by
        self.calls = 0

    def __call__(self, _: Batch, loss: Tensor) -> Tensor:
        self.calls += 1
        cured = len(_events(self.work_dir, "rewind")) >= self.cured_by
        return loss if self.calls < self.first or cured else loss * float("nan")


def _rewinding(work_dir: Path, **train: Any) -> Any:
    settings = {"on_nonfinite": "rewind", "nonfinite_in_a_row": 3, "checkpoint_interval": 2, "keep": 9, "incidents": 0}
    return point_config(work_dir, train={**settings, **train})


def test_rewind_goes_on_from_the_last_checkpoint_in_another_order(tmp_path: Path, bench: Bench) -> None:
    bench.train(point_config(tmp_path / "straight"))
    usual = bench.order
    bench.sabotage = _Poisoned(tmp_path / "run", first=4)
    result = bench.train(_rewinding(tmp_path / "run"))
    assert (result.code, result.iteration) == (ExitCode.OK, 16)
    (event,) = _events(tmp_path / "run", "rewind")
    assert event["data"]["iteration"] == 2, "iterations 4, 5 and 6 were not finite; iter_4.pth is from among them"
    seen = bench.order
    assert seen[:6] == usual[:6]
    rest, usual_rest = seen[6:12], usual[2:8]
    assert rest != usual_rest
    assert sorted(chain(*rest)) == sorted(chain(*usual_rest)), "the rest of the epoch, each sample once"
    assert seen[12:] == usual[8:], "the next epoch is as ever"
    assert [r["iter"] for r in _log(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, *range(3, 17)]
    assert _log(tmp_path / "run")[-1]["skipped_steps"] == 3


def test_a_rewound_run_is_read_as_one_that_was_resumed(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _Poisoned(tmp_path / "run", first=4)
    bench.train(_rewinding(tmp_path / "run"))
    log = open_source(tmp_path / "run").read()
    assert [step.iter for step in log.steps] == list(range(1, 17))
    assert [(segment.reason, segment.first_iter) for segment in log.segments] == [("start", 1), ("resume", 3)]
    assert all(step.loss is not None and math.isfinite(step.loss) for step in log.steps), "the later records win"


def test_the_monitor_names_the_bundle(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    bench.train(point_config(tmp_path / "run", train={"epochs": 40}))
    report = report_on(open_source(tmp_path / "run").read(), Circumstances(now=time.time()))
    (alarm,) = [alarm for alarm in report.alarms if alarm.id.startswith("NAN")]
    told = [item for item in alarm.evidence if "bevctl diagnose nan --replay" in item.what]
    assert len(told) == 1
    assert "sample-3" in told[0].what
    assert told[0].where.startswith("events.jsonl:")


def test_a_run_resumed_after_a_rewind_keeps_the_new_order(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _Poisoned(tmp_path / "straight", first=4)
    bench.train(_rewinding(tmp_path / "straight"))
    weights, order = bench.weights, bench.order
    bench.sabotage = _Poisoned(tmp_path / "parts", first=4)
    config = _rewinding(tmp_path / "parts")
    bench.train(config, max_iters=6)
    seen = bench.order
    bench.sabotage = None
    bench.train(config, resume="auto")
    assert seen + bench.order == order
    assert all(torch.equal(value, bench.weights[name]) for name, value in weights.items())


def test_rewinds_differ_and_are_capped(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _Poisoned(tmp_path / "run", first=3, cured_by=9)
    with pytest.raises(BevctlError, match="rewound 2 times") as caught:
        bench.train(_rewinding(tmp_path / "run", rewinds=2))
    assert caught.value.code == ExitCode.NONFINITE
    events = _events(tmp_path / "run", "rewind")
    assert [event["data"]["iteration"] for event in events] == [2, 2]
    assert bench.order[6:9] != bench.order[10:13]


def test_a_rewind_needs_a_checkpoint(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _Poisoned(tmp_path / "run", first=1)
    with pytest.raises(
        BevctlError, match="since iteration 1, the budget is used up, and there is no checkpoint from before"
    ) as caught:
        bench.train(_rewinding(tmp_path / "run", checkpoint_interval=None))
    assert caught.value.code == ExitCode.NONFINITE


def test_a_budget_per_thousand_ends_a_run_that_recovers_each_time(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    with pytest.raises(BevctlError, match=r"3 of the last 2\d steps were not finite"):
        bench.train(point_config(tmp_path / "run", train={"epochs": 9, "nonfinite_per_thousand": 2}))


def test_the_module_that_overflows_is_kept_in_fp32_from_there_on(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_parts, "build_model", lambda _: OverflowingNet())
    precision = {"dtype": "fp16", "init_scale": 1.0, "growth_interval": 100}
    config = point_config(tmp_path / "run", train={"on_nonfinite": "fp32_module", "epochs": 4}, precision=precision)
    bench.train(config, max_iters=16)
    (event,) = _events(tmp_path / "run", "fp32_module")
    assert event["data"]["module"] == "gain.scale"
    assert len(_events(tmp_path / "run", "nonfinite")) == 1, "the batch of the second epoch fits"
    assert read_checkpoint(tmp_path / "run" / "latest").meta["fp32_modules"] == ["gain.scale"]
    bench.train(config, resume="auto")
    assert len(_events(tmp_path / "run", "nonfinite")) == 1
    assert "Kept in FP32 since an overflow: gain.scale" in [e["message"] for e in _events(tmp_path / "run", "resume")]


def test_bad_data_is_no_matter_for_fp32(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = _infinite_with_sample_3
    bench.train(
        point_config(tmp_path / "run", train={"on_nonfinite": "fp32_module"}, precision={"dtype": "bf16"}), max_iters=8
    )
    assert [event["data"]["module"] for event in _events(tmp_path / "run", "fp32_module")] == [None]


def test_a_run_without_a_loss_is_called_so(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = lambda _, loss: loss * 0.0
    config = point_config(tmp_path / "run", train={"epochs": 7})

    def without_boxes(_: Any) -> PointNet:
        model = PointNet()
        model.forward = lambda batch: {"loss/object/loss_heatmap": 0.0 * model.head.weight.sum()}  # type: ignore[method-assign]  # noqa: ARG005
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_parts, "build_model", without_boxes)
        engine_run.train(config, engine_run.RunOptions(), engine_run.World(), bench.console)
    (warning,) = _events(tmp_path / "run", "zero_loss")
    assert warning["message"].startswith("The loss is exactly 0 in all 50 steps")
    end = _events(tmp_path / "run", "end")[-1]["message"]
    assert end.startswith("Finished, but the loss was exactly 0 in all 56 steps")


def test_a_run_of_skipped_steps_only_is_no_success(tmp_path: Path, bench: Bench) -> None:
    bench.sabotage = lambda _, loss: loss * float("nan")
    config = point_config(tmp_path / "run")
    with pytest.raises(BevctlError, match="16 of 16 steps were skipped") as caught:
        bench.train(config)
    assert caught.value.code == ExitCode.NONFINITE
    assert _status(tmp_path / "run") == "nonfinite"
    assert [folder.name for folder in find_incidents(tmp_path / "run")] == ["1"], "the others repeat it"
    calibrating = dataclasses.replace(
        point_config(tmp_path / "short", precision={"dtype": "fp16", "init_scale": 2.0**60}), name="short"
    )
    bench.sabotage = None
    assert bench.train(calibrating, max_iters=3).code == ExitCode.OK
    assert "the loss scale was still being searched" in _events(tmp_path / "short", "end")[-1]["message"]
