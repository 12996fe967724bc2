from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bevctl.runs.records import EventRecord, StepRecord
from bevctl.runs.writer import RunWriter, read_run

MMCV_LINE = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - bevctl - INFO - Epoch \[1\]\[2/5\]\tlr: 2\.000e-05, eta: 1:02:03, "
    r"time: 0\.600, data_time: 0\.020, memory: 9120, loss/object/loss_heatmap: 1\.5000, loss: 2\.5000, "
    r"grad_norm: 4\.0000, loss_scale: 131072, skipped_steps: 3$"
)


def _record(iteration: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "epoch": 1,
        "iter": iteration,
        "time": 1.5e9,
        "lr": 2e-5,
        "loss": float(iteration) + 1,
        "losses": {"loss/object/loss_heatmap": float(iteration)},
        "grad_norm": 4.0,
        "loss_scale": 131072.0,
        "iter_time_s": 0.6,
        "data_time_s": 0.02,
        "memory_gib": 9120 / 1024,
        "eta_s": 3723.4,
    }
    return StepRecord(**{**values, **changes})


def _lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_iteration_is_a_record_and_every_interval_an_mmcv_line(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, log_interval=2)
    skipped = {2: 3, 4: 3}
    steps = [_record(i, skipped_steps=skipped.get(i)) for i in range(1, 6)]
    due = [writer.step(step, inner=i, iters_per_epoch=5) is not None for i, step in enumerate(steps, start=1)]
    writer.close()
    assert due == [False, True, False, True, True], "the end of an epoch has a line too"
    text = (tmp_path / "log.txt").read_text().splitlines()
    assert MMCV_LINE.match(text[0]), text[0]
    assert "loss: 4.5000" in text[1]
    assert "skipped_steps" not in text[2], "not measured"
    records = _lines(tmp_path / "log.jsonl")
    assert [r["iter"] for r in records] == [1, 2, 3, 4, 5]
    assert records[0]["losses"] == {"loss/object/loss_heatmap": 1.0}
    assert records[0]["mode"] == "train"
    assert "skipped_steps" not in records[0], "not measured"


def test_nonfinite_numbers_stay_strict_json(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, log_interval=1)
    line = writer.step(_record(1, loss=float("nan"), grad_norm=float("inf"), memory_gib=None), 1, 5)
    writer.close()
    (record,) = _lines(tmp_path / "log.jsonl")
    assert (record["loss"], record["loss_nonfinite"]) == (None, "nan")
    assert (record["grad_norm"], record["grad_norm_nonfinite"]) == (None, "inf")
    assert line is not None
    assert "loss: nan, grad_norm: inf" in line
    assert "memory" not in line


def test_events_and_run_json_survive_a_restart(tmp_path: Path) -> None:
    for number in (1, 2):
        writer = RunWriter(tmp_path, log_interval=1)
        writer.event(EventRecord("start", f"start {number}", time=float(number), data={"batch": 4}))
        writer.update(segments=[*writer.document["segments"], {"batch": number}], status="running")
        writer.close()
    assert [e["message"] for e in _lines(tmp_path / "events.jsonl")] == ["start 1", "start 2"]
    run = read_run(tmp_path)
    assert [s["batch"] for s in run["segments"]] == [1, 2]
    assert run["schema"] == "bevctl.run/1"
    assert "start 2" in (tmp_path / "log.txt").read_text()


def test_a_broken_run_json_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    assert read_run(tmp_path)["segments"] == []
