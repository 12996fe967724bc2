import os
import socket
from typing import Any

import pytest

from bevctl.monitor.state import span
from bevctl.runs.records import EventRecord, RunLog, ValidationRecord
from tests.monitor.runs import NOW, found, healthy, judge, make_log

MINUTE = 60.0


def at(log: RunLog, minutes: float, **circumstances: Any) -> str:
    """State so long after the last line."""
    return judge(log, now=NOW - 5 + minutes * MINUTE, **circumstances).state.name


def test_running_then_stalled_then_ended() -> None:
    log = make_log(40, healthy(40))
    assert at(log, 1) == "running"
    assert at(log, 4.9) == "running"
    assert at(log, 5.1) == "stalled"
    assert at(log, 24 * 60 + 1) == "ended"
    assert at(log, 24 * 60 + 1, grew=True) == "stalled"


def test_a_stalled_run_is_an_alarm_with_the_last_line() -> None:
    report = judge(make_log(40, healthy(40), last_line="Iter [2000/9000]"), now=NOW + 3600)
    assert found(report) == {"RUN001": "fail"}
    assert any(evidence.what == "Iter [2000/9000]" for evidence in report.alarms[0].evidence)


def saved(after_minutes: float | None = None) -> RunLog:
    """A run that saved its checkpoint, and earlier evaluated for so many minutes."""
    log = make_log(40, healthy(40), last_line="Saving checkpoint at 2 epochs")
    log.events = [EventRecord("checkpoint", "Saving checkpoint at 2 epochs", NOW - 5, iter=2000)]
    if after_minutes is not None:
        before = log.steps[19].time
        assert before is not None
        for step in log.steps[:20]:
            assert step.time is not None
            step.time -= after_minutes * MINUTE
        log.validations = [ValidationRecord(1, 1000, before, {"mAP": 0.2})]
    return log


@pytest.mark.parametrize(("minutes", "state"), [(20, "running"), (60, "stalled"), (90, "stalled")])
def test_silence_after_a_checkpoint_is_an_evaluation_for_as_long_as_those_before(minutes: float, state: str) -> None:
    assert at(saved(after_minutes=11), minutes) == state


def test_an_unknown_evaluation_may_take_an_hour() -> None:
    assert at(saved(), 59) == "running"
    assert at(saved(), 61) == "stalled"


def test_the_end_of_an_epoch_begins_an_evaluation_too() -> None:
    assert at(make_log(40, healthy(40), iters_per_epoch=1000, max_epochs=9), 30) == "running"
    assert at(make_log(41, healthy(41), iters_per_epoch=1000, max_epochs=9), 30) == "stalled"


def test_finished() -> None:
    assert at(make_log(40, healthy(40), max_iters=2042), 0) == "finished"
    assert at(make_log(40, healthy(40), iters_per_epoch=500, max_epochs=4), 9000) == "finished"
    assert at(make_log(40, healthy(40), events=[EventRecord("end", "Training ended", None)]), 1) == "finished"
    assert at(make_log(40, healthy(40), max_iters=2060), 2) == "running"


def own(status: str, **meta: Any) -> RunLog:
    return make_log(40, healthy(40), format="bevctl", header={"meta": {"status": status, **meta}})


def test_a_run_of_bevctl_says_itself_how_it_ended() -> None:
    assert at(own("finished"), 1) == "finished"
    assert at(own("failed"), 1) == "died"
    assert at(own("nonfinite"), 1) == "died"
    assert at(own("preempted"), 1) == "ended"
    assert at(own("running"), 1) == "running"


def test_a_process_that_is_gone_died_without_a_word() -> None:
    here = socket.gethostname()
    assert at(own("running", pid=os.getpid(), host=here), 1) == "running"
    gone = os.fork() if hasattr(os, "fork") else 0
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert at(own("running", pid=gone, host=here), 1) == "died"
    assert at(own("running", pid=gone, host="elsewhere"), 1) == "running"
    report = judge(own("running", pid=gone, host=here))
    assert found(report) == {"RUN005": "fail"}
    assert "is gone and wrote no end" in report.alarms[0].title


def test_a_window_without_a_record_does_not_hide_where_the_run_stands() -> None:
    whole = make_log(40, healthy(40), max_iters=9000, ends=NOW - 3 * 86400)
    nothing = make_log(0, {}, last_time=None)
    report = judge(nothing, since=NOW - 3600, recent=whole)
    assert (report.state.name, report.progress.iter, report.status) == ("ended", 2000, "unknown")
    assert report.state.why.startswith("stopped at iteration 2000 of 9000")


def test_before_the_first_record() -> None:
    log = make_log(0, {}, last_time=NOW, modified=NOW)
    assert at(log, 20) == "running"
    assert at(log, 40) == "stalled"
    assert judge(log).status == "unknown"


def test_a_copied_log_without_clock_times_is_not_called_stalled() -> None:
    log = make_log(40, healthy(40), time_estimated=True)
    assert at(log, 60) == "ended"
    assert at(log, 60, grew=True) == "stalled"


def test_a_log_without_clock_times_is_believed_where_its_name_agrees() -> None:
    import datetime
    from pathlib import Path

    log = make_log(40, healthy(40), time_estimated=True)
    assert log.steps[0].time is not None
    started = datetime.datetime.fromtimestamp(log.steps[0].time)
    log.files = [Path(f"{started:%Y%m%d_%H%M%S}.log.json")]
    assert at(log, 60) == "stalled"
    log.files = [Path("20190101_000000.log.json"), Path("20199999_999999.log.json")]
    assert at(log, 60) == "ended"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (99, "99 s"), (720, "12 min"), (7200, "2 h"), (12_000, "3 h 20 min"), (5 * 86400, "5 days")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text
