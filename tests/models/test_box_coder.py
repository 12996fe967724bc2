from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.models.box_coder import CODE_SIZE, CODE_WEIGHTS, BevGrid, decode, encode

GRID = BevGrid(lower=(-54.0, -54.0), cell=(0.6, 0.6), shape=(180, 180))


def test_a_box_by_hand() -> None:
    box = torch.tensor([0.0, -54.0, -1.0, math.e, 1.0, math.e**2, math.pi / 2, 3.0, -1.0])
    code = encode(box, GRID)
    torch.testing.assert_close(code, torch.tensor([90.0, 0, -1, 1, 0, 2, 1, 0, 3, -1]), atol=1e-5, rtol=1e-5)
    assert len(code) == len(CODE_WEIGHTS) == CODE_SIZE


def test_x_and_y_have_their_own_cells() -> None:
    grid = BevGrid(lower=(0.0, -10.0), cell=(0.5, 2.0), shape=(10, 10))
    assert grid.to_cells(torch.tensor([2.0, -6.0])).tolist() == [4.0, 2.0]
    assert grid.upper == (5.0, 10.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3),
    st.lists(st.floats(0.125, 16, width=32), min_size=3, max_size=3),
    st.floats(-3.125, 3.125, width=32),
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=2),
)
def test_decode_undoes_encode(centre: list[float], size: list[float], yaw: float, velocity: list[float]) -> None:
    box = torch.tensor([*centre, *size, yaw, *velocity], dtype=torch.float64)
    torch.testing.assert_close(decode(encode(box, GRID), GRID), box, rtol=1e-9, atol=1e-9)


def test_an_unknown_velocity_stays_unknown_and_spoils_nothing_else() -> None:
    box = torch.tensor([1.0, 2, 0, 4, 2, 1.5, 0.3, math.nan, math.nan])
    code = encode(box, GRID)
    assert code.isnan().tolist() == [False] * 8 + [True, True]
