from typing import Any

import numpy as np
import pytest

from bevctl.runs.records import EventRecord, Segment
from tests.monitor.runs import found, healthy, judge, loud, make_log

NAN, INF = float("nan"), float("inf")


def with_bad(column: Any, *rows: int, value: float = NAN) -> np.ndarray:
    changed = np.array(column, dtype=np.float64)
    changed[list(rows)] = value
    return changed


def test_gradients_that_are_not_finite_at_the_start_and_now_and_then_are_calibration() -> None:
    columns = healthy(40)
    columns["grad_norm"] = with_bad(columns["grad_norm"], 0, 1, 19, value=INF)
    report = judge(make_log(40, columns))
    assert found(report) == {"NAN002": "info"}
    assert "3 of 40 records (7.5%), 2 right after a start" in report.alarms[0].evidence[0].what


def test_gradients_never_finite_mean_that_no_step_is_taken() -> None:
    report = judge(make_log(40, healthy(40, grad_norm=NAN, loss=9.0)))
    alarm = next(alarm for alarm in report.alarms if alarm.id == "NAN004")
    assert alarm.severity.value == "fail"
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 50
    assert "NAN002" not in found(report)


def test_a_late_stretch_without_a_finite_gradient_is_a_failure_from_its_first_record_on() -> None:
    columns = healthy(60)
    columns["grad_norm"] = with_bad(columns["grad_norm"], *range(54, 60))
    alarm = next(alarm for alarm in judge(make_log(60, columns)).alarms if alarm.id == "NAN004")
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 2750


def test_equal_losses_of_decoder_layers_are_told_as_a_sign_of_masked_nan() -> None:
    layers = {f"frame_0_d{layer}.loss_cls": 1.2345 for layer in range(6)}
    report = judge(make_log(8, {"loss": 7.4, "grad_norm": NAN, **layers}))
    alarm = next(alarm for alarm in report.alarms if alarm.id == "NAN004")
    assert any("6 loss parts have the same value 1.2345" in evidence.what for evidence in alarm.evidence)


@pytest.mark.parametrize(
    ("share", "flat", "severity"),
    [(0.3, False, "warn"), (0.6, True, "fail"), (0.6, False, "warn"), (0.02, False, None)],
)
def test_frequent_overflow(share: float, flat: bool, severity: str | None) -> None:
    columns = healthy(100)
    rows = np.flatnonzero(np.random.default_rng(1).random(99) < share)
    columns["grad_norm"] = with_bad(columns["grad_norm"], *rows, value=INF)
    if flat:
        columns["loss"] = 9 + 0.01 * np.random.default_rng(2).standard_normal(100)
    assert found(judge(make_log(100, columns))).get("NAN003") == severity


def test_a_rising_share_of_overflows_is_told_before_it_is_large() -> None:
    columns = healthy(200)
    columns["grad_norm"] = with_bad(columns["grad_norm"], 20, *range(105, 199, 5))
    assert found(judge(make_log(200, columns)))["NAN003"] == "warn"


def test_a_fixed_loss_scale_is_named_as_the_cause() -> None:
    columns = healthy(100)
    columns["grad_norm"] = with_bad(columns["grad_norm"], *range(0, 99, 2), value=INF)
    log = make_log(100, columns, header={"precision": {"fp16": True, "loss_scale": 512.0}})
    alarm = next(alarm for alarm in judge(log).alarms if alarm.id == "NAN003")
    assert any("fixed at 512" in evidence.what for evidence in alarm.evidence)
    assert alarm.fix == "Use a dynamic loss scale."


def test_single_iterations_may_be_skipped_many_times_in_a_row_while_the_scale_is_found() -> None:
    columns = healthy(300)
    columns["grad_norm"] = with_bad(columns["grad_norm"], *range(12), value=INF)
    assert loud(judge(make_log(300, columns, interval=1))) == {}


def test_a_loss_that_is_never_finite_again_is_a_failure_that_names_the_part() -> None:
    columns = healthy(30)
    for name in ("loss", "loss/object/heatmap", "grad_norm"):
        columns[name] = with_bad(columns[name], *range(20, 30))
    log = make_log(30, columns, events=[EventRecord("checkpoint", "Saved epoch_1.pth", None, iter=900)])
    alarm = next(alarm for alarm in judge(log).alarms if alarm.id == "NAN001")
    assert alarm.severity.value == "fail"
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 1050
    said = " ".join(evidence.what for evidence in alarm.evidence)
    assert "1 of 2 loss parts not finite: loss/object/heatmap; finite: loss/map/focal" in said
    assert "last checkpoint before: Saved epoch_1.pth" in said
    assert "logarithm" in alarm.cause


def test_the_task_that_went_first_is_told() -> None:
    columns = healthy(30)
    columns["loss/map/focal"] = with_bad(columns["loss/map/focal"], *range(26, 30))
    columns["loss/object/heatmap"] = with_bad(columns["loss/object/heatmap"], *range(27, 30))
    columns["loss"] = with_bad(columns["loss"], *range(26, 30))
    alarm = next(alarm for alarm in judge(make_log(30, columns)).alarms if alarm.id == "NAN001")
    assert any(evidence.what == "the first to be not finite: loss/map/focal" for evidence in alarm.evidence)


@pytest.mark.parametrize(
    ("rows", "severity"),
    [((0,), "info"), ((10, 25), "warn"), ((29,), "warn"), (tuple(range(5, 25, 2)), "fail"), ((28, 29), "fail")],
)
def test_how_bad_a_loss_that_is_not_finite_is(rows: tuple[int, ...], severity: str) -> None:
    columns = healthy(30)
    columns["loss"] = with_bad(columns["loss"], *rows)
    assert found(judge(make_log(30, columns)))["NAN001"] == severity


def test_one_record_cut_out_of_a_run_with_a_nan_loss_is_a_failure() -> None:
    log = make_log(1, {"loss": NAN, "a.loss": 1.0, "b.loss": NAN}, first=7050)
    assert found(judge(log))["NAN001"] == "fail"


def test_calibration_after_a_resume_is_benign_too() -> None:
    columns = healthy(60)
    columns["grad_norm"] = with_bad(columns["grad_norm"], 30, 31)
    log = make_log(60, columns)
    log.segments = [Segment("start", 50, 1500, None, None), Segment("resume", 1550, 3000, None, None)]
    assert found(judge(log)) == {"NAN002": "info"}


def test_the_assigner_that_met_nan_is_told_as_a_late_sign() -> None:
    data = {"cause": "nonfinite_input", "role": "cause", "meaning": "NaN in the costs.", "fix": "Lower the rate."}
    message = "ValueError: matrix contains invalid numeric entries"
    log = make_log(
        5, healthy(5), events=[EventRecord("failure", message, None, iter=250, data=data, where="run.log:9")]
    )
    assert found(judge(log))["NAN005"] == "fail"
