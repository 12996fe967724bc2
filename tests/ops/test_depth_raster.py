"""Depth images against a loop over the points."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.depth_raster import nearest_depth
from tests.ops.backends import BACKENDS, DEVICES, running

SIZE = (6, 8)


def cameras(seed: int, batch: int, count: int) -> Tensor:
    """Random projections (B, N, 3, 4) whose images many points fall in."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(batch, count, 3, 4, generator=generator)
    projection[..., :2, 3] += 8
    projection[..., 2, 3] += 3
    return projection


def loop(points: list[Tensor], projection: Tensor) -> Tensor:
    out = torch.zeros(*projection.shape[:2], *SIZE)
    for b, n in torch.cartesian_prod(torch.arange(len(points)), torch.arange(projection.shape[1])).tolist():
        for point in points[b][:, :3].double():
            u, v, depth = (projection[b, n].double() @ torch.cat([point, point.new_ones(1)])).tolist()
            depth = min(max(depth, 1e-5), 1e5)
            column, row = math.floor(u / depth), math.floor(v / depth)
            if 0 <= column < SIZE[1] and 0 <= row < SIZE[0] and not 0 < out[b, n, row, column] <= depth:
                out[b, n, row, column] = depth
    return out


@pytest.mark.parametrize("name", BACKENDS)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 3))
@settings(max_examples=15)
def test_equals_the_loop(name: str, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = [torch.randn(size, 5, generator=generator) for size in (40, 0, 17)]
    projection = cameras(seed, 3, count)
    with running(name, "cpu"):
        found = nearest_depth(points, projection, SIZE)
    # A point on the border of two pixels may fall in either.
    expected = loop(points, projection)
    assert (~torch.isclose(found, expected, rtol=1e-4)).sum() <= 1


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_both_backends_give_the_same_bits(device: str) -> None:
    cloud = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    cloud[:3] = torch.tensor([math.nan, math.inf, 1e30])[:, None]
    projection = cameras(0, 2, 3).to(device)
    # Points as columns of something wider, and as the transpose of rows.
    points = [cloud.to(device)[:, 1:4], cloud.T.contiguous().to(device).T]
    results = []
    for name in BACKENDS:
        with running(name, device):
            results.append(nearest_depth(points, projection, SIZE))
    assert torch.equal(*results)
    assert (results[0] > 0).sum() > 100


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_by_hand(name: str, device: str) -> None:
    """Two points in the pixel (4, 3), one behind the camera, one beside the image."""
    projection = torch.tensor([[[[2.0, 0, 4, 0], [0, 2, 1, 1], [0, 0, 1, 0]]]], device=device)
    points = torch.tensor([[0.0, 4, 4], [0.2, 2.1, 2], [0, 1, -1], [9, 1, 1]], device=device)
    with running(name, device):
        image = nearest_depth([points], projection, SIZE)
    expected = torch.zeros(1, 1, *SIZE)
    expected[0, 0, 3, 4] = 2.0
    assert torch.equal(image.cpu(), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_to_draw(name: str) -> None:
    projection = cameras(0, 1, 2)
    with running(name, "cpu"):
        assert not nearest_depth([torch.empty(0, 3)], projection, SIZE).any()
        assert nearest_depth([], projection[:0], SIZE).shape == (0, 2, *SIZE)
        assert nearest_depth([torch.ones(5, 3)], projection[:, :0], SIZE).shape == (1, 0, *SIZE)


def test_wrong_shapes_are_named() -> None:
    projection = cameras(0, 2, 1)
    with pytest.raises(ValueError, match=r"for 1 clouds, got \(2, 1, 3, 4\)"):
        nearest_depth([torch.ones(5, 3)], projection, SIZE)
