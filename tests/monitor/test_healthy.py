"""Negative controls: healthy runs in many shapes, and the healthy real logs, raise nothing above info."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.console import strict_json
from bevctl.runs.source import open_source
from tests.monitor.runs import Values, judge, loud, make_log

LOGS = Path(__file__).parents[2].parent / "shared" / "logs"
HEALTHY = ("01_", "03_", "16_", "17_", "18_mmcv_pointpillars_20220821_233842", "19_", "23_", "30_", "35_", "36_")
TROUBLE = {
    "06_": {"LOAD002": "fail"},
    "09_": {"RUN002": "fail", "TASK001": "warn"},
    "11_": {"TASK001": "warn", "LOAD001": "warn", "EVAL002": "warn"},
    "14_": {"NAN001": "warn", "LOSS001": "warn"},
    "21_": {"CKPT001": "fail", "RUN002": "fail"},
    "31_": {"TIME002": "warn"},
    "33_": {"NAN001": "fail"},
    "37_": {"NAN001": "fail"},
    "39_": {"TIME002": "warn"},
}
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason="the real logs are not beside this checkout")


@st.composite
def healthy_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Shape of a run that nothing is wrong with: length, log interval, schedule, noise, scale, memory, evaluations."""
    interval = draw(st.sampled_from([1, 10, 20, 50, 100]))
    records = draw(st.integers(1, 1500 if interval == 1 else 400))
    return {
        "interval": interval,
        "records": records,
        "seed": draw(st.integers(0, 2**32 - 1)),
        "schedule": draw(st.sampled_from(["cosine", "cyclic", "step", "restarts"])),
        "noise": draw(st.sampled_from([0.0, 0.02, 0.1])),
        "first": draw(st.sampled_from([interval, interval, 30_000])),
        "parts": draw(st.integers(0, 4)),
        "overflows": draw(st.booleans()),
        "fast_start": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 512.0, 65536.0])),
        "heatmap_start": draw(st.booleans()),
    }


def columns_of(shape: dict[str, Any]) -> dict[str, Values]:
    records, interval = int(shape["records"]), int(shape["interval"])
    generator = np.random.default_rng(int(shape["seed"]))
    share = np.arange(records) / max(records - 1, 1)
    per_iteration = 3.0 if interval == 1 else 1.0
    lr = schedule(str(shape["schedule"]), share)
    scatter = 1 + float(shape["noise"]) * per_iteration * generator.standard_normal(records).clip(-2.5, 2.5)
    loss = (2 + 6 * np.exp(-6 * share) + 0.4 * lr / 2e-4) * np.abs(scatter)
    if shape["heatmap_start"] and shape["first"] == interval:
        loss[0] += 600
    norms = 12 * generator.lognormal(0, 0.2, records)
    if shape["overflows"]:
        norms[generator.random(records) < 0.022 * interval / 50] = np.inf
        if shape["first"] == interval:
            norms[: max(16 // interval, 1)] = np.nan
    times = 0.6 * generator.lognormal(0, 0.04, records)
    times[200::200] = 70.0
    if shape["fast_start"]:
        times[0] *= 4
    memory = np.maximum.accumulate(18 + generator.gumbel(0, 0.05, records).clip(-0.3, 0.3))
    parts = {
        f"loss/object/part{n}": loss / 4 * (1 + 0.01 * generator.standard_normal(records))
        for n in range(int(shape["parts"]))
    }
    columns: dict[str, Values] = {"loss": loss, "grad_norm": norms, "lr": lr, "iter_time_s": times, **parts}
    columns |= {"data_time_s": 0.02 * generator.lognormal(0, 0.5, records), "memory_gib": memory}
    if shape["scale"] is not None:
        columns["loss_scale"] = scales(float(shape["scale"]), records, interval, generator)
        columns["skipped_steps"] = np.cumsum(generator.random(records) < 0.0005 * interval)
    return columns


def schedule(name: str, share: np.ndarray) -> np.ndarray:
    if name == "cosine":
        return 1e-6 + 2e-4 * (1 + np.cos(np.pi * share)) / 2 * np.minimum(1, 0.3 + 20 * share)
    if name == "cyclic":
        return 2e-5 + 1.8e-4 * np.interp(share, [0, 0.4, 1], [0, 1, 0])
    if name == "step":
        return 2e-4 * 0.1 ** np.floor(3 * share)
    return 2e-6 + 2e-4 * (1 + np.cos(np.pi * (4 * share % 1))) / 2


def scales(start: float, records: int, interval: int, generator: np.random.Generator) -> np.ndarray:
    """A dynamic scale that doubles and halves about every 5000 iterations, as it does when it grows after 2000 good
    ones; 512 stays."""
    if start == 512:
        return np.full(records, 512.0)
    often = 0.0002 * interval
    power = np.cumsum(generator.choice([-1, 0, 1], records, p=[often, 1 - 2 * often, often])).clip(-2, 2)
    return 2.0 ** (14 + power)


@settings(max_examples=150, deadline=None)
@given(healthy_runs())
def test_healthy_runs_in_many_shapes_raise_nothing_above_info(shape: dict[str, Any]) -> None:
    log = make_log(
        int(shape["records"]),
        columns_of(shape),
        interval=int(shape["interval"]),
        first=int(shape["first"]),
    )
    assert loud(judge(log)) == {}


NAMES = ("loss", "grad_norm", "lr", "iter_time_s", "data_time_s", "memory_gib", "loss_scale", "skipped_steps", "a.loss")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 80),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.none() | st.floats(), min_size=1, max_size=4), max_size=9),
    st.integers(0, 2**32 - 1),
    st.integers(1, 100),
)
def test_no_numbers_whatever_make_a_rule_raise(
    records: int, values: dict[str, list[float | None]], seed: int, interval: int
) -> None:
    generator = np.random.default_rng(seed)
    columns = {name: [some[i] for i in generator.integers(0, len(some), records)] for name, some in values.items()}
    report = judge(make_log(records, columns, interval=interval))
    json.dumps(strict_json(report.document()), allow_nan=False)


@needs_logs
@pytest.mark.parametrize("start", HEALTHY)
def test_real_logs_of_healthy_runs(start: str) -> None:
    for path in sorted(LOGS.glob(f"{start}*")):
        report = judge(open_source(path).read(), now=time.time())
        assert loud(report) == {}, path.name
        assert report.status == "pass"


@needs_logs
@pytest.mark.parametrize("start", TROUBLE)
def test_known_trouble_in_real_logs(start: str) -> None:
    (path,) = LOGS.glob(f"{start}*")
    assert loud(judge(open_source(path).read(), now=time.time())) == TROUBLE[start]


@needs_logs
def test_a_log_of_a_run_that_died_before_its_first_record_cannot_be_judged() -> None:
    report = judge(open_source(next(LOGS.glob("18_*205041*"))).read(), now=time.time())
    assert (report.status, report.state.name, loud(report)) == ("unknown", "ended", {})


@needs_logs
def test_the_reason_of_a_killed_run_is_not_in_its_log() -> None:
    report = judge(open_source(next(LOGS.glob("18_*205110*"))).read(), now=time.time())
    assert (report.status, report.state.name) == ("pass", "ended")
