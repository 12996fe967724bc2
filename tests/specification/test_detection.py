"""Targets, matching, losses and box code of the detection head."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from shapely import affinity
from shapely.geometry import Polygon
from shapely.geometry import box as rectangle

from bevctl.models.box_coder import CODE_WEIGHTS, BevGrid, decode, encode
from bevctl.models.detection_loss import detection_losses
from bevctl.models.losses import gaussian_focal_loss, sigmoid_focal_loss
from bevctl.models.targets import class_cost, heatmap_targets, position_cost, query_targets
from bevctl.ops.rotated_iou import rotated_iou_3d
from tests.models.nano import nano_batch, nano_config

Array = NDArray[np.float64]
GRID = BevGrid(lower=(-54.0, -54.0), cell=(0.6, 0.6), shape=(180, 180))
CLASSES = 10


def focal(p: Array, target: Array) -> Array:
    """Gamma 2, alpha 0.25, of probabilities."""
    return np.where(target == 1, -0.25 * (1 - p) ** 2 * np.log(p), -0.75 * p**2 * np.log(1 - p))


def gaussian_focal(p: Array, target: Array) -> Array:
    """Alpha 2, gamma 4, of probabilities clamped to 1e-4 from either end."""
    p = np.clip(p, 1e-4, 1 - 1e-4)
    return np.where(target == 1, -((1 - p) ** 2) * np.log(p), -((1 - target) ** 4) * p**2 * np.log(1 - p))


def sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))


def code_of(box: Array) -> Array:
    x, y, z, length, width, height, yaw, vx, vy = box
    cells = (x + 54) / 0.6, (y + 54) / 0.6
    sizes = math.log(length), math.log(width), math.log(height)
    return np.array([*cells, z, *sizes, math.sin(yaw), math.cos(yaw), vx, vy])


def radius_of(length: float, width: float) -> int:
    """Cells by which the corners may move while an IoU of 0.1 is kept."""
    total, area = length + width, length * width
    roots = [
        (total + math.sqrt(total**2 - 4 * area * 0.9 / 1.1)) / 2,
        (2 * total + math.sqrt((2 * total) ** 2 - 16 * area * 0.9)) / 2,
        (-0.2 * total + math.sqrt((0.2 * total) ** 2 + 1.6 * area * 0.9)) / 2,
    ]
    return max(2, int(min(roots)))


def heatmap_of(boxes: Array, labels: NDArray[np.int64]) -> Array:
    heatmap = np.zeros((CLASSES, 180, 180))
    for box, label in zip(boxes, labels, strict=True):
        cx, cy = (math.floor(cells) for cells in code_of(box)[:2])
        radius = radius_of(box[3] / 0.6, box[4] / 0.6)
        for i in range(max(0, cx - radius), min(180, cx + radius + 1)):
            for j in range(max(0, cy - radius), min(180, cy + radius + 1)):
                value = math.exp(-((i - cx) ** 2 + (j - cy) ** 2) / (2 * ((2 * radius + 1) / 6) ** 2))
                heatmap[label, i, j] = max(heatmap[label, i, j], value)
    return heatmap


def iou_of(a: Array, b: Array) -> float:
    def footprint(box: Array) -> Polygon:
        length, width = box[3:5]
        turned = affinity.rotate(rectangle(-length / 2, -width / 2, length / 2, width / 2), box[6], use_radians=True)
        return affinity.translate(turned, *box[:2])

    top, bottom = min(a[2] + a[5] / 2, b[2] + b[5] / 2), max(a[2] - a[5] / 2, b[2] - b[5] / 2)
    common = footprint(a).intersection(footprint(b)).area * max(0.0, top - bottom)
    return float(common / (a[3:6].prod() + b[3:6].prod() - common))


def costs_of(predicted: Array, logits: Array, boxes: Array, labels: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    """(Q, M) class, position and IoU parts, without their weights."""
    p = sigmoid(logits)
    added = focal(p, np.ones_like(p)) - focal(p, np.zeros_like(p))
    distance = np.abs(predicted[:, None, :2] - boxes[None, :, :2]).sum(-1) / 108
    iou = np.array([[iou_of(a, b) for b in boxes] for a in predicted])
    return added[:, labels], distance, iou


@dataclasses.dataclass(frozen=True)
class Scene:
    """One sample's objects and what a head predicts, some of it close to an object."""

    boxes: Array
    labels: NDArray[np.int64]
    predicted: Array
    logits: Array
    heatmap: Array

    def costs(self) -> tuple[Array, Array, Array]:
        return costs_of(self.predicted, self.logits, self.boxes, self.labels)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Queries and their objects at the least total cost."""
        classes, distance, iou = self.costs()
        queries, objects = linear_sum_assignment(0.15 * classes + 0.25 * distance - 0.25 * iou)
        return queries, objects


def scene(seed: int, objects: int = 7, queries: int = 20) -> Scene:
    generator = np.random.default_rng(seed)

    def boxes(count: int) -> Array:
        low, high = [-50, -50, -2, 1, 0.5, 1, -3, -5, -5], [50, 50, 0, 10, 3, 3, 3, 5, 5]
        return generator.uniform(low, high, size=(count, 9))

    real, predicted = boxes(objects), boxes(queries)
    predicted[:objects] = real + generator.normal(scale=0.1, size=real.shape)
    predicted[:, 3:6] = np.abs(predicted[:, 3:6])
    return Scene(
        real,
        generator.integers(0, CLASSES, size=objects),
        generator.permutation(predicted),
        generator.normal(scale=2, size=(queries, CLASSES)),
        generator.normal(-2, 2, size=(CLASSES, 180, 180)),
    )


def single(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).float()[None]


@pytest.mark.parametrize("seed", range(3))
def test_box_code(seed: int) -> None:
    boxes = scene(seed).boxes
    codes = np.stack([code_of(box) for box in boxes])
    np.testing.assert_allclose(encode(torch.from_numpy(boxes), GRID).numpy(), codes, atol=1e-12)
    np.testing.assert_allclose(decode(torch.from_numpy(codes), GRID).numpy(), boxes, atol=1e-12)


def test_gradients_of_the_box_code() -> None:
    boxes = torch.from_numpy(scene(0).boxes[:2])
    assert torch.autograd.gradcheck(lambda x: encode(x, GRID), boxes.requires_grad_())
    codes = encode(boxes.detach(), GRID).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: decode(x, GRID), codes)


@pytest.mark.parametrize("seed", range(3))
def test_heatmap(seed: int) -> None:
    s = scene(seed)
    found = heatmap_targets([torch.from_numpy(s.boxes)], [torch.from_numpy(s.labels)], CLASSES, GRID)
    np.testing.assert_allclose(found[0].numpy(), heatmap_of(s.boxes, s.labels), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_costs(seed: int) -> None:
    s = scene(seed)
    classes, distance, iou = s.costs()
    labels, boxes, predicted = torch.from_numpy(s.labels)[None], single(s.boxes), single(s.predicted)
    np.testing.assert_allclose(class_cost(single(s.logits), labels)[0], classes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(position_cost(predicted, boxes, GRID)[0], distance, atol=1e-6)
    found = rotated_iou_3d(predicted[0, :, None, :7], boxes[0, None, :, :7])
    assert iou.max() > 0.3
    np.testing.assert_allclose(found, iou, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_matching_finds_the_least_total_cost(seed: int) -> None:
    s = scene(seed)
    queries, objects = s.pairs()
    codes = encode(single(s.predicted), GRID)
    targets = query_targets(codes, single(s.logits), [single(s.boxes)[0]], [torch.from_numpy(s.labels)], GRID)
    assert targets.classes[0].sum(-1).nonzero().flatten().tolist() == queries.tolist()
    assert targets.classes[0, queries].argmax(-1).tolist() == s.labels[objects].tolist()
    expected = np.stack([code_of(box) for box in s.boxes[objects]])
    np.testing.assert_allclose(targets.codes[0, queries], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_losses(seed: int) -> None:
    """All three, from the head's outputs: normalised by peaks or matched queries, velocities at a fifth."""
    s = scene(seed)
    queries, objects = s.pairs()
    peaks, one_hot = heatmap_of(s.boxes, s.labels), np.zeros_like(s.logits)
    one_hot[queries, s.labels[objects]] = 1
    codes = np.stack([code_of(box) for box in s.predicted])
    errors = np.abs(codes[queries] - np.stack([code_of(box) for box in s.boxes[objects]]))
    expected = {
        "heatmap": gaussian_focal(sigmoid(s.heatmap), peaks).sum() / (peaks == 1).sum(),
        "classes": focal(sigmoid(s.logits), one_hot).sum() / len(objects),
        "boxes": (errors * ([1] * 8 + [0.2] * 2)).sum() / len(objects),
        "mean_iou": s.costs()[2][queries, objects].mean(),
    }
    batch = dataclasses.replace(
        nano_batch(nano_config(), batch=1), boxes=[single(s.boxes)[0]], labels=[torch.from_numpy(s.labels)]
    )
    weights = torch.tensor(CODE_WEIGHTS)
    losses = detection_losses(single(s.heatmap), single(s.logits), single(codes), batch, GRID, weights)
    found = {name: float(value) for name, value in vars(losses).items()}
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["sigmoid", "gaussian"])
def test_focal_losses_and_their_slopes(name: str) -> None:
    """Values against the formulas, gradients against central differences of the formulas."""
    logits = np.linspace(-8, 8, 41)
    targets = np.linspace(0, 1, 41).round() if name == "sigmoid" else np.tile([0, 0.3, 0.9, 1.0], 11)[:41]
    formula, ours = (focal, sigmoid_focal_loss) if name == "sigmoid" else (gaussian_focal, gaussian_focal_loss)
    values = torch.from_numpy(logits).float().requires_grad_()
    found = ours(values, torch.from_numpy(targets).float())
    (slopes,) = torch.autograd.grad(found.sum(), values)
    np.testing.assert_allclose(found.detach(), formula(sigmoid(logits), targets), rtol=2e-5, atol=1e-7)
    step = 1e-5
    ahead, behind = (formula(sigmoid(logits + offset), targets) for offset in (step, -step))
    np.testing.assert_allclose(slopes, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6)
