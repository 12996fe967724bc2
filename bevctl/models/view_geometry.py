"""Where image pixels lie in space and where LiDAR points lie in images; never under autocast.

Matrices are composed in float64 and applied by multiply-add: a matrix product could run in TF32, whose 10 bits of
mantissa move a point 50 m away by centimetres. Inverses are made without a check, which would wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
    to_pixels = _augmented(c.intrinsics[..., :3, :3].double(), c.image_aug)
    pose = c.lidar_aug[:, None].double() @ c.camera2lidar.double()
    unproject = pose[..., :3, :3] @ torch.linalg.inv_ex(to_pixels).inverse
    homogeneous = F.pad(pixels, (0, 1), value=1.0)
    rays = (unproject[:, :, None, None] * homogeneous[..., None, :]).sum(dim=-1)
    return rays.float(), pose[..., :3, 3].float()


def rasterize_depth(points: list[Tensor], calibration: Calibration, image_size: tuple[int, int]) -> Tensor:
    """(B, N, H, W) float32 depth (m) of the nearest point in each network pixel, 0 where none fell.

    Args:
        points: B × (P_i, ≥ 3), augmented LiDAR frame, m.
        calibration: of the B samples.
        image_size: H, W of the network's image.
    """
    to_pixels = _augmented(calibration.lidar2image[..., :3, :].double(), calibration.image_aug)
    unaugment = torch.linalg.inv_ex(calibration.lidar_aug[:, None].double()).inverse
    return nearest_depth([cloud[:, :3].float() for cloud in points], (to_pixels @ unaugment).float(), image_size)


def _augmented(projection: Tensor, image_aug: Tensor) -> Tensor:
    """(B, N, 3, k) float64 projection to network pixels, of one to source pixels; both homogeneous."""
    augmentation = image_aug.double()
    return augmentation[..., :3, :3] @ projection + augmentation[..., :3, 3:] * projection[..., 2:, :]
