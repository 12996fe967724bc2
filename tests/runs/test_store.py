"""Figures of metrics, and records in a memory that does not grow."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.runs import store
from bevctl.runs.collect import Collector
from bevctl.runs.layout import Layout, LayoutCache, Row, parse_eta
from bevctl.runs.readers.names import scores
from bevctl.runs.records import RunLog, StepRecord
from bevctl.runs.statistics import Accumulator, median, percentile, spread
from bevctl.runs.window import Window

numbers = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(st.lists(numbers, min_size=1, max_size=8), min_size=1, max_size=6))
def test_figures_do_not_depend_on_how_values_were_parted(parts: list[list[float]]) -> None:
    total, values = Accumulator(), [value for part in parts for value in part]
    place = 0
    for part in parts:
        total.fold(part, range(place, place + len(part)))
        place += len(part)
    metric = total.metric(values)
    finite = [value for value in values if math.isfinite(value)]
    assert (metric.count, metric.nonfinite) == (len(values), len(values) - len(finite))
    assert metric.last == values[-1] or math.isnan(metric.last)
    assert metric.first_nonfinite == next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    if finite:
        assert (metric.min, metric.max) == (min(finite), max(finite))
        assert metric.mean == pytest.approx(statistics.fmean(finite), abs=1e-6)
        assert metric.p50 == pytest.approx(statistics.median(finite))
    else:
        assert (metric.mean, metric.min, metric.p95) == (None, None, None)


def test_percentiles_and_robust_spread() -> None:
    assert percentile([0.0, 10.0], 0.95) == 9.5
    assert percentile([], 0.5) is None
    assert median([3.0, math.nan, 1.0]) == 2.0
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(1.4826)
    assert spread([]) is None


def test_a_layout_maps_names_and_keeps_others() -> None:
    layout = Layout(("learning_rate", "Loss", "loss_cls", "memory", "acc", "time", "stats/object/matched_ious"))
    step = Row(layout, [0.1, 2.0, 1.5, 3072.0, 0.9, 0.5, 0.25], 3, 70, 5.0, "0:01:00").record()
    assert step == StepRecord(
        3,
        70,
        5.0,
        lr=0.1,
        loss=2.0,
        losses={"loss_cls": 1.5, "stats/object/matched_ious": 0.25},
        iter_time_s=0.5,
        memory_gib=3.0,
        eta_s=60.0,
        extra={"acc": 0.9},
    )


def test_layouts_are_made_once_a_kind_of_line() -> None:
    cache = LayoutCache()
    first = cache.of(["loss", "lr"])
    assert cache.of(["loss"]) is not first
    assert cache.of(["loss", "lr"]) is first
    assert all(cache.of([str(number)]).names == (str(number),) for number in range(200))


@pytest.mark.parametrize("text", ["", "x", "1:2", "a day, 1:2:3", "1:2:3:4"])
def test_what_is_no_eta(text: str) -> None:
    assert parse_eta(text) is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("pts_bbox_NuScenes/mAP", "mAP"),
        ("NuScenes metric/pred_instances_3d_NuScenes/NDS", "NDS"),
        ("object/map", "mAP"),
        ("map/mean/iou@max", "mIoU"),
        ("mIoU", "mIoU"),
    ],
)
def test_scores_under_the_names_everyone_knows(name: str, known: str) -> None:
    assert scores({name: 0.5}) == {name: 0.5, known: 0.5}
    assert scores({"object/car_ap_dist_0.5": 0.5}) == {"object/car_ap_dist_0.5": 0.5}


def _collector() -> Collector:
    return Collector(RunLog(Path("any"), [Path("any")], "generic"), Window())


def _row(layout: Layout, iteration: int, loss: float) -> Row:
    return Row(layout, [loss, 1024.0], 1, iteration, float(iteration))


@pytest.mark.parametrize("count", [5, 10, 11, 25, 40, 41, 1000])
@pytest.mark.parametrize("as_rows", [True, False])
def test_of_many_records_every_nth_is_kept_and_all_are_in_the_figures(
    monkeypatch: pytest.MonkeyPatch, count: int, as_rows: bool
) -> None:
    monkeypatch.setattr(store, "KEEP", 10)
    out, layout = _collector(), Layout(("loss", "memory"))
    for number in range(1, count + 1):
        row = _row(layout, number * 50, math.nan if number == 4 else float(number))
        out.step(row if as_rows else row.record())
    log = out.finish(None)
    assert log.records == count
    assert len(log.steps) <= 22
    assert (len(log.steps) == count) == (count <= 10)
    iterations = [step.iter for step in log.steps]
    assert iterations == sorted(set(iterations))
    assert iterations[-1] == count * 50
    metric = log.metrics["loss"]
    assert (metric.count, metric.nonfinite, metric.first_nonfinite, metric.last) == (count, 1, 200, count)
    assert (metric.min, metric.max) == (1.0, float(count))
    assert metric.mean == pytest.approx(sum(n for n in range(1, count + 1) if n != 4) / (count - 1))
    assert log.metrics["memory_gib"].mean == 1.0
    assert log.interval == 50


def test_a_resume_in_a_thinned_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEEP", 10)
    out, layout = _collector(), Layout(("loss", "memory"))
    for number in (*range(1, 101), *range(61, 81)):
        out.step(_row(layout, number, float(number)))
    log = out.finish(None)
    iterations = [step.iter for step in log.steps]
    assert iterations == sorted(set(iterations))
    assert iterations[-1] == 80
    assert abs(log.records - 80) <= 16, "a thinned log knows to the stride how many are replaced"
    assert [event.kind for event in log.events] == ["resume"]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_iterations_in_any_order_end_in_order(iterations: list[int]) -> None:
    out, layout = _collector(), Layout(("loss", "memory"))
    for number in iterations:
        out.step(Row(layout, [float(number), 0.0], 1, number, None))
    log = out.finish(1000.0)
    kept: list[int] = []
    for number in iterations:
        kept = [*[k for k in kept if k < number], number]
    assert [step.iter for step in log.steps] == kept
    assert log.records == len(kept)
    assert log.segments[-1].last_iter == iterations[-1]


def test_records_at_the_ends_of_epochs_do_not_decide_how_far_apart_two_are() -> None:
    out = Collector(RunLog(Path(), [], "openpcdet"), Window(None, None))
    layout = Layout(("loss",))
    for iteration in (1, 44, 45, 50, 88, 89, 100, 132, 133, 150, 176, 177, 200, 220, 221):
        out.step(Row(layout, [1.0], 1 + iteration // 44, iteration, None))
    assert out.finish(None).interval == 11
