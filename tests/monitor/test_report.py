from __future__ import annotations

import numpy as np
import pytest

from bevctl.errors import ExitCode
from bevctl.finding import Severity
from bevctl.monitor.history import history_of
from bevctl.monitor.report import exit_code, iso, overall
from bevctl.runs.records import EventRecord, RunLog, StepRecord, ValidationRecord
from tests.monitor.runs import NOW, healthy, judge, make_log


def own(precision: str, **meta: object) -> RunLog:
    header = {"meta": {"status": "running", "segments": [{"precision": precision, **meta}]}}
    return make_log(20, healthy(20), format="bevctl", header=header)


@pytest.mark.parametrize(("precision", "fp16"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_precision_of_a_run_of_bevctl(precision: str, fp16: bool) -> None:
    facts = judge(own(precision)).precision
    assert (facts.fp16, facts.dtype) == (fp16, precision)


def test_a_scale_is_no_scale_without_half_precision() -> None:
    log = own("fp32")
    log.events = [EventRecord("precision", "counted", None, data={"share": 1.0, "loss_scale": 1.0})]
    assert judge(log).precision.loss_scale is None


def test_the_scale_of_the_checkpoint_a_foreign_run_went_on_from() -> None:
    header = {"meta": {"fp16": {"loss_scaler": {"scale": 512.0}}}}
    facts = judge(make_log(20, healthy(20), header=header)).precision
    assert (facts.fp16, facts.loss_scale, facts.skipped_steps) == (True, 512.0, None)
    assert judge(make_log(20, healthy(20))).precision.fp16 is None


def test_drops_of_the_scale_and_skipped_steps() -> None:
    columns = healthy(6, loss_scale=[1024, 2048, 1024, 1024, 512, 512], skipped_steps=[0, 0, 1, 1, 2, 2])
    facts = judge(make_log(6, columns)).precision
    assert (facts.loss_scale, facts.skipped_steps, facts.scale_drops) == (512.0, 2, 2)


def test_finish_times_of_the_coming_epochs_count_evaluations_in() -> None:
    log = make_log(40, healthy(40, iter_time_s=0.5), seconds=0.5, iters_per_epoch=1000, max_epochs=4)
    log.steps = log.steps[:30]
    last = log.steps[-1]
    assert last.time is not None
    log.validations = [ValidationRecord(1, 1000, (log.steps[19].time or 0) + 20, {"mAP": 0.1})]
    progress = judge(log, now=last.time + 10).document()["progress"]
    assert (progress["epoch"], progress["iter"], progress["max_iters"]) == (2, 1500, 4000)
    assert [(entry["epoch"], entry["in_s"]) for entry in progress["epoch_finish"]] == [
        (2, 250.0),
        (3, 770.0),
        (4, 1290.0),
    ]
    assert progress["epoch_finish"][0]["time"] == iso(last.time + 250)
    assert progress["eta_s"] == 2500 * 0.5 + 3 * 20


def test_a_run_that_counts_iterations_only_gets_its_epochs_from_both_limits() -> None:
    log = make_log(40, healthy(40), max_iters=12_000, max_epochs=24)
    for step in log.steps:
        step.epoch = 1
    progress = judge(log).progress
    assert (progress.epoch, progress.iters_per_epoch, progress.total_iters) == (4, 500, 12_000)


def test_without_iteration_times_the_clock_gives_the_speed() -> None:
    columns = healthy(40)
    del columns["iter_time_s"]
    progress = judge(make_log(40, columns, seconds=2.5, max_iters=4000)).progress
    assert progress.iter_time_s == pytest.approx(2.5)
    assert progress.eta_s == pytest.approx(5000)


def test_the_logs_own_finish_time_serves_where_its_length_is_unknown() -> None:
    log = make_log(20, healthy(20))
    log.steps[-1].eta_s = 1234.0
    assert judge(log).progress.eta_s == 1234.0


def test_a_finished_run_has_no_time_left() -> None:
    progress = judge(make_log(40, healthy(40), max_iters=2010)).document()["progress"]
    assert (progress["eta_s"], progress["epoch_finish"]) == (0.0, [])


def test_the_window_says_what_was_asked_for_or_what_was_found() -> None:
    log = make_log(3, healthy(3))
    assert judge(log).document()["window"] == {"from": iso(log.steps[0].time), "to": iso(NOW - 5), "records": 3}
    assert judge(log, since=NOW - 3600).document()["window"]["from"] == iso(NOW - 3600)


def test_foreign_metrics_are_kept_under_their_own_names() -> None:
    log = make_log(3, healthy(3))
    for value, step in enumerate(log.steps):
        step.extra = {"momentum": float(value), "note": "text"}
    figures = judge(log).document()["metrics"]["momentum"]
    assert figures == {"last": 2.0, "mean": 1.0, "min": 0.0, "max": 2.0, "p50": 1.0, "p95": 1.9, "nonfinite": 0}


def test_missing_values_are_told_from_values_that_are_not_finite() -> None:
    records = [StepRecord(1, 1, grad_norm=float("inf")), StepRecord(1, 2), StepRecord(1, 3, grad_norm=2.0)]
    history = history_of(records)
    assert history.nonfinite("grad_norm").tolist() == [True, False, False]
    assert history.logged["grad_norm"].tolist() == [True, False, True]
    assert history.finite("grad_norm")[0].tolist() == [3.0]
    assert "loss" not in history
    assert np.isnan(history.column("loss")).all()


def test_a_thinned_log_keeps_the_span_of_its_records() -> None:
    single = [StepRecord(1, 200 * i, loss=float(i % 7)) for i in range(1, 301)]
    assert len(history_of(single, 1).windows("loss")[0]) == 6
    means = [StepRecord(1, 200 * i, loss=2.0) for i in range(1, 301)]
    assert len(history_of(means, 50).windows("loss")[0]) == 300


def test_windows_of_single_iterations_hold_medians() -> None:
    values = [1.0] * 40 + [9.0] * 10 + [2.0] * 50 + [7.0]
    iters, medians = history_of([StepRecord(1, i + 1, loss=v) for i, v in enumerate(values)]).windows("loss")
    assert iters.tolist() == [50.0, 100.0, 101.0]
    assert medians.tolist() == [1.0, 2.0, 2.0]


def test_exit_codes_and_status_of_several_runs() -> None:
    bad = judge(make_log(30, healthy(30, loss=float("nan"))))
    fine, unknown = judge(make_log(30, healthy(30))), judge(make_log(0, {}))
    slow = judge(make_log(30, healthy(30, data_time_s=0.3)))
    cases = [
        ([fine], "pass", ExitCode.OK),
        ([slow, fine], "warn", ExitCode.OK),
        ([slow, unknown], "unknown", ExitCode.UNKNOWN),
        ([unknown, bad], "fail", ExitCode.FINDINGS),
    ]
    for reports, status, code in cases:
        assert (overall(reports), exit_code(reports, Severity.FAIL)) == (status, code)
    assert exit_code([slow], Severity.WARN) is ExitCode.FINDINGS


@pytest.mark.parametrize(("time", "text"), [(0.0, "1970-01-01T00:00:00+00:00"), (None, None), (1e300, None)])
def test_times_in_utc(time: float | None, text: str | None) -> None:
    assert iso(time) == text
