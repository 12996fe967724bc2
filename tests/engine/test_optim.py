from __future__ import annotations

import pytest
import torch
from torch import nn

from bevctl.config.schema import OptimConfig, ParamGroupConfig
from bevctl.engine.ema import WeightAverage
from bevctl.engine.optim import (
    apply_schedule,
    build_optimizer,
    load_parameter_states,
    saved_parameter_states,
    unmatched_groups,
)
from bevctl.engine.schedule import Schedule
from bevctl.errors import BevctlError


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


GROUPS = (ParamGroupConfig("0.", lr=0.1), ParamGroupConfig("weight", decay=0.0), ParamGroupConfig("absent"))


def test_the_first_matching_group_gives_the_factors() -> None:
    optim = OptimConfig(groups=GROUPS, weight_decay=0.01)
    optimizer = build_optimizer(_model(), optim, lr=1e-3)
    factors = {n: (g["peak_lr"], g["weight_decay"]) for g in optimizer.param_groups for n in g["names"]}
    assert factors == {
        "0.weight": (pytest.approx(1e-4), 0.01),
        "0.bias": (pytest.approx(1e-4), 0.01),
        "1.weight": (1e-3, 0.0),
        "2.weight": (1e-3, 0.0),
        "1.bias": (1e-3, 0.01),
        "2.bias": (1e-3, 0.01),
    }
    assert unmatched_groups(_model(), optim) == ["absent"]


def test_frozen_parameters_are_left_out() -> None:
    model = _model()
    model[0].requires_grad_(False)
    names = [n for g in build_optimizer(model, OptimConfig(), 1e-3).param_groups for n in g["names"]]
    assert names == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_the_rate_that_is_logged_has_no_factor() -> None:
    optim = OptimConfig(groups=(ParamGroupConfig("0.", lr=0.1),), schedule="constant", warmup=0)
    optimizer = build_optimizer(_model(), optim, lr=1e-3)
    assert apply_schedule(optimizer, Schedule(optim, total=10), 0) == pytest.approx(1e-3)
    assert "0.weight" not in optimizer.param_groups[0]["names"]


def test_nothing_left_to_train_is_an_error() -> None:
    with pytest.raises(BevctlError, match="No parameter is left"):
        build_optimizer(_model().requires_grad_(False), OptimConfig(), 1e-3)


def test_schedule_reaches_every_group() -> None:
    optim = OptimConfig(groups=GROUPS, warmup=0, cyclic_momentum=True)
    optimizer = build_optimizer(_model(), optim, lr=1e-3)
    schedule = Schedule(optim, total=100)
    apply_schedule(optimizer, schedule, 40)
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(group["peak_lr"] * schedule.lr_factor(40))
        assert group["betas"] == pytest.approx((0.9 * 0.85 / 0.95, 0.999))


def _trained(groups: tuple[ParamGroupConfig, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _model()
    optimizer = build_optimizer(model, OptimConfig(groups=groups), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_state_is_carried_by_name_into_other_groups() -> None:
    model, optimizer = _trained(GROUPS)
    other = build_optimizer(model, OptimConfig(), lr=5e-3)
    assert load_parameter_states(other, saved_parameter_states(optimizer.state_dict())) == []
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(other.state[parameter][key], value), (name, key)
    assert other.param_groups[0]["peak_lr"] == 5e-3


def test_a_parameter_of_another_shape_starts_fresh() -> None:
    _, optimizer = _trained(())
    wider = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    other = build_optimizer(wider, OptimConfig(), lr=1e-2)
    fresh = load_parameter_states(other, saved_parameter_states(optimizer.state_dict()))
    assert fresh == ["2.weight", "2.bias"]


def test_average_follows_the_weights_and_gives_them_back() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average = WeightAverage(model, decay=0.5)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average.update(iteration=1000)
    with average.applied():
        assert model.weight.item() == pytest.approx(0.5)
    assert model.weight.item() == 1.0
    other = WeightAverage(model, decay=0.5)
    other.load_state_dict(average.state_dict())
    with other.applied():
        assert model.weight.item() == pytest.approx(0.5)
