from typing import Any

import numpy as np
import pytest

from bevctl.config.span import parse_span
from bevctl.runs.records import EventRecord, RunLog
from tests.monitor.runs import found, healthy, judge, make_log

FP16 = {"precision": {"fp16": True, "loss_scale": "dynamic"}}


def fp16_run(seconds: float, memory: float, **fields: Any) -> RunLog:
    columns = healthy(40, iter_time_s=seconds + np.zeros(40), memory_gib=memory)
    return make_log(40, columns, **{"header": FP16, **fields})


FP32 = make_log(40, healthy(40, iter_time_s=0.9, memory_gib=11.0))


@pytest.mark.parametrize(
    ("seconds", "memory", "alarms"),
    [(0.89, 10.98, {"PREC001": "fail"}), (0.62, 7.1, {}), (0.89, 7.1, {}), (0.62, 10.98, {})],
)
def test_fp16_without_effect_beside_an_fp32_run(seconds: float, memory: float, alarms: dict[str, str]) -> None:
    assert found(judge(fp16_run(seconds, memory), against=FP32)) == alarms


def test_two_fp16_runs_may_well_be_equal() -> None:
    assert found(judge(fp16_run(0.62, 7.1), against=fp16_run(0.62, 7.1))) == {}


def test_waiting_for_data_does_not_hide_a_faster_gpu() -> None:
    slow_loader = make_log(40, healthy(40, iter_time_s=0.9, data_time_s=0.2, memory_gib=10.98), header=FP16)
    assert "PREC001" not in found(judge(slow_loader, against=FP32))


def test_both_expectations_missed_are_called_by_their_name() -> None:
    expect = {"memory_gib": parse_span("6:8"), "iter_time_s": parse_span("0.5:0.7")}
    assert found(judge(fp16_run(0.89, 10.98), expect=expect)) == {"PREC001": "fail", "EXP001": "fail"}
    assert found(judge(fp16_run(0.62, 7.1), expect=expect)) == {}


@pytest.mark.parametrize(("share", "alarms"), [(0.02, {"PREC001": "fail"}), (0.97, {})])
def test_the_share_of_matrix_products_that_a_run_counted(share: float, alarms: dict[str, str]) -> None:
    events = [EventRecord("precision", "counted", None, iter=1, data={"share": share})]
    assert found(judge(fp16_run(0.62, 7.1, events=events))) == alarms
