"""Budgets and policies, step by step."""

from __future__ import annotations

import math

import pytest

from bevctl.engine.guard import FutilityWatch, NonfiniteGuard, Policy
from bevctl.engine.nonfinite import Nonfinite
from bevctl.errors import BevctlError, ExitCode

from .outcomes import outcome

BAD = Nonfinite("forward", ("loss/object/loss_heatmap",), ())
PROBE = Nonfinite("growth_probe", (), ("heads.map",))


def _decide(guard: NonfiniteGuard, found: Nonfinite | None, scale: float = 512.0) -> str:
    return guard.decide(outcome(7, skipped=found is not None, scale=scale), found)


@pytest.mark.parametrize(
    ("policy", "decision"), [("skip", "skip"), ("lower_scale", "lower_scale"), ("fp32_module", "fp32_module")]
)
def test_a_policy_acts_on_what_is_not_benign(policy: str, decision: str) -> None:
    guard = NonfiniteGuard(Policy(policy), dynamic=True)
    assert _decide(guard, None) == "skip"
    assert _decide(guard, PROBE) == "skip"
    assert _decide(guard, BAD) == decision


def test_halt_ends_the_run_at_once_but_not_for_a_probe() -> None:
    guard = NonfiniteGuard(Policy("halt"), dynamic=True)
    assert _decide(guard, PROBE) == "skip"
    with pytest.raises(BevctlError, match="on_nonfinite is halt") as caught:
        _decide(guard, BAD)
    assert caught.value.code == ExitCode.NONFINITE
    assert "iteration 7" in caught.value.message


def test_a_row_is_broken_by_a_good_step() -> None:
    guard = NonfiniteGuard(Policy(in_a_row=3), dynamic=False)
    for found in (BAD, BAD, None, BAD, BAD):
        assert _decide(guard, found) == "skip"
    with pytest.raises(BevctlError, match="3 steps in a row"):
        _decide(guard, PROBE)


def test_a_thousand_steps_may_hold_so_many_and_no_more() -> None:
    guard = NonfiniteGuard(Policy(per_thousand=4), dynamic=False)
    for cycle in range(40):  # 4 of 1000 are fine for ever, and probes do not count
        for step in range(250):
            assert _decide(guard, BAD if step == 0 else PROBE if step == 9 else None) == "skip", cycle
    for found in (BAD, None):
        assert _decide(guard, found) == "skip"
    with pytest.raises(BevctlError, match="5 of the last 1000 steps were not finite"):
        _decide(guard, BAD)


def test_a_dynamic_scale_below_one_ends_the_run_and_a_fixed_one_does_not() -> None:
    assert _decide(NonfiniteGuard(Policy(), dynamic=False), BAD, scale=0.5) == "skip"
    with pytest.raises(BevctlError, match=r"loss scale 0\.5"):
        _decide(NonfiniteGuard(Policy(), dynamic=True), BAD, scale=0.5)


def test_rewinds_follow_the_budget_and_are_capped() -> None:
    guard = NonfiniteGuard(Policy("rewind", in_a_row=2, rewinds=2), dynamic=False)
    assert [_decide(guard, BAD) for _ in range(4)] == ["skip", "rewind", "skip", "rewind"]
    assert guard.rewinds == 2
    _decide(guard, BAD)
    with pytest.raises(BevctlError, match="rewound 2 times"):
        _decide(guard, BAD)


def _conclusion(*steps: tuple[Nonfinite | None, float]) -> str:
    watch = FutilityWatch()
    for found, loss in steps:
        watch.observe(outcome(skipped=found is not None, losses={"loss/object/loss_heatmap": loss}), found)
    return watch.conclusion()


def test_a_run_that_trained_has_nothing_to_say() -> None:
    assert _conclusion((None, 1.0), (BAD, math.nan), (None, 0.0)) == ""
    assert _conclusion() == ""


def test_a_loss_of_zero_is_called_so() -> None:
    assert "exactly 0 in all 3 steps" in _conclusion(*[(None, 0.0)] * 3)
    watch = FutilityWatch()
    said = [watch.observe(outcome(losses={"loss/map/divider/focal": 0.0}), None) for _ in range(120)]
    assert [index for index, sentence in enumerate(said) if sentence] == [49]
    assert "exactly 0 in all 50 steps" in said[49]


def test_a_run_of_skipped_steps_is_called_so_and_fails_when_no_search_explains_it() -> None:
    assert _conclusion((PROBE, 1.0), (PROBE, 1.0)).startswith("all 2 steps were skipped")
    assert _conclusion((PROBE, 1.0), (PROBE, 1.0), (BAD, 1.0), (None, 1.0)) == ""
    assert _conclusion((BAD, math.nan), (None, 1.0)) == ""
    with pytest.raises(BevctlError, match="3 of 4 steps were skipped as not finite") as caught:
        _conclusion((BAD, math.nan), (None, 1.0), (BAD, math.nan), (BAD, math.nan))
    assert caught.value.code == ExitCode.NONFINITE
