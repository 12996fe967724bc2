"""The smallest complete model configuration and random batches for it: a training step takes a few milliseconds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from bevctl.batch import Batch, Calibration
from bevctl.config.schema import (
    CameraConfig,
    Config,
    DecoderConfig,
    LidarConfig,
    MapHeadConfig,
    ModelConfig,
    ObjectHeadConfig,
    SwinConfig,
    ViewTransformConfig,
)

CAMERA_COUNT = 2
IMAGE_SIZE = (32, 64)
RANGE = (-8.0, -8.0, -5.0, 8.0, 8.0, 3.0)


def with_value(section: Any, path: str, value: object) -> Any:
    """A copy of a config section whose field at the dotted `path` is `value`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(section, **{name: with_value(getattr(section, name), rest, value) if rest else value})


def nano_config(**overrides: object) -> Config:
    """Camera and LiDAR, detection and map, on a BEV grid of 8 × 8 cells; `overrides` are dotted paths.

    For example `nano_config(**{"model.camera": None, "train.batch": 2})`.
    """
    camera = CameraConfig(
        swin=SwinConfig(embed=8, depths=(1, 2, 1, 1), heads=(1, 2, 2, 4), window=3, drop_path=0.1),
        image_size=IMAGE_SIZE,
        neck_channels=16,
        view=ViewTransformConfig(
            xbound=(-8.0, 8.0, 1.0),
            ybound=(-8.0, 8.0, 1.0),
            dbound=(1.0, 9.0, 1.0),
            channels=8,
        ),
    )
    lidar = LidarConfig(
        voxel_size=(0.25, 0.25, 0.2), max_voxels=(500, 500), channels=(4, 8, 8, 16), blocks=1, out_channels=16
    )
    config = Config(
        name="nano",
        device="cpu",
        model=ModelConfig(
            point_cloud_range=RANGE,
            camera=camera,
            lidar=lidar,
            decoder=DecoderConfig(fused_channels=16, channels=(16, 16), layers=1, neck_channels=16),
            object=ObjectHeadConfig(proposals=8, hidden=16, attention_heads=2, ffn=32),
            map=MapHeadConfig(xbound=(-6.0, 6.0, 1.0), ybound=(-6.0, 6.0, 1.0)),
        ),
    )
    for path, value in overrides.items():
        config = with_value(config, path, value)
    return config


def nano_calibration(batch: int) -> Calibration:
    """A rig of two level cameras, one looking along +x and one along -x, and no augmentation."""
    height, width = IMAGE_SIZE
    intrinsics = torch.eye(4)
    intrinsics[0, 0] = intrinsics[1, 1] = width / 2
    intrinsics[0, 2], intrinsics[1, 2] = width / 2, height / 2
    camera2lidar = torch.stack([_camera_pose(2 * math.pi * i / CAMERA_COUNT) for i in range(CAMERA_COUNT)])
    lidar2image = intrinsics @ torch.linalg.inv(camera2lidar)
    eye = torch.eye(4)
    return Calibration(
        intrinsics=intrinsics.expand(batch, CAMERA_COUNT, 4, 4).clone(),
        camera2lidar=camera2lidar.expand(batch, CAMERA_COUNT, 4, 4).clone(),
        lidar2image=lidar2image.expand(batch, CAMERA_COUNT, 4, 4).clone(),
        image_aug=eye.expand(batch, CAMERA_COUNT, 4, 4).clone(),
        lidar_aug=eye.expand(batch, 4, 4).clone(),
        times=torch.zeros(batch, CAMERA_COUNT),
    )


def _camera_pose(yaw: float) -> Tensor:
    forward = torch.tensor([math.cos(yaw), math.sin(yaw), 0.0])
    right = torch.tensor([math.sin(yaw), -math.cos(yaw), 0.0])
    pose = torch.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = right, torch.tensor([0.0, 0.0, -1.0]), forward
    pose[:3, 3] = 0.5 * forward
    return pose


def _points(generator: torch.Generator, count: int = 300) -> Tensor:
    unit = torch.rand(count, 5, generator=generator)
    low = torch.tensor([-7.9, -7.9, -2.0, 0.0, 0.0])
    high = torch.tensor([7.9, 7.9, 1.0, 255.0, 0.5])
    return low + unit * (high - low)


def _boxes(generator: torch.Generator, count: int) -> Tensor:
    unit = torch.rand(count, 9, generator=generator)
    low = torch.tensor([-6.0, -6.0, -1.5, 1.0, 0.5, 0.5, -math.pi, -2.0, -2.0])
    high = torch.tensor([6.0, 6.0, 0.0, 4.0, 2.0, 2.0, math.pi, 2.0, 2.0])
    boxes = low + unit * (high - low)
    boxes[0, 7:] = math.nan  # an unknown velocity is legitimate
    return boxes


def nano_batch(config: Config, batch: int = 2, seed: int = 0) -> Batch:
    """Random samples for a `nano_config`: uint8 images, points, three boxes each, map masks if it has a map head."""
    generator = torch.Generator().manual_seed(seed)
    model = config.model
    shape = (batch, CAMERA_COUNT, 3, *IMAGE_SIZE)
    bev_map = None
    if model.map is not None:
        x, y = (round((high - low) / step) for low, high, step in (model.map.xbound, model.map.ybound))
        bev_map = torch.randint(0, 2, (batch, len(config.data.map_classes), x, y), generator=generator).float()
    classes = len(config.data.classes)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return Batch(
        images=images if model.camera is not None else None,
        points=[_points(generator) for _ in range(batch)],
        calibration=nano_calibration(batch),
        boxes=[_boxes(generator, 3) for _ in range(batch)],
        labels=[torch.randint(0, classes, (3,), generator=generator) for _ in range(batch)],
        bev_map=bev_map,
        has_boxes=torch.ones(batch, dtype=torch.bool),
        has_map=torch.full((batch,), bev_map is not None),
        tokens=[f"sample-{seed}-{i}" for i in range(batch)],
    )
