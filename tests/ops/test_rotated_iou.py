from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely.geometry import Polygon
from torch import Tensor

from bevctl.geometry import box_corners
from bevctl.ops.rotated_iou import rotated_iou_3d, rotated_overlap_bev


def box(x: float, y: float, z: float, length: float, width: float, height: float, yaw: float) -> Tensor:
    return torch.tensor([x, y, z, length, width, height, yaw], dtype=torch.float64)


def random_boxes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, 7, generator=generator, dtype=torch.float64)
    low = torch.tensor([-3.0, -3, -1, 0.3, 0.3, 0.3, -math.pi], dtype=torch.float64)
    high = torch.tensor([3.0, 3, 1, 6, 3, 3, math.pi], dtype=torch.float64)
    return low + unit * (high - low)


boxes = st.builds(
    box,
    *(st.floats(-4, 4) for _ in range(3)),
    *(st.floats(0.1, 6) for _ in range(3)),
    st.floats(-4, 4),
)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (box(0, 0, 0, 4, 2, 1, 0), 1.0),
        (box(0, 0, 0, 4, 2, 1, math.pi), 1.0),
        (box(2, 0, 0, 4, 2, 1, 0), 4 / 12),
        (box(0, 0, 0.5, 4, 2, 1, 0), 4 / 12),
        (box(0, 0, 0, 2, 4, 1, math.pi / 2), 1.0),
        (box(0, 0, 0, 4, 2, 1, math.pi / 2), 4 / 12),
        (box(4, 0, 0, 4, 2, 1, 0), 0.0),
        (box(9, 0, 0, 4, 2, 1, 1), 0.0),
        (box(0, 0, 1, 4, 2, 1, 0), 0.0),
        (box(0, 0, 0, 1, 1, 0.5, 0.7), 0.5 / 8),
    ],
)
def test_hand_made_overlaps(other: Tensor, expected: float) -> None:
    assert float(rotated_iou_3d(box(0, 0, 0, 4, 2, 1, 0), other)) == pytest.approx(expected, abs=1e-9)


def test_an_octagon() -> None:
    """A unit square and itself turned by 45 degrees share a regular octagon of area 2(√2 − 1)."""
    square = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    turned = torch.tensor([0.0, 0.0, 1.0, 1.0, math.pi / 4], dtype=torch.float64)
    assert float(rotated_overlap_bev(square, turned)) == pytest.approx(2 * (math.sqrt(2) - 1), abs=1e-12)


def test_against_shapely() -> None:
    a, b = random_boxes(40, seed=1), random_boxes(50, seed=2)
    areas = rotated_overlap_bev(a[:, None, (0, 1, 3, 4, 6)], b[:, (0, 1, 3, 4, 6)])
    polygons_a, polygons_b = ([Polygon(c[:4, :2]) for c in box_corners(x.numpy())] for x in (a, b))
    expected = torch.tensor([[p.intersection(q).area for q in polygons_b] for p in polygons_a], dtype=torch.float64)
    assert (expected > 0.5).sum() > 200
    torch.testing.assert_close(areas, expected, rtol=1e-9, atol=1e-9)


def test_single_precision_is_close_far_from_the_origin() -> None:
    a, b = random_boxes(200, seed=3), random_boxes(200, seed=4)
    shift = torch.tensor([50.0, -50, 0, 0, 0, 0, 0], dtype=torch.float64)
    single = rotated_iou_3d((a + shift).float(), (b + shift).float()).double()
    torch.testing.assert_close(single, rotated_iou_3d(a, b), rtol=1e-3, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(boxes, boxes)
def test_symmetric_and_in_range(a: Tensor, b: Tensor) -> None:
    forward, backward = rotated_iou_3d(a, b), rotated_iou_3d(b, a)
    assert 0 <= float(forward) <= 1
    assert float(forward) == pytest.approx(float(backward), abs=1e-9)
    assert float(rotated_iou_3d(a, a)) == pytest.approx(1, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(boxes, boxes, st.floats(-20, 20), st.floats(-20, 20), st.floats(-4, 4))
def test_rigid_motion_changes_nothing(a: Tensor, b: Tensor, dx: float, dy: float, angle: float) -> None:
    def moved(original: Tensor) -> Tensor:
        x, y = original[:2]
        result = original.clone()
        result[0] = math.cos(angle) * x - math.sin(angle) * y + dx
        result[1] = math.sin(angle) * x + math.cos(angle) * y + dy
        result[6] += angle
        return result

    assert float(rotated_iou_3d(moved(a), moved(b))) == pytest.approx(float(rotated_iou_3d(a, b)), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(boxes, boxes)
def test_overlap_is_at_most_either_area(a: Tensor, b: Tensor) -> None:
    area = float(rotated_overlap_bev(a[[0, 1, 3, 4, 6]], b[[0, 1, 3, 4, 6]]))
    assert area <= min(float(a[3] * a[4]), float(b[3] * b[4])) + 1e-9


def test_gradient_of_the_overlap() -> None:
    a, b = random_boxes(6, seed=5).requires_grad_(), random_boxes(6, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(rotated_iou_3d, (a, b))
