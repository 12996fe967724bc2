"""The smallest PETRv2 and random batches of two frames for it: a training step takes a few milliseconds."""

from __future__ import annotations

import dataclasses

import torch

from bevctl.batch import Batch, Calibration
from bevctl.config.schema import (
    CameraConfig,
    Config,
    DataConfig,
    MapHeadConfig,
    ModelConfig,
    ObjectHeadConfig,
    PetrConfig,
    PreviousFrameConfig,
    VoVNetConfig,
)
from tests.models.nano import IMAGE_SIZE, RANGE, nano_batch, nano_calibration, nano_config, with_value

INTERVAL = 0.5
"""s between the frames."""
MOTION = 1.5
"""m that the car has driven along x in between."""
MAP_CLASSES = ("drivable_area", "divider", "vehicle")


def nano_petrv2_config(**overrides: object) -> Config:
    """Detection and map from two cameras at two moments; `overrides` are dotted paths."""
    camera = CameraConfig(
        backbone="vovnet",
        vovnet=VoVNetConfig(stem=(8, 8, 8), inner=(8, 8, 8, 8), channels=(8, 8, 16, 16), blocks=(1, 1, 1, 1), layers=2),
        normalize="imagenet_bgr",
        image_size=IMAGE_SIZE,
        neck_channels=16,
        view=None,
    )
    model = ModelConfig(
        type="petrv2",
        point_cloud_range=RANGE,
        camera=camera,
        lidar=None,
        object=ObjectHeadConfig(proposals=12, class_weight=2.0),
        map=MapHeadConfig(
            xbound=(-8.0, 8.0, 1.0), ybound=(-8.0, 8.0, 1.0), focal_alpha=0.5, class_weights=(2.0, 4.0, 8.0)
        ),
        petr=PetrConfig(
            depth_bins=4,
            position_range=(-12.0, -12.0, -10.0, 12.0, 12.0, 10.0),
            hidden=16,
            layers=2,
            attention_heads=2,
            ffn=32,
            map_queries=(2, 2),
        ),
    )
    data = DataConfig(previous=PreviousFrameConfig(), map_classes=MAP_CLASSES)
    config = Config(name="nano_petrv2", device="cpu", data=data, model=model)
    for path, value in overrides.items():
        config = with_value(config, path, value)
    return config


def two_frames(calibration: Calibration) -> Calibration:
    """The views of `calibration`, and the same from where the car was before."""
    back = torch.eye(4)
    back[0, 3] = -MOTION
    forth = torch.linalg.inv(back)

    def both(tensor: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, earlier], dim=1)

    c = calibration
    return Calibration(
        intrinsics=both(c.intrinsics, c.intrinsics),
        camera2lidar=both(c.camera2lidar, back @ c.camera2lidar),
        lidar2image=both(c.lidar2image, c.lidar2image @ forth),
        image_aug=both(c.image_aug, c.image_aug),
        lidar_aug=c.lidar_aug,
        times=both(c.times, c.times + INTERVAL),
    )


def nano_petrv2_batch(config: Config, batch: int = 2, seed: int = 0) -> Batch:
    """Random samples for a `nano_petrv2_config`: images of as many frames as it sees, three boxes each, map masks."""
    overrides = {"model.map": config.model.map, "data.map_classes": config.data.map_classes}
    plain = nano_batch(nano_config(**overrides), batch, seed)
    assert plain.images is not None
    calibration, images = nano_calibration(batch), plain.images
    if config.data.frames == 2:
        earlier = nano_batch(nano_config(**overrides), batch, seed + 1000).images
        assert earlier is not None
        calibration, images = two_frames(calibration), torch.cat([images, earlier], dim=1)
    return dataclasses.replace(plain, images=images, calibration=calibration, points=None)
