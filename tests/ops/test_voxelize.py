"""Voxelisation against a plain loop, by hand, and against the recorded run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.voxelize import grid_shape, voxelize
from tests import golden

SIZE = (0.5, 0.5, 1.0)
RANGE = (-2.0, -1.0, -1.0, 2.0, 1.0, 1.0)


def loop_reference(points: list[Tensor], max_points: int, max_voxels: int) -> dict[tuple[int, ...], list[np.ndarray]]:
    """Stored points of each voxel (b, x, y, z), point by point."""
    low, size = np.array(RANGE[:3], dtype=np.float32), np.array(SIZE, dtype=np.float32)
    stored: dict[tuple[int, ...], list[np.ndarray]] = {}
    for sample, cloud in enumerate(points):
        opened = 0
        for point in cloud.numpy():
            cell = np.floor((point[:3] - low) / size)
            if not ((cell >= 0) & (cell < grid_shape(SIZE, RANGE))).all():
                continue
            key = (sample, *(int(c) for c in cell))
            if key not in stored:
                if opened == max_voxels:
                    continue
                opened += 1
                stored[key] = []
            if len(stored[key]) < max_points:
                stored[key].append(point)
    return stored


def clouds(seed: int, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, 5, generator=generator) * 5 - 2.5 for size in sizes]


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    max_points=st.integers(1, 4),
    max_voxels=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_loop(seed: int, sizes: list[int], max_points: int, max_voxels: int) -> None:
    points = clouds(seed, sizes)
    stored = loop_reference(points, max_points, max_voxels)
    voxels = voxelize(points, SIZE, RANGE, max_points, max_voxels)

    coords = [tuple(row) for row in voxels.coords.tolist()]
    assert coords == sorted(stored)
    assert voxels.counts.tolist() == [len(stored[key]) for key in coords]
    means = [sum(stored[key]) / np.float32(len(stored[key])) for key in coords]
    assert voxels.features.shape == (len(coords), 5)
    assert np.array_equal(voxels.features.numpy(), np.array(means, dtype=np.float32).reshape(-1, 5))


def test_limits_follow_the_order_of_arrival() -> None:
    first, second, third = [0.1, 0.1, 0.1, 1.0], [-1.9, 0.1, 0.1, 2.0], [0.2, 0.2, 0.2, 5.0]
    voxels = voxelize([torch.tensor([first, second, third])], SIZE, RANGE, max_points=1, max_voxels=1)
    assert voxels.coords.tolist() == [[0, 4, 2, 1]]
    assert voxels.features.tolist() == [pytest.approx(first)]

    voxels = voxelize([torch.tensor([first, second, third])], SIZE, RANGE, max_points=2, max_voxels=2)
    assert voxels.coords.tolist() == [[0, 0, 2, 1], [0, 4, 2, 1]]
    assert voxels.counts.tolist() == [1, 2]
    assert voxels.features[:, 3].tolist() == [2.0, 3.0]


def test_bounds_and_bad_values() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[-2.0, -1.0, -1.0], [2.0, 0.0, 0.0], [-2.001, 0.0, 0.0], [nan, 0.0, 0.0], [0.0, inf, 0.0], [1e30, 0.0, 0.0]]
    voxels = voxelize([torch.tensor(rows)], SIZE, RANGE, max_points=5, max_voxels=10)
    assert voxels.coords.tolist() == [[0, 0, 0, 0]]


def test_empty_samples_keep_their_place() -> None:
    point = torch.tensor([[0.0, 0.0, 0.0, 7.0]])
    voxels = voxelize([torch.empty(0, 4), point, torch.empty(0, 4)], SIZE, RANGE, max_points=5, max_voxels=10)
    assert voxels.coords.tolist() == [[1, 4, 2, 1]]
    nothing = voxelize([torch.empty(0, 4)], SIZE, RANGE, max_points=5, max_voxels=10)
    assert nothing.features.shape == (0, 4)
    assert nothing.coords.shape == (0, 4)


def test_half_precision_points_are_averaged_in_float32() -> None:
    points = torch.tensor([[0.1, 0.1, 0.1, 2048.0], [0.1, 0.1, 0.1, 2049.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        voxels = voxelize([points], SIZE, RANGE, max_points=5, max_voxels=10)
    assert voxels.features.dtype == torch.float32
    assert voxels.features[0, 3] == 2048.5


def test_input_stays_as_it_was() -> None:
    points = clouds(0, [50])
    before = points[0].clone()
    voxelize(points, SIZE, RANGE, max_points=2, max_voxels=3)
    assert torch.equal(points[0], before)


@pytest.mark.parametrize("points", [[], [torch.zeros(3)], [torch.zeros(4, 5), torch.zeros(4, 2)]])
def test_wrong_shapes_are_named(points: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="got"):
        voxelize(points, SIZE, RANGE, max_points=2, max_voxels=3)


@golden.needs_golden
def test_recorded_voxels() -> None:
    voxels = voxelize(golden.points(), (0.075, 0.075, 0.2), (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0), 10, 160_000)
    count = torch.bincount(voxels.coords[:, 0])
    assert count.tolist() == golden.recorded()["voxels/count"].tolist()
    golden.assert_matches("voxels.coords_sorted_by_bxyz", voxels.coords, tolerance=0)
    golden.assert_matches("voxels.features_sorted_by_bxyz", voxels.features)
