from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevctl.numerics.extent import Extent, measure

HALF, SINGLE, DOUBLE, BRAIN = torch.float16, torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
def test_counts_and_range_by_hand(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, math.nan, -2.0], [math.inf, 0.0, -math.inf]], dtype=dtype)
    (extent,) = measure([tensor])
    assert extent == Extent(dtype, (2, 3), -2.0, 1.5, nan=1, inf=2)
    assert (extent.bad, extent.largest) == (True, 2.0)


def test_several_tensors_of_several_kinds_at_once() -> None:
    extents = measure([torch.tensor(3.0), torch.empty(0, 4), torch.full((2,), math.nan), torch.ones(2, dtype=HALF)])
    assert [(e.low, e.high, e.nan) for e in extents] == [(3.0, 3.0, 0), (0.0, 0.0, 0), (0.0, 0.0, 2), (1.0, 1.0, 0)]
    assert measure([]) == []


def test_a_transposed_slice_is_measured_alone() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    tensor[0, 0] = math.inf
    assert measure([tensor.t()[1:3]]) == [Extent(SINGLE, (2, 3), 1.0, 10.0)]


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_equals_what_a_loop_over_the_numbers_says(numbers: list[float]) -> None:
    (extent,) = measure([torch.tensor(numbers)])
    finite = [number for number in numbers if math.isfinite(number)]
    assert extent.nan == sum(map(math.isnan, numbers))
    assert extent.inf == sum(map(math.isinf, numbers))
    assert (extent.low, extent.high) == ((min(finite), max(finite)) if finite else (0.0, 0.0))
