from typing import Any

import numpy as np
import pytest

from bevctl.runs.records import Segment
from tests.monitor.runs import falling, found, healthy, judge, loud, make_log


def judged(loss: np.ndarray, **changes: Any) -> dict[str, str]:
    columns = {**healthy(len(loss)), "loss": loss, **changes}
    return found(judge(make_log(len(loss), columns)))


def test_a_jump_that_stays_is_told() -> None:
    loss = falling(80)
    assert judged(np.where(np.arange(80) >= 60, loss + 2.5, loss)) == {"LOSS001": "warn"}
    assert judged(np.where(np.arange(80) >= 60, loss + 14, loss)) == {"LOSS001": "fail"}


def test_a_jump_that_recovers_is_information() -> None:
    loss = falling(100)
    loss[60:65] += 6
    assert judged(loss) == {"LOSS001": "info"}


def test_a_single_high_window_is_no_jump() -> None:
    loss = falling(100)
    loss[60] += 6
    assert judged(loss) == {}


def test_a_jump_at_a_restart_of_the_learning_rate_is_expected() -> None:
    loss, lr = falling(120, noise=0.01), np.tile(np.linspace(2e-4, 2e-6, 60), 2)
    loss[60:75] += np.linspace(4, 0, 15)
    assert judged(loss, lr=lr) == {"LOSS001": "info"}


def test_a_jump_at_a_resume_says_so() -> None:
    loss = falling(80)
    log = make_log(80, healthy(80, loss=np.where(np.arange(80) >= 60, loss + 4, loss)))
    log.segments = [Segment("start", 50, 3000, None, None), Segment("resume", 3050, 4000, None, None)]
    alarm = next(alarm for alarm in judge(log).alarms if alarm.id == "LOSS001")
    assert alarm.title.endswith("after a resume")
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 3050


def test_a_loss_that_never_falls_in_a_run_from_its_start() -> None:
    flat = 9 + 0.05 * np.random.default_rng(0).standard_normal(60)
    assert judged(flat) == {"LOSS002": "warn"}


def test_a_flat_loss_late_in_a_run_or_after_pretraining_is_no_plateau() -> None:
    flat = 2 + 0.02 * np.random.default_rng(0).standard_normal(60)
    assert loud(judge(make_log(60, healthy(60, loss=flat), first=20_000))) == {}
    header = {"meta": {"segments": [{"load_from": "det.pth"}]}}
    assert loud(judge(make_log(60, healthy(60, loss=flat), header=header))) == {}


def test_swings_that_were_not_there_before() -> None:
    loss = falling(120, noise=0.01)
    loss[85:] *= 1 + 0.35 * (-1.0) ** np.arange(35)
    assert judged(loss) == {"LOSS003": "warn"}


def test_a_loss_that_is_noisy_throughout_is_silent() -> None:
    assert judged(falling(120, noise=0.12)) == {}


def test_a_slow_rise_since_the_lowest_point() -> None:
    loss = np.concatenate([falling(60), np.linspace(2, 3.4, 60)])
    growing = np.concatenate([np.full(60, 12.0), np.linspace(12, 40, 60)])
    report = judge(make_log(120, healthy(120, loss=loss, grad_norm=growing)))
    assert found(report) == {"LOSS004": "warn"}
    assert any(evidence.where == "grad_norm" for evidence in report.alarms[0].evidence)


@pytest.mark.parametrize("interval", [1, 10, 50, 200])
def test_single_noisy_iterations_are_condensed_before_anything_is_judged(interval: int) -> None:
    records = 6000 // interval
    noise = np.random.default_rng(3).lognormal(0, 0.4, records)
    assert (
        loud(judge(make_log(records, healthy(records, loss=falling(records, noise=0) * noise), interval=interval)))
        == {}
    )
