import numpy as np
import pytest

from bevctl.monitor.alarms.tasks import by_task, task_of
from tests.monitor.runs import falling, found, healthy, judge, loud, make_log

CONFIG = "model:\n  object: {proposals: 10}\n  map: {loss: focal}\n"


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("loss/object/layer_-1_loss_cls", "object"),
        ("loss/map/drivable_area/focal", "map"),
        ("task0.loss_heatmap", "task0"),
        ("d3.loss_bbox", "loss_bbox"),
        ("frame_0_d1.dn_loss_cls", "frame_0"),
        ("loss_cls", "loss_cls"),
    ],
)
def test_task_of_a_loss(name: str, task: str) -> None:
    assert task_of(name) == task


def test_names_are_grouped_in_their_order() -> None:
    assert by_task(["loss/b/x", "loss/a/y", "loss/b/z"]) == {"b": ["loss/b/x", "loss/b/z"], "a": ["loss/a/y"]}


@pytest.mark.parametrize(("value", "word"), [(0.0, "zero"), (0.7311, "constant")])
def test_a_loss_that_died_is_named_with_its_last_living_value(value: float, word: str) -> None:
    dead = np.where(np.arange(80) >= 50, value, falling(80))
    report = judge(make_log(80, {**healthy(80), "loss/map/focal": dead}))
    assert found(report) == {"TASK001": "warn"}
    alarm = report.alarms[0]
    assert alarm.title == f"1 of 2 loss parts are exactly {word}: map"
    assert "in the last 30 records" in alarm.evidence[0].what
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 2550


def test_when_every_loss_is_dead_the_run_is_useless() -> None:
    report = judge(make_log(30, {"loss": 0.0, "loss/object/a": 0.0, "loss/map/b": 0.0}, first=20_000))
    assert found(report)["TASK001"] == "fail"


def test_a_small_loss_that_prints_the_same_four_decimals_is_alive() -> None:
    assert loud(judge(make_log(80, {**healthy(80), "loss/map/focal": 0.0003}))) == {}


def test_a_few_equal_records_are_chance() -> None:
    value = np.where(np.arange(80) >= 76, 0.5, falling(80))
    assert loud(judge(make_log(80, {**healthy(80), "loss/map/focal": value}))) == {}


def test_a_head_of_the_config_without_losses_is_lost() -> None:
    columns = healthy(20)
    log = make_log(20, columns, format="bevctl", header={"config": CONFIG})
    assert loud(judge(log)) == {}
    del columns["loss/map/focal"]
    report = judge(make_log(20, columns, format="bevctl", header={"config": CONFIG}))
    assert found(report) == {"TASK002": "fail"}
    assert report.alarms[0].title == "The map head's losses are missing"


def test_a_head_that_the_other_run_has_is_lost_and_never_a_saving_of_fp16() -> None:
    whole = make_log(40, healthy(40, memory_gib=28.9))
    columns = healthy(40, memory_gib=24.0, loss=falling(40, 4, 1.4))
    del columns["loss/map/focal"]
    half = make_log(40, columns, header={"precision": {"fp16": True, "loss_scale": "dynamic"}})
    report = judge(half, against=whole)
    assert found(report) == {"TASK002": "fail"}
    said = " ".join(evidence.what for evidence in report.alarms[0].evidence)
    assert "loss/map/focal" in said
    assert "24 here, 28.9 there" in said
    assert found(judge(whole, against=half)) == {}


def test_missing_parts_of_a_task_that_is_there_are_a_warning() -> None:
    other = make_log(40, {**healthy(40), "loss/object/bbox": falling(40)})
    assert found(judge(make_log(40, healthy(40)), against=other)) == {"TASK002": "warn"}


def test_runs_that_name_no_loss_alike_are_not_compared() -> None:
    other = make_log(40, {"loss": falling(40), "frame_0_loss_cls": falling(40)})
    assert found(judge(make_log(40, healthy(40)), against=other)) == {}
