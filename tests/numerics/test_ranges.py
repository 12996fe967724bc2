from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bevctl.numerics.extent import measure
from bevctl.numerics.place import Place
from bevctl.numerics.ranges import ModuleRange, RangeCounter
from bevctl.numerics.record import OpRecord, Phase
from bevctl.numerics.trace import Trace


def _counted(tensor: Tensor, phase: Phase = "forward", gradient: bool = False) -> list[ModuleRange]:
    counter = RangeCounter()
    record = OpRecord(
        0, phase, "aten.mul.Tensor", "", Place("part", "file.py", 3), (), tuple(measure([tensor])), is_gradient=gradient
    )
    counter.add(record, [tensor])
    return counter.ranges()


def test_by_hand() -> None:
    numbers = [60000.0, -1.0, 2.0**-15, 2.0**-24, 0.0, math.nan, math.inf, 4.0]
    (r,) = _counted(torch.tensor(numbers, dtype=torch.float16))
    assert (r.module, r.phase, r.dtype, r.largest) == ("part", "forward", "float16", 60000.0)
    assert (r.largest_op, r.place) == ("aten.mul.Tensor", "file.py:3")
    assert sum(r.exponents) == 5
    assert r.headroom == pytest.approx(65504 / 60000)
    assert r.subnormal() == pytest.approx(2 / 5)
    assert r.flushed() == 0
    assert r.saturated == pytest.approx(2 / 8)
    assert r.subnormal(512.0) == pytest.approx(1 / 5)
    assert r.subnormal(1024.0) == 0


def test_loss_scale_moves_numbers_out_of_the_underflow() -> None:
    (r,) = _counted(torch.full((10,), 2.0**-30), "backward", gradient=True)
    assert (r.phase, r.flushed(1.0), r.flushed(16.0), r.flushed(32.0)) == ("backward", 1.0, 1.0, 0.0)


def test_counts_of_several_devices_are_added() -> None:
    counter = RangeCounter()
    record = OpRecord(
        0, "forward", "aten.mul.Tensor", "", Place("part", "file.py", 3), (), tuple(measure([torch.ones(3)]))
    )
    counter.add(record, [torch.ones(3)])
    counter._counts["part", "forward", "float32"].exponents[torch.device("meta")] = torch.ones(128)
    assert sum(counter.ranges()[0].exponents) == 3 + 128


def test_operations_around_the_model_do_not_count() -> None:
    assert _counted(torch.ones(2), "outside") == []


def test_what_is_empty_or_zero_has_endless_headroom() -> None:
    assert _counted(torch.empty(0)) == []
    (r,) = _counted(torch.zeros(4))
    assert (r.headroom, r.flushed()) == (math.inf, 0.0)


@given(st.lists(st.floats(2.0**-40, 2.0**15, width=32), min_size=1, max_size=30), st.integers(-10, 16))
def test_shares_equal_those_of_scaled_numbers(numbers: list[float], power: int) -> None:
    """The share is by whole binary exponents: numbers below 2^-25 are flushed, and those from there on are not."""
    (r,) = _counted(torch.tensor(numbers))
    scaled = torch.tensor(numbers, dtype=torch.float64) * 2.0**power
    assert r.flushed(2.0**power) == pytest.approx((scaled < 2.0**-25).double().mean().item())
    assert r.subnormal(2.0**power) == pytest.approx((scaled < 2.0**-14).double().mean().item())


def test_a_large_tensor_is_sampled_evenly_and_its_largest_is_exact() -> None:
    tensor = torch.ones(3, 70, 1000)
    tensor[:, :, ::2] = 2.0**-20
    tensor[2, 69, 999] = 1e5
    (r,) = _counted(tensor.permute(1, 2, 0))
    assert r.largest == 1e5
    assert 0.4 < r.subnormal() < 0.6


def test_a_trace_collects_ranges_of_every_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    counter = RangeCounter()
    with Trace(model, counter):
        model(torch.ones(2, 4)).sum().backward()
    found = {(r.module, r.phase) for r in counter.ranges()}
    assert {("0", "forward"), ("0", "backward"), ("1", "forward"), ("1", "backward")} <= found
