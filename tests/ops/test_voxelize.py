"""Voxelisation against a plain loop, by hand, and against the recorded run, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.voxelize import Voxels, grid_shape, padded_voxels, voxelize
from tests import golden
from tests.ops.backends import BACKENDS, CUDA, DEVICES, running
from tests.waits import host_never_waits

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


def on(name: str, points: list[Tensor], max_points: int, max_voxels: int) -> Voxels:
    """`voxelize` with a backend."""
    with running(name, "cpu"):
        return voxelize(points, SIZE, RANGE, max_points, max_voxels)


def clouds(seed: int, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, 5, generator=generator) * 5 - 2.5 for size in sizes]


@pytest.mark.parametrize("name", BACKENDS)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    max_points=st.integers(1, 4),
    max_voxels=st.integers(1, 40),
)
@settings(max_examples=40)
def test_equals_the_loop(name: str, seed: int, sizes: list[int], max_points: int, max_voxels: int) -> None:
    points = clouds(seed, sizes)
    stored = loop_reference(points, max_points, max_voxels)
    with running(name, "cpu"):
        voxels = voxelize(points, SIZE, RANGE, max_points, max_voxels)

    coords = [tuple(row) for row in voxels.coords.tolist()]
    assert coords == sorted(stored)
    assert voxels.counts.tolist() == [len(stored[key]) for key in coords]
    means = [sum(stored[key]) / np.float32(len(stored[key])) for key in coords]
    assert voxels.features.shape == (len(coords), 5)
    assert np.array_equal(voxels.features.numpy(), np.array(means, dtype=np.float32).reshape(-1, 5))


@pytest.mark.parametrize("name", BACKENDS)
def test_limits_follow_the_order_of_arrival(name: str) -> None:
    first, second, third = [0.1, 0.1, 0.1, 1.0], [-1.9, 0.1, 0.1, 2.0], [0.2, 0.2, 0.2, 5.0]
    voxels = on(name, [torch.tensor([first, second, third])], max_points=1, max_voxels=1)
    assert voxels.coords.tolist() == [[0, 4, 2, 1]]
    assert voxels.features.tolist() == [pytest.approx(first)]

    voxels = on(name, [torch.tensor([first, second, third])], max_points=2, max_voxels=2)
    assert voxels.coords.tolist() == [[0, 0, 2, 1], [0, 4, 2, 1]]
    assert voxels.counts.tolist() == [1, 2]
    assert voxels.features[:, 3].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("name", BACKENDS)
def test_bounds_and_bad_values(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[-2.0, -1.0, -1.0], [2.0, 0.0, 0.0], [-2.001, 0.0, 0.0], [nan, 0.0, 0.0], [0.0, inf, 0.0], [1e30, 0.0, 0.0]]
    voxels = on(name, [torch.tensor(rows)], max_points=5, max_voxels=10)
    assert voxels.coords.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("name", BACKENDS)
def test_empty_samples_keep_their_place(name: str) -> None:
    point = torch.tensor([[0.0, 0.0, 0.0, 7.0]])
    voxels = on(name, [torch.empty(0, 4), point, torch.empty(0, 4)], max_points=5, max_voxels=10)
    assert voxels.coords.tolist() == [[1, 4, 2, 1]]
    nothing = on(name, [torch.empty(0, 4)], max_points=5, max_voxels=10)
    assert nothing.features.shape == (0, 4)
    assert nothing.coords.shape == (0, 4)


@pytest.mark.parametrize("name", BACKENDS)
def test_half_precision_points_are_averaged_in_float32(name: str) -> None:
    points = torch.tensor([[0.1, 0.1, 0.1, 2048.0], [0.1, 0.1, 0.1, 2049.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        voxels = on(name, [points], max_points=5, max_voxels=10)
    assert voxels.features.dtype == torch.float32
    assert voxels.features[0, 3] == 2048.5


@pytest.mark.parametrize("device", DEVICES)
def test_padding_follows_the_voxels(device: str) -> None:
    points = [cloud.to(device) for cloud in clouds(3, [90, 0, 40])]
    with running("triton", device):
        padded = padded_voxels(points, SIZE, RANGE, max_points=2, max_voxels=20)
        exact = voxelize(points, SIZE, RANGE, max_points=2, max_voxels=20)
    size = len(exact.counts)
    assert 0 < size < len(padded.counts)
    assert torch.equal(padded.features[:size], exact.features)
    assert torch.equal(padded.coords[:size], exact.coords)
    assert (padded.coords[size:] == -1).all()
    assert not padded.counts[size:].any()


@pytest.mark.parametrize("device", [CUDA])
def test_large_clouds_give_the_same_bits_as_on_a_cpu(device: str) -> None:
    points = clouds(4, [50_000, 30_001])
    wide = ((0.05, 0.07, 0.1), (-2.0, -2.0, -2.0, 2.0, 2.0, 2.0), 3, 20_000)
    expected = voxelize(points, *wide)
    for name in BACKENDS:
        with running(name, device):
            found = voxelize([cloud.to(device) for cloud in points], *wide)
        assert torch.equal(found.features.cpu(), expected.features)
        assert torch.equal(found.coords.cpu(), expected.coords)
        assert torch.equal(found.counts.cpu(), expected.counts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_host_does_not_wait_for_padded_voxels() -> None:
    points = [cloud.cuda() for cloud in clouds(5, [500, 400])]
    with running("triton", "cuda"):
        padded_voxels(points, SIZE, RANGE, max_points=2, max_voxels=20)
        with host_never_waits():
            padded_voxels(points, SIZE, RANGE, max_points=2, max_voxels=20)


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
