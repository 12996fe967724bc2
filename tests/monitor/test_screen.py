from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from bevctl.console import Console
from bevctl.monitor.compare import comparison, differences
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.report import Report
from bevctl.monitor.screen import Screen, one_line
from bevctl.runs.records import ValidationRecord
from tests.monitor.runs import NOW, healthy, judge, make_log
from tests.monitor.test_html import hostile_report


def drawn(report: Report, width: int = 120, height: int | None = None, plain: bool = False) -> str:
    rich = RichConsole(file=io.StringIO(), width=width, height=height, color_system=None, legacy_windows=False)
    rich.print(Screen(report, plain, height))
    text = rich.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def running() -> Report:
    columns = healthy(80, samples_per_s=53.3, loss_scale=4096.0, skipped_steps=3)
    log = make_log(80, columns, iters_per_epoch=1000, max_epochs=6, header={"precision": {"fp16": True}})
    log.validations = [ValidationRecord(3, 3000, NOW - 600, {"mAP": 0.412, "NDS": 0.5})]
    return judge(log, gpus=(Gpu(0, "card", 18.0, 32.0, 99.0, 250.0, 71.0, ((4242, 17.9),)),))


def test_everything_on_one_screen() -> None:
    text = drawn(running())
    for said in (
        "RUNNING  run.log",
        "FP16, loss scale 4,096, 3 steps skipped",
        "epoch 5 of 6, iteration 4,000 of 6,000 (66.7%)",
        "20 min left",
        "epoch 5",
        "s data (3%)",
        "53.3 samples/s",
        "mAP 0.412, NDS 0.5",
        "no alarm",
        "loss/object/heatmap",
        "99 %",
        "18 of 32 GiB",
        "4242 (17.9 GiB)",
    ):
        assert said in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for report in (running(), hostile_report()):
        assert max(map(len, drawn(report, width).splitlines())) <= width


@pytest.mark.parametrize("height", [24, 40, 60])
def test_metrics_give_way_where_the_height_is_limited(height: int) -> None:
    columns = {**healthy(60), **{f"loss/object/part{n}": 1.0 + n for n in range(40)}}
    text = drawn(judge(make_log(60, columns)), height=height)
    assert len(text.splitlines()) <= height
    assert "more: --json, --html" in text


def test_text_of_a_log_cannot_steer_the_terminal() -> None:
    text = drawn(hostile_report())
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


def test_ascii_where_the_stream_has_no_more() -> None:
    drawn(running(), plain=True).encode("ascii", "strict")


def test_an_alarm_with_evidence_cause_and_fix() -> None:
    columns = healthy(40)
    columns["loss"][30:] = float("nan")
    text = drawn(judge(make_log(40, columns)))
    assert "fail NAN001" in text
    assert "last record with a finite loss" in text
    assert "fix: Stop" in text


def test_a_log_with_nothing_to_judge_is_not_called_fine() -> None:
    text = drawn(judge(make_log(0, {})))
    assert "nothing in the log to judge" in text
    assert "no alarm" not in text


def test_parts_that_are_always_zero_take_one_line_together() -> None:
    columns = {**healthy(40), **{f"loss/object/dead{n}": 0.0 for n in range(20)}}
    text = drawn(judge(make_log(40, columns)))
    assert "20 parts of the loss are always zero" in text


def test_one_line() -> None:
    assert one_line(running()).startswith("run.log: running, epoch 5 of 6, iteration 4,000 of 6,000 (66.7%), loss 2")
    assert one_line(running()).endswith("no alarm")
    assert one_line(hostile_report()).endswith("alarms: NAN001 RUN002 TASK001")


def two_runs() -> list[Report]:
    half = make_log(60, healthy(60, memory_gib=19.0, iter_time_s=1.9), path=Path("fp16.log"))
    whole = make_log(60, healthy(60, memory_gib=29.0, iter_time_s=2.66, seed=1), path=Path("fp32.log"))
    del whole.steps[-1].losses["loss/map/focal"]
    return [judge(whole), judge(half)]


def test_two_runs_in_one_table_and_one_plot() -> None:
    stream = io.StringIO()
    Console(stream, stream).result(comparison(two_runs(), 100))
    text = stream.getvalue()
    for said in ("● fp32.log", "○ fp16.log", "-34.5%", "-28.6%", "loss over iterations"):
        assert said in text


def test_what_one_run_lacks_is_called_missing() -> None:
    columns = healthy(40)
    del columns["loss/map/focal"]
    rows = {row.name: row for row in differences([judge(make_log(40, healthy(40))), judge(make_log(40, columns))])}
    assert rows["loss/map/focal"].change == "missing"
    assert rows["memory_gib"].change == "+0.0%"
