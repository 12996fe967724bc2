from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bevctl.config.schema import PrecisionConfig
from bevctl.engine.scaler import LossScaler, StatisticsGuard

CPU = torch.device("cpu")


def _parameter() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return parameter, torch.optim.AdamW([parameter], lr=0.1, fused=True)


def _gradient(step: int, bad: bool) -> torch.Tensor:
    gradient = torch.tensor([0.3, -0.1, 0.2]) * (step + 1)
    if bad:
        gradient[step % 3] = float("nan") if step % 2 else float("inf")
    return gradient


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_follows_torch_grad_scaler_through_scripted_overflows(overflows: list[bool]) -> None:
    ours = LossScaler(PrecisionConfig(growth_interval=3, init_scale=1024.0), half=True, device=CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    p_ours, o_ours = _parameter()
    p_theirs, o_theirs = _parameter()
    for step, bad in enumerate(overflows):
        gradient = _gradient(step, bad)
        ours.scale((p_ours * gradient).sum()).backward()
        ours.unscale([p_ours])
        ours.step(o_ours)
        ours.update()
        theirs.scale((p_theirs * gradient).sum()).backward()
        theirs.unscale_(o_theirs)
        theirs.step(o_theirs)
        theirs.update()
        o_ours.zero_grad()
        o_theirs.zero_grad()
        assert torch.equal(p_ours, p_theirs)
        assert ours.state_dict() == theirs.state_dict()


def test_a_skipped_step_leaves_weights_and_moments_alone() -> None:
    scaler = LossScaler(PrecisionConfig(), half=True, device=CPU)
    parameter, optimizer = _parameter()
    for bad in (False, True):
        parameter.grad = _gradient(0, bad)
        before = parameter.detach().clone()
        moments = {k: v.clone() for k, v in optimizer.state[parameter].items()}
        scaler.unscale([parameter])
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, before) == bad
    assert all(torch.equal(moments[k], v) for k, v in optimizer.state[parameter].items())
    assert scaler.value.item() == 32768


@pytest.mark.parametrize(("half", "scale"), [(True, 512.0), (False, 1.0)])
def test_a_fixed_scale_skips_but_stays(half: bool, scale: float) -> None:
    scaler = LossScaler(PrecisionConfig(loss_scale=512.0), half=half, device=CPU)
    parameter, optimizer = _parameter()
    parameter.grad = _gradient(0, bad=True)
    scaler.unscale([parameter])
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.tensor([1.0, -2.0, 3.0]))
    assert scaler.found_inf.item() == 1.0
    assert scaler.value.item() == scale


def test_a_norm_that_overflows_rejects_finite_gradients() -> None:
    scaler = LossScaler(PrecisionConfig(), half=False, device=CPU)
    parameter, optimizer = _parameter()
    parameter.grad = torch.full((3,), 3e38)
    scaler.unscale([parameter])
    assert scaler.found_inf.item() == 0.0
    norm = nn.utils.clip_grad_norm_([parameter], 35.0)
    scaler.reject_if_nonfinite(norm)
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([1.0, -2.0, 3.0]))


def test_state_round_trip_and_fixed_scale_ignores_it() -> None:
    dynamic = LossScaler(PrecisionConfig(), half=True, device=CPU)
    state = {"scale": 256.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
    dynamic.load_state_dict(state)
    assert dynamic.state_dict() == state
    fixed = LossScaler(PrecisionConfig(loss_scale=512.0), half=True, device=CPU)
    fixed.load_state_dict(state)
    assert fixed.value.item() == 512.0


@pytest.mark.parametrize("skipped", [True, False])
def test_statistics_of_a_skipped_step_are_undone(skipped: bool) -> None:
    norm = nn.BatchNorm1d(2)
    guard = StatisticsGuard(nn.Sequential(norm, nn.Linear(2, 1)))
    guard.remember()
    bad = torch.tensor([[float("inf"), 1.0], [0.0, 2.0]])
    norm(bad if skipped else torch.ones(2, 2))
    guard.restore_where(torch.tensor(float(skipped)))
    statistics = [value for name, value in norm.state_dict().items() if name.startswith("running")]
    moved = not torch.equal(statistics[0], torch.zeros(2))
    assert moved != skipped
    assert all(value.isfinite().all() for value in statistics)
