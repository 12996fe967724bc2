"""Random batches of any size for models that see with cameras: a rig of six cameras at one or two moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bevctl.batch import CAMERAS, Batch, Calibration
from bevctl.config.schema import Config

YAWS = (90.0, 35.0, 145.0, -90.0, 160.0, 20.0)
"""Directions of the cameras in the order of CAMERAS, degrees from LiDAR x: the car looks along y."""
FOCAL = 0.8
"""Focal length over the width of the image."""
INTERVAL, MOTION = 0.5, 4.0
"""s and m between the two moments."""


def rig_batch(config: Config, batch: int, seed: int = 0, objects: int = 30) -> Batch:
    """Random uint8 images of the config's size, random boxes and maps, and the calibration of a rig."""
    generator = torch.Generator().manual_seed(seed)
    camera, frames = config.model.camera, config.data.frames
    assert camera is not None
    shape = (batch, len(CAMERAS) * frames, 3, *camera.image_size)
    head, bev_map = config.model.map, None
    if head is not None:
        x, y = (round((high - low) / step) for low, high, step in (head.xbound, head.ybound))
        bev_map = (torch.rand(batch, len(config.data.map_classes), x, y, generator=generator) < 0.3).float()
    return Batch(
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        points=None,
        calibration=rig_calibration(batch, camera.image_size, frames),
        boxes=[_boxes(objects, generator) for _ in range(batch)],
        labels=[torch.randint(0, len(config.data.classes), (objects,), generator=generator) for _ in range(batch)],
        bev_map=bev_map,
        has_boxes=torch.ones(batch, dtype=torch.bool),
        has_map=torch.full((batch,), bev_map is not None),
        tokens=[f"sample-{seed}-{i}" for i in range(batch)],
    )


def rig_calibration(batch: int, image_size: tuple[int, int], frames: int) -> Calibration:
    """Level cameras without augmentation; the car has driven `MOTION` along y since the earlier frame."""
    height, width = image_size
    intrinsics = torch.eye(4)
    intrinsics[0, 0] = intrinsics[1, 1] = FOCAL * width
    intrinsics[0, 2], intrinsics[1, 2] = width / 2, height / 2
    poses = torch.stack([_pose(math.radians(yaw)) for yaw in YAWS])
    back = torch.eye(4)
    back[1, 3] = -MOTION
    camera2lidar = torch.cat([poses, back @ poses][:frames])
    times = torch.tensor([0.0, INTERVAL])[:frames].repeat_interleave(len(YAWS))

    def of_batch(tensor: Tensor) -> Tensor:
        return tensor.expand(batch, *tensor.shape).clone()

    views = len(camera2lidar)
    return Calibration(
        intrinsics=of_batch(intrinsics.expand(views, 4, 4)),
        camera2lidar=of_batch(camera2lidar),
        lidar2image=of_batch(intrinsics @ torch.linalg.inv(camera2lidar)),
        image_aug=of_batch(torch.eye(4).expand(views, 4, 4)),
        lidar_aug=of_batch(torch.eye(4)),
        times=of_batch(times),
    )


@torch.no_grad()
def settle_statistics(backbone: nn.Module, images: Tensor) -> None:
    """Gives the BatchNorms of `backbone` the statistics of normalised `images`, as training would have."""
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    backbone(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    backbone.train(backbone.training)


def _pose(yaw: float) -> Tensor:
    """Camera frame (x right, y down, z ahead) → LiDAR frame, of a camera half a metre off the LiDAR."""
    pose = torch.eye(4)
    pose[:3, 0] = torch.tensor([math.sin(yaw), -math.cos(yaw), 0.0])
    pose[:3, 1] = torch.tensor([0.0, 0.0, -1.0])
    pose[:3, 2] = torch.tensor([math.cos(yaw), math.sin(yaw), 0.0])
    pose[:3, 3] = 0.5 * pose[:3, 2]
    return pose


def _boxes(count: int, generator: torch.Generator) -> Tensor:
    unit = torch.rand(count, 9, generator=generator)
    low = torch.tensor([-50.0, -50.0, -3.0, 0.5, 0.5, 0.5, -math.pi, -8.0, -8.0])
    high = torch.tensor([50.0, 50.0, 1.0, 8.0, 3.0, 3.0, math.pi, 8.0, 8.0])
    return low + unit * (high - low)
