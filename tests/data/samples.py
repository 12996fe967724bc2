"""A random sample in memory."""

from __future__ import annotations

import numpy as np

from bevctl.data.sample import Sample
from bevctl.geometry import Array, rigid, rotation_z

FORWARD_CAMERA = rigid([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]], [0.1, 0.7, -0.3])
"""Camera frame (x right, y down, z forward) → LiDAR frame (x right, y forward, z up)."""


def intrinsics(width: int, height: int) -> Array:
    matrix = np.eye(4)
    matrix[0, 0] = matrix[1, 1] = 0.8 * width
    matrix[:2, 2] = width / 2, height / 2
    return matrix


def random_sample(seed: int = 0, cameras: int = 2, size: tuple[int, int] = (90, 160), points: int = 400) -> Sample:
    """`cameras` grey images of (height, width) `size`, points and ten boxes with half of the points inside."""
    rng = np.random.default_rng(seed)
    boxes = np.column_stack(
        [
            rng.uniform(-40, 40, (10, 2)),
            rng.uniform(-2, 1, 10),
            rng.uniform(0.5, 8, (10, 3)),
            rng.uniform(-np.pi, np.pi, 10),
            rng.normal(0, 3, (10, 2)),
        ]
    )
    boxes[3, 7:] = np.nan
    local = rng.uniform(-0.5, 0.5, (points // 2, 3)) * boxes[np.arange(points // 2) % 10, 3:6]
    inside = np.stack([rotation_z(boxes[i % 10, 6]) @ p + boxes[i % 10, :3] for i, p in enumerate(local)])
    anywhere = rng.uniform([-50, -50, -4], [50, 50, 2], (points // 2, 3))
    cloud = np.column_stack(
        [np.concatenate([inside, anywhere]), rng.uniform(0, 255, points), rng.uniform(0, 0.5, points)]
    )
    turns = [rigid(rotation_z(turn), np.zeros(3)) for turn in np.linspace(0, 2 * np.pi, cameras, endpoint=False)]
    return Sample(
        token=f"sample-{seed}",
        images=tuple(rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(cameras)),
        points=cloud.astype(np.float32),
        intrinsics=np.stack([intrinsics(size[1], size[0])] * cameras),
        camera2lidar=np.stack([turn @ FORWARD_CAMERA for turn in turns]),
        times=np.zeros(cameras),
        image_aug=np.stack([np.eye(4)] * cameras),
        lidar_aug=np.eye(4),
        boxes=boxes,
        labels=np.arange(10),
        has_boxes=True,
    )
