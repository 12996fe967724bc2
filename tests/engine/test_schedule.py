from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.document import packaged_names
from bevctl.config.load import load
from bevctl.config.schema import OptimConfig
from bevctl.engine.schedule import Schedule, peak_lr, written_for_other_epochs
from bevctl.errors import BevctlError


def test_cosine_falls_from_one_to_min_ratio() -> None:
    schedule = Schedule(OptimConfig(warmup=0, min_ratio=0.1), total=100)
    assert schedule.lr_factor(0) == 1.0
    assert schedule.lr_factor(50) == pytest.approx(0.55)
    assert schedule.lr_factor(100) == pytest.approx(0.1)


def test_warmup_is_linear_from_its_ratio_and_multiplies_the_cosine() -> None:
    schedule = Schedule(OptimConfig(warmup=10, warmup_ratio=0.5, schedule="constant"), total=100)
    assert [schedule.lr_factor(i) for i in (0, 5, 10)] == pytest.approx([0.5, 0.75, 1.0])
    cosine = Schedule(OptimConfig(warmup=10, warmup_ratio=0.5), total=100)
    plain = Schedule(OptimConfig(warmup=0), total=100)
    assert cosine.lr_factor(5) == pytest.approx(0.75 * plain.lr_factor(5))


def test_a_cosine_in_steps_is_constant_within_an_epoch() -> None:
    """Six epochs of seven iterations: in epoch e the factor is that of a sixth of the cosine, e times."""
    optim = OptimConfig(warmup=0, min_ratio=0.1, cosine_steps=6)
    factors = [Schedule(optim, total=42).lr_factor(i) for i in range(42)]
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * epoch / 6)) for epoch in range(6) for _ in range(7)]
    assert factors == pytest.approx(expected)


@given(epochs=st.integers(2, 24), length=st.integers(1, 40_000), data=st.data())
def test_a_rate_that_falls_in_steps_falls_in_the_first_iteration_of_an_epoch(
    epochs: int, length: int, data: st.DataObject
) -> None:
    milestone = data.draw(st.integers(1, epochs - 1))
    optim = OptimConfig(schedule="steps", steps=(milestone / epochs,), step_factor=0.1, warmup=0)
    schedule = Schedule(optim, total=epochs * length)
    assert schedule.lr_factor(milestone * length - 1) == 1.0
    assert schedule.lr_factor(milestone * length) == 0.1


@given(epochs=st.integers(1, 24), length=st.integers(1, 40_000))
def test_no_step_begins_late_or_early(epochs: int, length: int) -> None:
    schedule = Schedule(OptimConfig(warmup=0, cosine_steps=epochs), total=epochs * length)
    for epoch in range(epochs):
        first, last = schedule.lr_factor(epoch * length), schedule.lr_factor((epoch + 1) * length - 1)
        assert first == last == Schedule(OptimConfig(warmup=0), total=epochs).lr_factor(epoch)


def test_cyclic_rises_to_its_peak_and_ends_low() -> None:
    schedule = Schedule(OptimConfig(schedule="cyclic", warmup=0), total=1000)
    assert schedule.lr_factor(0) == pytest.approx(1.0)
    assert schedule.lr_factor(200) == pytest.approx(5.5)
    assert schedule.lr_factor(400) == pytest.approx(10.0)
    assert schedule.lr_factor(1000) == pytest.approx(1e-4)


def test_cyclic_momentum_dips_at_the_peak_of_the_cycle() -> None:
    schedule = Schedule(OptimConfig(cyclic_momentum=True), total=1000)
    assert [schedule.beta1_factor(i) for i in (0, 400, 1000)] == pytest.approx([1.0, 0.85 / 0.95, 1.0])
    assert Schedule(OptimConfig(), total=1000).beta1_factor(400) == 1.0


@given(
    kind=st.sampled_from(["cosine", "cyclic", "constant"]),
    total=st.integers(1, 10_000),
    fraction=st.floats(0, 1),
    warmup=st.integers(0, 2000),
)
def test_factors_stay_between_their_bounds(kind: str, total: int, fraction: float, warmup: int) -> None:
    optim = OptimConfig(schedule=kind, warmup=warmup)
    factor = Schedule(optim, total).lr_factor(int(fraction * total))
    highest = optim.cyclic_peak if kind == "cyclic" else 1.0
    assert 0.0 < factor <= highest + 1e-9


def test_a_longer_epoch_keeps_the_rate_at_the_same_fraction() -> None:
    short, long = (Schedule(OptimConfig(warmup=0), total) for total in (100, 400))
    assert short.lr_factor(25) == pytest.approx(long.lr_factor(100))


def test_rules_scale_from_the_base() -> None:
    optim = OptimConfig(lr=1.0, base_batch=8, base_lr=2e-5)
    assert peak_lr(optim, 32)[0] == 1.0
    assert peak_lr(dataclasses.replace(optim, lr_scaling="linear"), 32)[0] == pytest.approx(8e-5)
    value, sentence = peak_lr(dataclasses.replace(optim, lr_scaling="sqrt"), 32)
    assert value == pytest.approx(4e-5)
    assert value == pytest.approx(2e-5 * math.sqrt(4))
    assert "4e-05" in sentence
    assert "sqrt rule from 2e-05 at batch 8" in sentence


def test_a_rule_without_a_base_is_refused() -> None:
    with pytest.raises(BevctlError, match="base_batch"):
        peak_lr(OptimConfig(lr_scaling="linear"), 8)


@pytest.mark.parametrize("name", packaged_names())
def test_a_packaged_recipe_fits_its_own_epochs(name: str) -> None:
    assert list(written_for_other_epochs(load(name).config)) == []


def test_other_epochs_than_the_recipes_are_said() -> None:
    (fusion,) = written_for_other_epochs(load("bevfusion_det", sets=["train.epochs=12"]).config)
    assert fusion.startswith("The learning rate falls in 6 steps over 12 epochs")
    (lidar,) = written_for_other_epochs(load("bevfusion_lidar", sets=["train.epochs=15"]).config)
    assert lidar.startswith("Objects are pasted to the end: data.paste.stop_epoch is 15 of 15 epochs")
    both = ["train.epochs=12", "optim.cosine_steps=12", "data.paste.stop_epoch=9"]
    assert list(written_for_other_epochs(load("bevfusion_det", sets=both).config)) == []
    counted = ["train.epochs=12", "train.schedule_iters=100"]
    assert list(written_for_other_epochs(load("bevfusion_det", sets=counted).config)) == []
