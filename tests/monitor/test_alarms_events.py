import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bevctl.monitor.disk import Disk, disk_of
from bevctl.monitor.progress import Progress
from bevctl.runs.records import EventRecord, RunLog, Segment, ValidationRecord
from tests.monitor.runs import NOW, found, healthy, judge, loud, make_log

NAN = float("nan")


def failure(cause: str, message: str, iteration: int | None = 500, **data: Any) -> EventRecord:
    facts = {"cause": cause, "role": "cause", "meaning": "What it means.", "fix": "What to do.", "cluster": 1, **data}
    return EventRecord("failure", message, NOW - 5, iter=iteration, data=facts, where="run.log:77")


@pytest.mark.parametrize(
    ("cause", "id"),
    [
        ("cuda_oom", "MEM002"),
        ("host_oom", "MEM003"),
        ("worker_killed", "LOAD002"),
        ("shared_memory", "LOAD002"),
        ("disk_full", "DISK002"),
        ("nccl_timeout", "RUN004"),
        ("segfault", "RUN002"),
        ("exception", "RUN002"),
    ],
)
def test_failures_become_alarms_with_their_meaning(cause: str, id: str) -> None:
    report = judge(make_log(10, healthy(10), events=[failure(cause, "It broke.")]))
    assert found(report) == {id: "fail"}
    alarm = report.alarms[0]
    assert (alarm.title, alarm.cause, alarm.fix) == ("It broke.", "What it means.", "What to do.")
    assert alarm.evidence[0].where == "run.log:77"
    assert report.state.name == "died"


@pytest.mark.parametrize(
    ("format", "told"),
    [("mmcv-text", "(PyTorch 2.1 and newer)"), ("bevctl", "has by itself unless")],
)
def test_what_is_done_against_pieces(format: str, told: str) -> None:
    sizes: dict[str, Any] = {"tried_gib": 1.1, "allocated_gib": 14.2, "reserved_gib": 21.9}
    log = make_log(10, healthy(10), events=[failure("cuda_oom", "out of memory", **sizes)])
    evidence = judge(dataclasses.replace(log, format=format)).alarms[0].evidence
    assert any("expandable_segments:True" in entry.what and told in entry.what for entry in evidence)


@pytest.mark.parametrize(("tried", "told"), [(1.1, True), (9.0, False)])
def test_memory_that_was_free_in_pieces(tried: float, told: bool) -> None:
    sizes: dict[str, Any] = {"tried_gib": tried, "allocated_gib": 14.2, "reserved_gib": 21.9}
    report = judge(make_log(10, healthy(10), events=[failure("cuda_oom", "out of memory", **sizes)]))
    assert any("7.7 GiB were reserved and free" in evidence.what for evidence in report.alarms[0].evidence) is told


def test_what_a_failure_dragged_along_is_evidence_and_no_alarm_of_its_own() -> None:
    dragged = failure("worker_exited", "worker exited", role="consequence")
    report = judge(make_log(10, healthy(10), events=[failure("worker_killed", "worker killed", count=3), dragged]))
    assert found(report) == {"LOAD002": "fail"}
    assert report.alarms[0].title == "worker killed (3 times)"
    assert any(evidence.what == "dragged along: worker exited" for evidence in report.alarms[0].evidence)


def test_a_failure_without_any_record_is_a_failure_still() -> None:
    report = judge(make_log(0, {}, events=[failure("worker_killed", "killed", iteration=None)]))
    assert (report.status, report.state.name) == ("fail", "died")


def test_a_run_stopped_by_hand_is_a_warning() -> None:
    assert loud(judge(make_log(10, healthy(10), events=[failure("interrupted", "KeyboardInterrupt")]))) == {
        "RUN002": "warn"
    }


def test_a_run_that_went_on_after_a_failure_is_not_dead() -> None:
    report = judge(make_log(20, healthy(20), events=[failure("cuda_oom", "out of memory")]))
    assert report.state.name == "running"
    assert found(report) == {"MEM002": "fail"}


@pytest.mark.parametrize(
    ("data", "severity"),
    [
        ({"size_mismatch": 2, "prefixes": {"size_mismatch": {"heads.object": 2}}}, "fail"),
        ({"missing": 90, "prefixes": {"missing": {"encoders.camera": 90}}}, "fail"),
        ({"missing": 4, "unexpected": 6, "prefixes": {"missing": {"heads.map": 4}}}, "info"),
    ],
)
def test_a_checkpoint_that_does_not_fit(data: dict[str, Any], severity: str) -> None:
    event = EventRecord("checkpoint_mismatch", "does not match", None, data=data, where="run.log:3")
    assert found(judge(make_log(10, healthy(10), events=[event]))) == {"CKPT001": severity}


