from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bevctl.models.box_coder import BevGrid, encode
from bevctl.models.targets import class_cost, gaussian_radius, heatmap_targets, position_cost, query_targets

GRID = BevGrid(lower=(-8.0, -10.0), cell=(1.0, 1.0), shape=(16, 20))


def box(x: float, y: float, size: float = 2.0, velocity: float = 0.5) -> Tensor:
    return torch.tensor([x, y, -1.0, size, size, 1.5, 0.3, velocity, velocity])


def no_boxes() -> Tensor:
    return torch.zeros(0, 9)


def labels(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def brute_force_heatmap(boxes: Tensor, classes: Tensor, number: int) -> Tensor:
    """Cell by cell, from the definition."""
    heatmap = torch.zeros(number, *GRID.shape)
    for (x, y, _, length, width, *_), k in zip(boxes.tolist(), classes.tolist(), strict=True):
        cx, cy = math.floor(x + 8), math.floor(y + 10)
        if not (0 <= cx < 16 and 0 <= cy < 20):
            continue
        radius = max(2, int(gaussian_radius(torch.tensor(length), torch.tensor(width), 0.1)))
        sigma = (2 * radius + 1) / 6
        for i in range(max(0, cx - radius), min(16, cx + radius + 1)):
            for j in range(max(0, cy - radius), min(20, cy + radius + 1)):
                value = math.exp(-((i - cx) ** 2 + (j - cy) ** 2) / (2 * sigma**2))
                heatmap[k, i, j] = max(float(heatmap[k, i, j]), value)
    return heatmap


def test_heatmap_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    unit = torch.rand(2, 12, 9, generator=generator)
    boxes = (unit - 0.5) * torch.tensor([20.0, 24, 1, 1, 1, 1, 6, 1, 1]) + torch.tensor([0.0, 0, 0, 4, 3, 2, 0, 0, 0])
    classes = torch.randint(0, 3, (2, 12), generator=generator)
    heatmap = heatmap_targets([*boxes], [*classes], 3, GRID)
    expected = torch.stack([brute_force_heatmap(b, c, 3) for b, c in zip(boxes, classes, strict=True)])
    torch.testing.assert_close(heatmap, expected)
    assert (expected > 0).float().mean() > 0.1


def test_the_first_axis_is_x() -> None:
    heatmap = heatmap_targets([box(-7.5, 9.5)[None]], [labels(1)], 2, GRID)
    assert heatmap.shape == (1, 2, 16, 20)
    assert heatmap[0, 1, 0, 19] == 1
    assert (heatmap == 1).sum() == 1
    assert not heatmap[0, 0].any()


def test_no_objects_and_objects_outside_leave_an_empty_heatmap() -> None:
    heatmap = heatmap_targets([no_boxes(), box(50, 0)[None]], [labels(), labels(0)], 1, GRID)
    assert heatmap.shape == (2, 1, 16, 20)
    assert not heatmap.any()


def test_radius_grows_with_the_box() -> None:
    radius = gaussian_radius(torch.tensor([2.0, 4.0, 8.0]), torch.tensor([1.0, 2.0, 4.0]), 0.1)
    torch.testing.assert_close(radius / radius[0], torch.tensor([1.0, 2.0, 4.0]))
    # A square of one cell: the third case is the smallest, (−0.4 + √(0.4² + 4 · 0.4 · 0.9)) / 2.
    side = torch.tensor(1.0)
    assert float(gaussian_radius(side, side, 0.1)) == pytest.approx((-0.4 + math.sqrt(0.16 + 1.44)) / 2, rel=1e-5)


def test_costs_by_hand() -> None:
    cost = position_cost(torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[4.0, -5.0], [0.0, 0.0]]]), GRID)
    torch.testing.assert_close(cost, torch.tensor([[[4 / 16 + 5 / 20, 0.0]]]))
    half = class_cost(torch.zeros(1, 1, 3), labels(2)[None])
    assert float(half) == pytest.approx((0.25 - 0.75) * 0.25 * math.log(2), rel=1e-5)


def test_queries_take_the_object_that_they_lie_on() -> None:
    objects = torch.stack([box(3, 4), box(-5, -6, velocity=math.nan)])
    queries = torch.stack([box(0, 0), box(-5, -6), box(3, 4)])[None]
    targets = query_targets(encode(queries, GRID), torch.zeros(1, 3, 2), [objects], [labels(1, 0)], GRID)
    assert targets.positives == 2
    assert targets.classes[0].tolist() == [[0, 0], [1, 0], [0, 1]]
    torch.testing.assert_close(targets.codes[0, 2], encode(objects[0], GRID))
    assert targets.code_mask[0].sum(-1).tolist() == [0, 8, 10]
    assert targets.codes.isfinite().all()
    assert float(targets.mean_iou) == pytest.approx(1, abs=1e-4)


def test_class_decides_between_equal_places() -> None:
    logits = torch.tensor([[[-3.0, 3.0], [3.0, -3.0]]])
    queries = torch.stack([box(1, 1), box(1, 1)])[None]
    targets = query_targets(encode(queries, GRID), logits, [box(1, 1)[None]], [labels(0)], GRID)
    assert targets.classes[0].tolist() == [[0, 0], [1, 0]]


def test_mean_iou_averages_samples_not_pairs() -> None:
    queries = torch.stack([box(1, 1), box(5, 5)])[None].repeat(2, 1, 1)
    objects = [torch.stack([box(1, 1), box(5, 5)]), box(-6, -6)[None]]
    targets = query_targets(encode(queries, GRID), torch.zeros(2, 2, 1), objects, [labels(0, 0), labels(0)], GRID)
    assert float(targets.mean_iou) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("objects", [[no_boxes(), no_boxes()], [no_boxes(), box(1, 1)[None]]])
def test_samples_without_objects(objects: list[Tensor]) -> None:
    classes = [torch.zeros(len(o), dtype=torch.int64) for o in objects]
    targets = query_targets(torch.zeros(2, 3, 10), torch.zeros(2, 3, 2), objects, classes, GRID)
    assert targets.positives == sum(len(o) for o in objects)
    assert not targets.classes[0].any()
    assert targets.mean_iou.isfinite()


def test_broken_predictions_are_matched_all_the_same() -> None:
    codes = torch.full((1, 3, 10), math.nan)
    targets = query_targets(codes, torch.full((1, 3, 2), math.nan), [box(1, 1)[None]], [labels(0)], GRID)
    assert targets.positives == 1
    assert targets.codes.isfinite().all()
