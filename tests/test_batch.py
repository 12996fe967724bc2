"""Batches move as a whole and stay what they were."""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.batch import CAMERAS, MAP_CLASSES, OBJECT_CLASSES, Batch, Calibration, Predictions
from bevctl.config.schema import DataConfig


def make_batch(bev_map: Tensor | None = None) -> Batch:
    cameras = torch.eye(4).repeat(2, 6, 1, 1)
    calibration = Calibration(cameras, cameras, cameras, cameras, torch.eye(4).repeat(2, 1, 1), torch.zeros(2, 6))
    return Batch(
        images=torch.zeros(2, 6, 3, 4, 4, dtype=torch.uint8),
        points=[torch.ones(3, 5), torch.ones(0, 5)],
        calibration=calibration,
        boxes=[torch.ones(1, 9), torch.ones(0, 9)],
        labels=[torch.tensor([4]), torch.zeros(0, dtype=torch.int64)],
        bev_map=bev_map,
        has_boxes=torch.tensor([True, False]),
        has_map=torch.tensor([False, False]),
        tokens=["a", "b"],
        problems=["one file"],
    )


def test_size_counts_samples() -> None:
    assert make_batch().size == 2


def test_to_moves_every_tensor_and_changes_nothing_else() -> None:
    batch = make_batch(torch.ones(2, 6, 3, 3))
    moved = batch.to("meta")
    assert moved.images is not None
    assert moved.points is not None
    assert moved.bev_map is not None
    tensors = [moved.images, moved.bev_map, moved.has_boxes, moved.has_map, moved.calibration.lidar_aug]
    tensors += [moved.calibration.intrinsics, *moved.points, *moved.boxes, *moved.labels]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert [tuple(points.shape) for points in moved.points] == [(3, 5), (0, 5)]
    assert moved.tokens == ["a", "b"]
    assert moved.problems == ["one file"]
    assert batch.has_boxes.device.type == "cpu"


def test_absent_parts_stay_absent() -> None:
    moved = make_batch().to("meta")
    assert moved.bev_map is None
    assert Predictions().to("meta") == Predictions()


def test_predictions_move() -> None:
    moved = Predictions(boxes=[torch.ones(2, 9)], scores=[torch.ones(2)], labels=[torch.ones(2)]).to("meta")
    assert moved.boxes is not None
    assert moved.boxes[0].device.type == "meta"
    assert moved.bev_map is None


def test_the_config_names_the_same_classes() -> None:
    assert DataConfig().classes == OBJECT_CLASSES
    assert DataConfig().map_classes == MAP_CLASSES
    assert len(CAMERAS) == 6
