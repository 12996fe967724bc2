from typing import Any

import numpy as np
import pytest

from bevctl.config.span import parse_span
from bevctl.errors import BevctlError
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.report import expected
from bevctl.runs.records import ValidationRecord
from tests.monitor.runs import found, healthy, judge, make_log


def judged(expect: dict[str, str], **changes: Any) -> dict[str, str]:
    spans = {name: parse_span(text) for name, text in expect.items()}
    return found(judge(make_log(40, healthy(40, **changes)), expect=spans))


def test_inside_and_outside() -> None:
    assert judged({"memory_gib": "18:20", "grad_norm": "8:16", "iter_time_s": ":0.7"}) == {}
    assert judged({"memory_gib": "14:16"}) == {"EXP001": "fail"}
    assert judged({"iter_time_s": "1.8:"}) == {"EXP001": "fail"}


def test_a_few_values_outside_do_not_matter() -> None:
    norms = np.full(40, 12.0)
    norms[::5] = 200
    assert judged({"grad_norm": "10:20"}, grad_norm=norms) == {}


def test_the_first_iterations_are_outside_unless_the_range_names_them() -> None:
    memory = np.where(np.arange(40) < 1, 25.0, 18.5)
    assert judged({"memory_gib": "18:20"}, memory_gib=memory) == {}
    assert judged({"memory_gib": "18:20@1:50"}, memory_gib=memory) == {"EXP001": "fail"}
    assert judged({"memory_gib": "24:26@1:50"}, memory_gib=memory) == {}


def test_scores_and_live_gpus_are_measured_too() -> None:
    log = make_log(40, healthy(40))
    log.validations = [ValidationRecord(1, 1000, None, {"mAP": 0.41})]
    expect = {"mAP": parse_span("0.5:"), "gpu_util": parse_span("95:100")}
    report = judge(log, expect=expect, gpus=(Gpu(0, "card", utilization=42.0),))
    assert [alarm.title for alarm in report.alarms] == [
        "mAP is 0.41, expected at least 0.5",
        "gpu_util is 42, expected 95 to 100",
    ]


def test_what_is_not_measured_is_said_and_not_judged() -> None:
    assert judged({"gpu_util": "95:100"}) == {"EXP002": "info"}


def test_ranges_of_the_runs_own_config_hold_and_options_replace_them() -> None:
    log = make_log(40, healthy(40), format="bevctl", header={"config": "expect: {memory_gib: '14:16'}\n"})
    assert found(judge(log)) == {"EXP001": "fail"}
    assert found(judge(log, expect={"memory_gib": parse_span("18:20")})) == {}


def test_a_text_that_is_no_range_is_an_error_that_names_the_metric() -> None:
    with pytest.raises(BevctlError, match="expected range of loss must be low:high, not '3'"):
        expected({"loss": "3"})
