"""Learning rate and momentum of the published recipes, iteration by iteration."""

from __future__ import annotations

import dataclasses
import math

import pytest
from torch import nn

from bevctl.config.schema import OptimConfig
from bevctl.engine.optim import apply_schedule, build_optimizer
from bevctl.engine.schedule import Schedule

EPOCHS, EPOCH_LENGTH = 6, 700
TOTAL = EPOCHS * EPOCH_LENGTH
FUSION = OptimConfig(lr=2e-4, schedule="cosine", cosine_steps=EPOCHS, warmup=500, cyclic_momentum=True)
CYCLIC = OptimConfig(lr=1e-4, schedule="cyclic", warmup=0, cyclic_momentum=True)


def half_cosine(start: float, end: float, share: float) -> float:
    return end + 0.5 * (start - end) * (math.cos(math.pi * share) + 1)


def two_phases(iteration: int, start: float, middle: float, end: float) -> float:
    """To `middle` at 40 % of the run, then to `end`."""
    rising = int(0.4 * TOTAL)
    if iteration < rising:
        return half_cosine(start, middle, iteration / rising)
    return half_cosine(middle, end, (iteration - rising) / (TOTAL - rising))


def fusion_rate(iteration: int) -> float:
    """Cosine that changes from epoch to epoch down to a thousandth, warmed up from a third over 500 iterations."""
    regular = half_cosine(2e-4, 2e-7, (iteration // EPOCH_LENGTH) / EPOCHS)
    return regular * (1 - (1 - min(iteration, 500) / 500) * (1 - 1 / 3))


def cyclic_rate(iteration: int) -> float:
    """Ten times up, then down to a ten-thousandth."""
    return two_phases(iteration, 1e-4, 1e-3, 1e-8)


@pytest.mark.parametrize(("optim", "rate"), [(FUSION, fusion_rate), (CYCLIC, cyclic_rate)])
def test_rate_and_momentum(optim: OptimConfig, rate: object) -> None:
    """What the optimizer holds; beta1 goes from 0.9 to 0.805 and back with the cycle."""
    assert callable(rate)
    optimizer = build_optimizer(nn.Linear(1, 1), optim, optim.lr)
    schedule = Schedule(optim, TOTAL)
    for iteration in range(0, TOTAL, 13):
        apply_schedule(optimizer, schedule, iteration)
        (group,) = optimizer.param_groups
        assert group["lr"] == pytest.approx(rate(iteration), rel=1e-9)
        assert group["betas"][0] == pytest.approx(0.9 * two_phases(iteration, 1, 0.85 / 0.95, 1), rel=1e-9)


def test_momentum_stays_unless_asked_for() -> None:
    optim = dataclasses.replace(FUSION, cyclic_momentum=False)
    optimizer = build_optimizer(nn.Linear(1, 1), optim, optim.lr)
    apply_schedule(optimizer, Schedule(optim, TOTAL), TOTAL // 2)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