def scored(*scores: dict[str, float], **fields: Any) -> dict[str, str]:
    log = make_log(80, healthy(80), **fields)
    log.validations = [ValidationRecord(n + 1, 1000 * (n + 1), None, score) for n, score in enumerate(scores)]
    return found(judge(log))


def test_an_evaluation_that_finds_nothing() -> None:
    assert scored({"mAP": 0.0, "NDS": 0.0006}, max_iters=100_000) == {"EVAL001": "warn"}
    assert scored({"mAP": 0.0, "NDS": 0.0}, max_iters=5000) == {"EVAL001": "fail"}
    assert scored({"mAP": 0.3, "NDS": 0.4}, {"mAP": 0.0, "NDS": NAN}) == {"EVAL001": "fail"}


def test_scores_that_rise_and_classes_without_error_figures_are_fine() -> None:
    assert scored({"mAP": 0.1, "barrier_vel_err": NAN}, {"mAP": 0.2, "barrier_vel_err": NAN}) == {}


def test_evaluations_that_repeat_each_other() -> None:
    same = {"mAP": 0.3316, "car": 0.6, "bus": 0.2, "barrier_vel_err": NAN}
    assert scored(same, same) == {"EVAL002": "warn"}
    assert scored(same, {**same, "bus": 0.21}) == {}
    assert scored({"mAP": 0.5}, {"mAP": 0.5}) == {}


def resumed(before: list[float], after: list[float]) -> dict[str, str]:
    lr = np.array(before + after)
    log = make_log(len(lr), healthy(len(lr), lr=lr))
    border = 50 * len(before)
    log.segments = [Segment("start", 50, border, None, None), Segment("resume", border + 50, 50 * len(lr), None, None)]
    return loud(judge(log))


def test_learning_rate_after_a_resume() -> None:
    assert resumed([2e-4] * 20, [1.9e-4] * 20) == {}
    assert resumed([2e-4] * 20, [2e-5] * 20) == {}
    assert resumed([4e-7] * 20, [2e-4] * 20) == {"LR001": "fail"}
    assert resumed([4e-5] * 20, [2e-4] * 20) == {"LR001": "warn"}
    assert resumed([2e-4] * 20, list(np.linspace(2e-5, 2e-4, 20))) == {"LR001": "warn"}


def test_a_rounded_learning_rate_of_zero_is_not_compared() -> None:
    assert resumed([0.0] * 20, [1e-5] * 20) == {}


def progress(left: int) -> Progress:
    return Progress(iter=1000 * (24 - left), iters_per_epoch=1000, total_iters=24_000)


def test_disk_that_lasts_and_that_does_not(tmp_path: Path) -> None:
    for epoch in (1, 2):
        (tmp_path / f"epoch_{epoch}.pth").write_bytes(b"x" * 1000)
    (tmp_path / "latest").symlink_to("epoch_2.pth")
    (tmp_path / "pretrained.pth").write_bytes(b"x" * 9000)
    every = disk_of(tmp_path, progress(20), None)
    few = disk_of(tmp_path, progress(20), 3)
    assert every is not None
    assert few is not None
    assert (every.needed, few.needed) == (20_000, 2000)
    assert every.suffices
    assert disk_of(tmp_path / "nothing", progress(20), None) is None
    assert Disk(tmp_path, free=100, total=200, needed=101).suffices is False
    assert Disk(tmp_path, free=100, total=200, needed=None).suffices is None


def test_a_disk_that_is_too_small_is_told_while_the_run_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "epoch_1.pth").write_bytes(b"x" * 1000)
    log = make_log(30, healthy(30), path=tmp_path, iters_per_epoch=1000, max_epochs=24)
    assert found(judge(log)) == {}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=2**40, free=4096))
    assert found(judge(log)) == {"DISK001": "warn"}
    assert found(judge(log, now=NOW + 3 * 86400)) == {"RUN003": "info"}


def test_the_last_line_of_a_log_is_shown_where_it_just_stops() -> None:
    report = judge(make_log(10, healthy(10), last_line="Iter [500/9000] loss: 2"), now=NOW + 9 * 86400)
    assert found(report) == {"RUN003": "info"}
    assert report.alarms[0].evidence[0].what == "Iter [500/9000] loss: 2"
    assert isinstance(report.log, RunLog)
