"""What a replay concludes from, piece by piece: growth, likeness, suspects, ideas. No model runs here."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bevctl.config.schema import Config
from bevctl.diagnose.bundle import sound_until
from bevctl.diagnose.cause import growth_of
from bevctl.diagnose.evidence import evidence_of, suspects_of, where_of
from bevctl.diagnose.ideas import fixed_scales, for_divergence, for_range, for_samples
from bevctl.diagnose.likeness import likeness
from bevctl.diagnose.rehearsal import Result, changed
from bevctl.diagnose.trials import Trial, judged
from bevctl.engine.incident import Incident
from bevctl.errors import BevctlError
from bevctl.numerics.extent import Extent
from bevctl.numerics.place import Place
from bevctl.numerics.record import Culprit, OpRecord, Verdict

NAN, INF = math.nan, math.inf


def _incident(losses: dict[str, float], grad_norm: float, world: int = 1) -> Incident:
    return Incident(
        iteration=7,
        epoch=1,
        inner=6,
        kind="forward",
        phase="forward",
        message="",
        bad_losses=[],
        task=None,
        tokens=[["a"]],
        rank=0,
        world=world,
        losses=losses,
        loss_scale=1.0,
        lr=1e-4,
        grad_norm=grad_norm,
        grad_norms={},
        precision="fp32",
        accumulate=1,
        device="CPU",
        deterministic=False,
        versions={},
        time=0.0,
    )


def _result(losses: dict[str, float], grad_norm: float) -> Result:
    return Result(losses, sum(losses.values()), grad_norm, 1.0, skipped=False, seconds=0.1)


def _culprit(samples: tuple[int, ...] | None) -> Culprit:
    halves = Extent(torch.float16, (2, 8), -3.0, 40000.0, inf=2)
    inputs = (Extent(torch.float16, (2, 8), -1.0, 300.0),)
    record = OpRecord(5, "forward", "aten.mul.Tensor", "", Place("neck.conv", "/x/model.py", 12), inputs, (halves,))
    return Culprit("operation", record, Verdict("overflow", "finite in float32"), ("loss/a",), samples=samples)


@pytest.mark.parametrize(
    ("losses", "growth"),
    [([2.0, 1.0, 30.0, NAN], 30.0), ([5.0, 4.0, 3.0], 1.0), ([NAN, INF], 1.0), ([], 1.0), ([0.0, 2.0], 1.0)],
)
def test_growth_is_the_last_finite_loss_over_the_lowest(losses: list[float], growth: float) -> None:
    assert growth_of([{"loss": loss} for loss in losses]) == growth


@pytest.mark.parametrize(
    ("losses", "sound"),
    [([2.0, 1.9, 1.8, NAN], 2), ([2.0, 50.0, 900.0, NAN], 0), ([2.0, 1.0, 2.5, 40.0, NAN], 2), ([NAN], -1)],
)
def test_the_state_is_sound_up_to_where_the_loss_begins_to_grow(losses: list[float], sound: int) -> None:
    ring = [{"iteration": number, "loss": loss} for number, loss in enumerate(losses, start=1)]
    assert sound_until(dataclasses.replace(_incident({}, NAN), iteration=len(losses), ring=ring)) == sound


def test_nan_is_like_nan_and_a_last_bit_is_not() -> None:
    recorded = _incident({"loss/a": NAN, "loss/b": 1.0}, INF)
    same = likeness(recorded, _result({"loss/a": NAN, "loss/b": 1.0}, INF))
    assert (same.exact, same.compared) == (True, 3)
    close = likeness(recorded, _result({"loss/a": NAN, "loss/b": 1.0 + 2**-20}, INF))
    assert not close.exact
    assert close.relative == pytest.approx(2**-20, rel=1e-3)
    assert "agrees with the recorded step to 9.5e-07" in close.sentence()
    flipped = likeness(recorded, _result({"loss/a": 2.0, "loss/b": 1.0}, INF))
    assert flipped.flipped == ("loss/a",)
    assert "loss/a finite in one of them only" in flipped.sentence()


def test_gradients_of_several_ranks_are_not_compared() -> None:
    assert likeness(_incident({"loss/a": 1.0}, 3.0, world=2), _result({"loss/a": 1.0}, 99.0)).exact


def test_suspects_are_the_samples_that_broke_in_each_accumulated_batch() -> None:
    assert suspects_of(_culprit((1,)), [["a", "b"]]) == ["b"]
    assert suspects_of(_culprit((1,)), [["a", "b"], ["c", "d"]]) == ["b", "d"]
    assert suspects_of(_culprit(None), [["a", "b"]]) == ["a", "b"]


def test_evidence_names_place_ranges_and_samples() -> None:
    said = {evidence.where: evidence.what for evidence in evidence_of(_culprit((0,)), [["a", "b"]])}
    assert said["neck.conv, /x/model.py:12"] == (
        "forward aten.mul.Tensor: from float16 2x8 in -1..300, it gives float16 2x8 in -3..40000 with 2 infinite"
    )
    assert (said["it reached"], said["samples"]) == ("loss/a", "a")
    assert where_of(Place("", "", 0)) == "the model itself, no line known"


def test_ideas_begin_with_the_narrowest_change() -> None:
    config = changed(Config(), {"precision.fp32_modules": ["head"], "optim.clip": 20.0, "data.skip_samples": ["x"]})
    modules, bf16, fp32 = for_range(config, "fp16", ["neck.conv", "neck"])
    assert [idea.set for idea in modules] == [
        {"precision.fp32_modules": ["head", "neck.conv"]},
        {"precision.fp32_modules": ["head", "neck"]},
    ]
    assert (bf16[0].set, fp32[0].set) == ({"precision.dtype": "bf16"}, {"precision.dtype": "fp32"})
    assert [ladder[0].set for ladder in for_range(config, "bf16", [])[1:]] == [{"precision.dtype": "fp32"}]
    assert [idea.set["precision.loss_scale"] for idea in fixed_scales(1024.0)] == [512.0, 128.0]
    assert for_samples(config, ["y"])[0][0].set == {"data.skip_samples": ["x", "y"]}
    rates, norms, warmup = for_divergence(config, iteration=50)
    assert all(idea.from_earlier for idea in (*rates, *norms, *warmup))
    assert [idea.set["optim.clip"] for idea in norms] == [10.0, 1.0]
    assert for_divergence(config, iteration=1) == []
    assert for_divergence(config, iteration=5000)[2] == []


def test_a_scaling_rule_is_kept_when_the_rate_is_lowered() -> None:
    optim = {"optim.lr_scaling": "linear", "optim.base_batch": 8, "optim.base_lr": 2e-5}
    rates = for_divergence(changed(Config(), optim), iteration=50)[0]
    assert rates[0].set == {"optim.base_lr": pytest.approx(1.5e-5)}


def test_a_change_that_does_not_fit_is_refused() -> None:
    config = Config()
    assert changed(config, {}) == config
    with pytest.raises(BevctlError, match=r"train\.batch"):
        changed(config, {"train.batch": 0})


BROKEN_FORWARD, BROKEN_BACKWARD = (NAN, NAN, 65536.0), (2.0, INF, 65536.0)
SOUND = (2.0, 1.0, 32768.0)


@pytest.mark.parametrize(
    ("before", "tried", "cures"),
    [
        ([BROKEN_FORWARD] * 2, [SOUND, SOUND], True),
        ([BROKEN_FORWARD] * 2, [BROKEN_BACKWARD, SOUND], True),  # the scale is found as at every start
        ([BROKEN_FORWARD] * 2, [BROKEN_BACKWARD, (2.0, INF, 32768.0)], False),
        ([BROKEN_FORWARD] * 2, [BROKEN_BACKWARD, (2.0, 1.0, 65536.0)], False),  # no scale came down
        ([BROKEN_FORWARD] * 2, [BROKEN_FORWARD, SOUND], False),
        ([BROKEN_BACKWARD, SOUND], [BROKEN_BACKWARD, SOUND], False),
        ([BROKEN_FORWARD], [], False),
    ],
)
def test_a_loss_scale_on_its_way_down_hides_no_cure(
    before: list[tuple[float, ...]], tried: list[tuple[float, ...]], cures: bool
) -> None:
    baseline, trial = (
        Trial([Result({}, loss, norm, scale, not math.isfinite(norm), 0.1) for loss, norm, scale in steps], None)
        for steps in (before, tried)
    )
    cured, why = judged(trial, baseline)
    assert cured == cures
    assert ("comes down to 32768" in why) == (cures and not trial.is_finite)
