from typing import Any

import numpy as np
import pytest

from bevctl.monitor.gpus import Gpu
from bevctl.runs.records import ValidationRecord
from tests.monitor.runs import found, healthy, judge, loud, make_log

GENERATOR = np.random.default_rng(5)


def judged(records: int = 100, **changes: Any) -> dict[str, str]:
    return found(judge(make_log(records, {**healthy(records), **changes})))


def noisy(level: np.ndarray | float, records: int = 100, scatter: float = 0.02) -> np.ndarray:
    return level * (1 + scatter * GENERATOR.standard_normal(records))


@pytest.mark.parametrize(("data", "alarms"), [(0.05, {}), (0.14, {}), (0.3, {"LOAD001": "warn"})])
def test_share_of_time_spent_waiting_for_data(data: float, alarms: dict[str, str]) -> None:
    assert judged(data_time_s=data) == alarms


def test_waiting_in_the_first_iterations_is_no_bottleneck() -> None:
    assert judged(3, data_time_s=[0.5, 0.01, 0.01], iter_time_s=[1.1, 0.6, 0.6]) == {}


def test_iterations_that_get_slower_and_who_is_to_blame() -> None:
    slower = noisy(np.linspace(0.6, 1.2, 100))
    report = judge(make_log(100, healthy(100, iter_time_s=slower)))
    assert found(report) == {"TIME001": "warn"}
    assert any("it is computing, not the loader" in evidence.what for evidence in report.alarms[0].evidence)
    waiting = judge(make_log(100, healthy(100, iter_time_s=slower, data_time_s=np.linspace(0.01, 0.5, 100))))
    assert any("it is the loader" in evidence.what for alarm in waiting.alarms for evidence in alarm.evidence)


def test_a_level_that_rises_once_and_stays_is_slower_too() -> None:
    assert judged(iter_time_s=noisy(np.where(np.arange(100) < 60, 0.6, 0.9))) == {"TIME001": "warn"}


def test_noise_short_pauses_and_a_slow_start_are_no_drift() -> None:
    assert judged(iter_time_s=noisy(0.6, scatter=0.15)) == {}
    assert judged(iter_time_s=np.where(np.arange(100) % 20 == 19, 300.0, 0.6)) == {}
    assert judged(iter_time_s=np.where(np.arange(100) < 10, 2.4, 0.6)) == {}


def test_iterations_that_compute_for_very_long() -> None:
    report = judge(make_log(4, {"loss": [9.0, 8.5, 8.1, 7.9], "iter_time_s": 9.6, "data_time_s": 0.9}, first=1850))
    assert found(report) == {"TIME002": "warn"}
    assert "8.7 s of it are computing" in report.alarms[0].evidence[0].what


def test_the_first_iterations_alone_say_nothing_about_speed() -> None:
    assert loud(judge(make_log(2, {"loss": [9.0, 8.5], "iter_time_s": [135.0, 68.0]}, interval=1))) == {}


def test_time_that_includes_an_evaluation_is_told_and_left_out() -> None:
    times = np.full(100, 0.6)
    times[[40, 80]] = 70.0
    log = make_log(100, healthy(100, iter_time_s=times), max_iters=10_000)
    log.validations = [ValidationRecord(1, 2000, None, {"mAP": 0.3}), ValidationRecord(1, 4000, None, {"mAP": 0.4})]
    report = judge(log)
    assert found(report) == {"TIME003": "info"}
    assert report.progress.eta_s == pytest.approx(5000 * 0.6)


def test_steady_growth_of_memory_is_a_leak_that_ends_somewhere() -> None:
    growth = np.linspace(18, 22, 100) + 0.01 * GENERATOR.standard_normal(100)
    gpu = Gpu(0, "card", memory_used_gib=23.0, memory_total_gib=32.0)
    report = judge(make_log(100, healthy(100, memory_gib=growth)), gpus=(gpu,))
    assert found(report) == {"MEM001": "warn"}
    assert any("the GPU is full after" in evidence.what for evidence in report.alarms[0].evidence)


@pytest.mark.parametrize(
    "memory",
    [
        np.full(100, 18.2),
        np.where(np.arange(100) < 20, 17.0, 18.4),
        17 + np.log1p(np.arange(100)) / 4,
        np.maximum.accumulate(18 + np.random.default_rng(0).gumbel(0, 0.1, 100)),
        18 + 0.3 * np.sin(np.arange(100)),
    ],
    ids=["constant", "one step", "levels off", "rare peaks", "to and fro"],
)
def test_memory_that_is_no_leak(memory: np.ndarray) -> None:
    assert judged(memory_gib=memory) == {}
