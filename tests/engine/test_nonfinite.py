"""What a step was that was not finite, told from scripted histories of the loss scale."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.engine.nonfinite import Classifier, Nonfinite
from bevctl.engine.recorder import StepOutcome

from .outcomes import ScriptedScaler, outcome


def _kinds(outcomes: Iterable[StepOutcome], *, dynamic: bool = True, fresh: bool = True) -> dict[int, str]:
    """Kind by iteration of the steps that were not finite, in an FP16 run."""
    classifier = Classifier(scaled=True, dynamic=dynamic, backoff=0.5, fresh=fresh)
    found = ((step.record.iter, classifier.observe(step)) for step in outcomes)
    return {iteration: nonfinite.kind for iteration, nonfinite in found if nonfinite is not None}


def _one(step: StepOutcome, *, scaled: bool = False) -> Nonfinite:
    found = Classifier(scaled=scaled, dynamic=scaled, backoff=0.5, fresh=True).observe(step)
    assert found is not None
    return found


def test_a_fresh_scale_comes_down_and_then_probes_once_an_interval() -> None:
    kinds = _kinds(ScriptedScaler(growth_interval=200).run(itertools.repeat(4096.0, 1000)))
    assert kinds == dict.fromkeys(range(1, 5), "calibration") | dict.fromkeys((205, 406, 607, 808), "growth_probe")


@settings(max_examples=30)
@given(st.integers(0, 16), st.integers(120, 400))
def test_a_constant_limit_is_always_benign(exponent: int, interval: int) -> None:
    steps = ScriptedScaler(growth_interval=interval).run(itertools.repeat(2.0**exponent, 2000))
    assert set(_kinds(steps).values()) <= {"calibration", "growth_probe"}


def test_an_overflow_at_a_scale_that_had_worked_is_no_probe() -> None:
    limits = [4096.0] * 300 + [2048.0] + [4096.0] * 300
    assert _kinds(ScriptedScaler(scale=4096.0).run(iter(limits))) == {301: "overflow"}


def test_two_overflows_after_growth_are_a_probe_and_an_overflow() -> None:
    limits = [512.0] * 300 + [256.0] * 2 + [512.0] * 100
    scaler = ScriptedScaler(scale=512.0, growth_interval=300)
    assert _kinds(scaler.run(iter(limits))) == {301: "growth_probe", 302: "overflow"}


def test_a_restored_scale_is_not_searched_again() -> None:
    steps = ScriptedScaler(scale=1024.0).run(iter([512.0] * 3))
    assert _kinds(steps, fresh=False) == {1: "overflow"}


def test_nothing_fits_any_more_is_a_collapse() -> None:
    limits = [4096.0] * 300 + [0.0] * 12
    kinds = _kinds(ScriptedScaler(scale=4096.0).run(iter(limits)))
    assert [kinds[i] for i in range(301, 306)] == ["overflow"] * 4 + ["rising"]
    assert {kinds[i] for i in range(306, 313)} == {"collapse"}


def test_a_search_that_ends_below_one_is_a_collapse() -> None:
    kinds = _kinds(ScriptedScaler(scale=8.0).run(itertools.repeat(0.0, 5)))
    assert kinds == {1: "calibration", 2: "calibration", 3: "calibration", 4: "collapse", 5: "collapse"}


def test_news_is_the_first_of_a_row_or_what_is_graver() -> None:
    classifier = Classifier(scaled=True, dynamic=True, backoff=0.5, fresh=False)
    losses = {"loss/map/divider/focal": math.nan}
    steps = [
        *(outcome(skipped=True, scale=scale) for scale in (64.0, 32.0)),
        *(outcome(skipped=True, scale=scale, losses=losses) for scale in (16.0, 8.0)),
        outcome(skipped=True, scale=4.0),
        outcome(scale=2.0),
        outcome(skipped=True, scale=2.0),
    ]
    found = [classifier.observe(step) for step in steps]
    assert [step and (step.kind, step.news) for step in found] == [
        ("overflow", True),
        ("overflow", False),
        ("forward", True),
        ("forward", False),
        ("overflow", False),
        None,
        ("overflow", True),
    ]


def test_overflows_that_come_more_often_are_rising() -> None:
    bad = {230, 320, 420, 430, 440, 450, 460, 470, 480}
    steps = [outcome(i, skipped=i in bad, scale=512.0) for i in range(1, 500)]
    kinds = _kinds(steps, dynamic=False)
    assert kinds[230] == kinds[320] == "overflow"
    assert kinds[480] == "rising"
    steady = [outcome(i, skipped=i % 40 == 0, scale=512.0) for i in range(1, 2000)]
    assert set(_kinds(steady, dynamic=False).values()) == {"overflow"}


def test_a_loss_that_is_not_finite_is_forward_at_any_scale() -> None:
    losses = {"loss/map/divider/focal": math.nan, "loss/object/loss_bbox": 1.0, "stats/object/iou": math.nan}
    for scaled in (False, True):
        found = _one(outcome(skipped=True, losses=losses), scaled=scaled)
        assert (found.kind, found.phase, found.task) == ("forward", "forward", "map")
        assert found.losses == ("loss/map/divider/focal",)
        assert not found.benign


def test_two_tasks_are_no_one_task() -> None:
    losses = {"loss/map/divider/focal": math.nan, "loss/object/loss_bbox": math.inf}
    assert _one(outcome(skipped=True, losses=losses)).task is None


def test_gradients_alone_name_the_head_they_come_from() -> None:
    norms = {"encoders.camera": math.nan, "heads.object": 2.0, "heads.map": math.nan}
    found = _one(outcome(skipped=True, grad_norms=norms))
    assert (found.kind, found.phase, found.task) == ("backward", "backward", "map")
    assert "encoders.camera, heads.map" in found.where
    assert _one(outcome(skipped=True, grad_norms={"encoders.camera": math.inf})).task is None


@pytest.mark.parametrize("scaled", [False, True])
def test_finite_steps_are_nothing(scaled: bool) -> None:
    classifier = Classifier(scaled=scaled, dynamic=scaled, backoff=0.5, fresh=True)
    assert not Counter(classifier.observe(outcome(i)) for i in range(1, 50)) - Counter({None: 49})
