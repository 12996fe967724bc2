"""The clock gives each part its own time, forward and backward, and all of it adds up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.measure.part_clock import PartClock
from bevctl.models.layers import recompute

CPU = torch.device("cpu")
NAP_S = 0.02


class _Slow(torch.autograd.Function):
    """The identity, which takes its time in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class _Part(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.times = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        slowed: Tensor = _Slow.apply(x, *self.times)
        return slowed * self.weight


class _Model(nn.Module):
    """Two parts in a row and a head with a slow loss."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.second = _Part(NAP_S, 0.0), _Part(0.0, NAP_S)
        self.heads = nn.ModuleDict({"object": _Part(0.0, 0.0)})
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.second(recompute(self.first, x, enabled=self.recomputed))
        out = self.heads["object"](hidden)
        loss: Tensor = _Slow.apply(out.sum(), NAP_S, NAP_S)
        return {"loss/object/sum": loss, "stats/object/largest": out.detach().max()}


PARTS = ("first", "second", "heads.object")


def _one_step(model: _Model) -> tuple[dict[str, float], float]:
    clock = PartClock(model, PARTS, CPU)
    started = time.perf_counter()
    with clock.attached(), clock.step():
        model(torch.ones(2))["loss/object/sum"].backward()
        time.sleep(NAP_S)
    return clock.seconds()[0], time.perf_counter() - started


@pytest.mark.parametrize("slow", ["forward/first", "forward/object loss", "backward/object loss", "backward/second"])
def test_each_part_has_its_own_time(slow: str) -> None:
    assert _one_step(_Model())[0][slow] > 0.9 * NAP_S


def test_fast_parts_have_none_and_the_sum_is_the_step() -> None:
    times, total = _one_step(_Model())
    for fast in ("forward/second", "forward/heads.object", "backward/first", "backward/heads.object", "data"):
        assert times[fast] < 0.9 * NAP_S, fast
    assert times["optimizer"] > 0.9 * NAP_S
    assert sum(times.values()) == pytest.approx(total, rel=0.1)


def test_recomputation_belongs_to_the_backward_pass() -> None:
    times, _ = _one_step(_Model(recomputed=True))
    assert NAP_S * 0.9 < times["forward/first"] < 1.8 * NAP_S
    assert times["backward/first"] > 0.9 * NAP_S


def test_every_step_is_told_and_the_hooks_go() -> None:
    model = _Model()
    clock = PartClock(model, PARTS, CPU)
    with clock.attached():
        for _ in range(2):
            with clock.step():
                model(torch.ones(2))["loss/object/sum"].backward()
    first, second = clock.seconds()
    assert first.keys() == second.keys()
    assert not model._forward_hooks
    assert not model.first._forward_pre_hooks


def test_on_a_cpu_the_host_does_the_work() -> None:
    model = _Model()
    clock = PartClock(model, PARTS, CPU)
    with clock.attached(), clock.step():
        model(torch.ones(2))["loss/object/sum"].backward()
    (times,), (host,) = clock.seconds(), clock.host_seconds()
    assert times.keys() == host.keys()
    assert sum(host.values()) == pytest.approx(sum(times.values()), rel=0.05)
