"""Frustum geometry and pooling of the view transform."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bevctl.batch import Calibration
from bevctl.config.schema import ViewTransformConfig
from bevctl.models.view_geometry import frustum_rays
from bevctl.models.view_transform import LSSTransform
from tests.models.nano import IMAGE_SIZE, nano_calibration

Array = NDArray[np.float64]
CONFIG = ViewTransformConfig(
    kind="lss",
    xbound=(-8.0, 8.0, 0.8),
    ybound=(-6.0, 6.0, 0.6),
    dbound=(1.0, 9.0, 0.5),
    channels=3,
    downsample=1,
)
BINS = 16


def augmented_calibration(seed: int) -> Calibration:
    """The nano rig with images and LiDAR frames turned, scaled, perhaps mirrored, and shifted."""
    generator = np.random.default_rng(seed)
    plain = nano_calibration(2)
    image_aug, lidar_aug = plain.image_aug.numpy().copy(), plain.lidar_aug.numpy().copy()
    for matrix in (*image_aug.reshape(-1, 4, 4), *lidar_aug):
        turn = generator.uniform(-0.6, 0.6)
        turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        matrix[:2, :2] = generator.uniform(0.8, 1.2) * turned @ np.diag([1.0, generator.choice([-1.0, 1.0])])
        matrix[:2, 3] = generator.uniform(-2, 2, size=2)
    return dataclasses.replace(plain, image_aug=torch.from_numpy(image_aug), lidar_aug=torch.from_numpy(lidar_aug))


def camera_points(calibration: Calibration, sample: int, camera: int) -> Array:
    """(D, h, w, 3) frustum of one camera in the augmented LiDAR frame, m: step by step, backwards from the pixel."""
    image_aug, intrinsics, camera2lidar = (
        matrices[sample, camera].double().numpy()
        for matrices in (calibration.image_aug, calibration.intrinsics, calibration.camera2lidar)
    )
    lidar_aug = calibration.lidar_aug[sample].double().numpy()
    height, width = IMAGE_SIZE
    depths = np.arange(*CONFIG.dbound)
    points = np.empty((len(depths), height // 8, width // 8, 3))
    for i, d in enumerate(depths):
        for j, v in enumerate(np.linspace(0, height - 1, height // 8)):
            for k, u in enumerate(np.linspace(0, width - 1, width // 8)):
                source = np.linalg.inv(image_aug[:2, :2]) @ ([u, v] - image_aug[:2, 3])
                in_camera = np.linalg.inv(intrinsics[:3, :3]) @ (d * np.array([*source, 1.0]))
                in_lidar = camera2lidar[:3, :3] @ in_camera + camera2lidar[:3, 3]
                points[i, j, k] = lidar_aug[:3, :3] @ in_lidar + lidar_aug[:3, 3]
    return points


def pooled(logits: Array, calibration: Calibration, truncate: bool) -> Array:
    """(B, C, X, Y) sums of probability times context, point by point."""
    bounds = np.array([CONFIG.xbound, CONFIG.ybound, CONFIG.zbound])
    counts = np.round((bounds[:, 1] - bounds[:, 0]) / bounds[:, 2]).astype(int)
    bev = np.zeros((len(logits), CONFIG.channels, counts[0], counts[1]))
    for sample, camera in np.ndindex(*logits.shape[:2]):
        depth, context = logits[sample, camera, :BINS], logits[sample, camera, BINS:]
        probability = np.exp(depth) / np.exp(depth).sum(0)
        points = camera_points(calibration, sample, camera)
        for d, h, w in np.ndindex(*points.shape[:3]):
            place = (points[d, h, w] - bounds[:, 0]) / bounds[:, 2]
            cell = (np.trunc(place) if truncate else np.floor(place)).astype(int)
            if (cell >= 0).all() and (cell < counts).all():
                bev[sample, :, cell[0], cell[1]] += probability[d, h, w] * context[:, h, w]
    return bev


def random_logits(seed: int, channels: int = CONFIG.channels) -> Array:
    return np.random.default_rng(seed).normal(size=(2, 2, BINS + channels, 4, 8))


@pytest.mark.parametrize("seed", [0, 1])
def test_frustum_geometry(seed: int) -> None:
    calibration = augmented_calibration(seed)
    view = LSSTransform(CONFIG, IMAGE_SIZE, 4)
    rays, origins = frustum_rays(view.frustum[0, ..., :2], calibration)
    points = rays[:, :, None] * view.frustum[..., 2:] + origins[:, :, None, None, None]
    for sample, camera in np.ndindex(2, 2):
        expected = camera_points(calibration, sample, camera)
        np.testing.assert_allclose(points[sample, camera].numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_pooling(seed: int, truncate: bool) -> None:
    calibration, logits = augmented_calibration(seed), random_logits(seed)
    view = LSSTransform(dataclasses.replace(CONFIG, truncate=truncate), IMAGE_SIZE, 4)
    expected = pooled(logits, calibration, truncate)
    assert (expected != 0).mean() > 0.2
    found = view.splat(torch.from_numpy(logits), calibration)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    single = view.splat(torch.from_numpy(logits).float(), calibration)
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=1e-5)


def test_gradient_from_the_map_to_the_logits() -> None:
    calibration = augmented_calibration(0)
    view = LSSTransform(dataclasses.replace(CONFIG, channels=1), IMAGE_SIZE, 4)
    logits = torch.from_numpy(random_logits(0, channels=1)[:, :, :, ::3, ::7].copy())
    full = torch.zeros(2, 2, BINS + 1, 4, 8, dtype=torch.float64)

    def splat(few: torch.Tensor) -> torch.Tensor:
        placed = full.clone()
        placed[:, :, :, ::3, ::7] = few
        return view.splat(placed, calibration)

    assert torch.autograd.gradcheck(splat, logits.requires_grad_(), fast_mode=True)
