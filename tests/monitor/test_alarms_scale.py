import numpy as np

from bevctl.runs.records import EventRecord, Segment
from tests.monitor.runs import found, healthy, judge, loud, make_log


def scale_of(*stretches: tuple[float, int]) -> list[float]:
    return [scale for scale, records in stretches for _ in range(records)]


def judged(scale: list[float], skipped: list[float] | None = None, interval: int = 50) -> dict[str, str]:
    columns = healthy(len(scale), loss_scale=scale)
    if skipped is not None:
        columns["skipped_steps"] = skipped
    return found(judge(make_log(len(scale), columns, interval=interval)))


def test_a_scale_that_grows_and_probes_is_silent() -> None:
    assert judged(scale_of((65536, 20), (32768, 5), (65536, 40), (32768, 3), (65536, 30))) == {}


def test_a_fixed_scale_is_silent_whatever_it_is() -> None:
    for scale in (1.0, 512.0):
        assert judged(scale_of((scale, 60))) == {}


def test_a_scale_that_falls_far_below_its_usual_value_collapsed() -> None:
    scale = scale_of((65536, 60), (16384, 5), (4096, 5), (1024, 5), (256, 5), (64, 10))
    assert judged(scale) == {"SCALE001": "warn"}


def test_a_scale_that_came_down_to_one_and_stays_is_stuck() -> None:
    scale = scale_of((65536, 40), (1024, 5), (16, 5), (1, 30))
    assert judged(scale) == {"SCALE002": "fail"}


def test_a_scale_below_one_is_told_at_once() -> None:
    assert judged(scale_of((1024, 40), (0.5, 4)))["SCALE002"] == "fail"


def test_a_visit_to_the_floor_is_not_being_stuck() -> None:
    assert "SCALE002" not in judged(scale_of((64, 30), (1, 4), (64, 30)))


def test_another_scale_after_a_resume_is_no_collapse() -> None:
    log = make_log(80, healthy(80, loss_scale=scale_of((65536, 40), (512, 40))))
    log.segments = [Segment("start", 50, 2000, None, None), Segment("resume", 2050, 4000, None, None)]
    assert loud(judge(log)) == {}


def test_a_rising_rate_of_skipped_steps() -> None:
    skipped = np.concatenate([np.linspace(8, 10, 75), 10 + 4 * np.arange(25)])
    assert judged(scale_of((1024, 100)), list(skipped)) == {"SCALE003": "warn"}
    assert judged(scale_of((1024, 100)), list(np.linspace(8, 12, 100))) == {}


def test_skipped_steps_are_counted_from_messages_where_there_is_no_column() -> None:
    events = [EventRecord("skipped_step", "Gradient overflow", None, iter=4000 + 10 * i) for i in range(60)]
    report = judge(make_log(100, healthy(100), events=events))
    assert found(report) == {"SCALE003": "warn"}
    assert report.precision.skipped_steps == 60
