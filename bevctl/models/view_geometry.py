"""Where image pixels lie in space and where LiDAR points lie in images; never under autocast.

Matrices are composed in float64 and applied by multiply-add: a matrix product could run in TF32, whose 10 bits of
mantissa move a point 50 m away by centimetres. Inverses are made without a check, which would wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.batch import Calibration
from bevctl.ops.depth_raster import nearest_depth


def frustum_grid(image_size: tuple[int, int], feature_size: tuple[int, int], depths: Tensor) -> Tensor:
    """(D, h, w, 3) pixel u, v and depth (m) of each bin of each feature cell.

    The cells span the image from its first to its last pixel.
    """
    v = torch.linspace(0, image_size[0] - 1, feature_size[0])
    u = torch.linspace(0, image_size[1] - 1, feature_size[1])
    d, v, u = torch.meshgrid(depths.float(), v, u, indexing="ij")
    return torch.stack([u, v, d], dim=-1)


def frustum_rays(pixels: Tensor, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Rays of network pixels: the point of depth d lies at ray · d + origin in the augmented LiDAR frame, m.

    Args:
        pixels: (h, w, 2) u, v.
        calibration: of the B samples.

    Returns:
        (B, N, h, w, 3) and (B, N, 3), float32.
    """
    c = calibration
    unaugment = _inverse(c.image_aug[..., :2, :2])
    source = _apply(_spread(unaugment), pixels.double() - _spread(c.image_aug[..., :2, 3].double()))

    turn, shift = c.lidar_aug[:, None, :3, :3].double(), c.lidar_aug[:, None, :3, 3].double()
    unproject = turn @ c.camera2lidar[..., :3, :3].double() @ _inverse(c.intrinsics[..., :3, :3])
    rays = _apply(_spread(unproject[..., :2]), source) + _spread(unproject[..., 2])
    origins = _apply(turn, c.camera2lidar[..., :3, 3].double()) + shift
    return rays.float(), origins.float()


def rasterize_depth(points: list[Tensor], calibration: Calibration, image_size: tuple[int, int]) -> Tensor:
    """(B, N, H, W) float32 depth (m) of the nearest point in each network pixel, 0 where none fell.

    Args:
        points: B × (P_i, ≥ 3), augmented LiDAR frame, m.
        calibration: of the B samples.
        image_size: H, W of the network's image.
    """
    c = calibration
    linear = c.lidar2image[..., :3, :3].double() @ _inverse(c.lidar_aug[:, None, :3, :3])
    offset = c.lidar2image[..., :3, 3].double() - _apply(linear, c.lidar_aug[:, None, :3, 3].double())
    projection = torch.cat([linear, offset[..., None]], dim=-1).float()
    image_aug = torch.cat([c.image_aug[..., :2, :2], c.image_aug[..., :2, 3:]], dim=-1)
    return nearest_depth([cloud[:, :3].float() for cloud in points], projection, image_aug, image_size)


def _inverse(matrix: Tensor) -> Tensor:
    """Inverse in float64; not finite where there is none."""
    return torch.linalg.inv_ex(matrix.double()).inverse


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """(..., m) product of (..., m, n) and (..., n)."""
    return (matrix * vector[..., None, :]).sum(dim=-1)


def _spread(of_camera: Tensor) -> Tensor:
    """(B, N, ...) → (B, N, 1, 1, ...), to be combined with pixels."""
    return of_camera[:, :, None, None]
