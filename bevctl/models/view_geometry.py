"""Where image pixels lie in space and where LiDAR points lie in images; always float32, never under autocast.

Matrices are composed in float64 and applied by multiply-add: a matrix product could run in TF32, whose 10 bits of
mantissa move a point 50 m away by centimetres.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.batch import Calibration

_DEPTH_RANGE = (1e-5, 1e5)


def frustum_grid(image_size: tuple[int, int], feature_size: tuple[int, int], depths: Tensor) -> Tensor:
    """(D, h, w, 3) pixel u, v and depth (m) of each bin of each feature cell.

    The cells span the image from its first to its last pixel.
    """
    v = torch.linspace(0, image_size[0] - 1, feature_size[0])
    u = torch.linspace(0, image_size[1] - 1, feature_size[1])
    d, v, u = torch.meshgrid(depths.float(), v, u, indexing="ij")
    return torch.stack([u, v, d], dim=-1)


def frustum_to_lidar(frustum: Tensor, calibration: Calibration) -> Tensor:
    """(B, N, D, h, w, 3) positions in the augmented LiDAR frame (m) of (D, h, w, 3) network pixels and depths."""
    c = calibration
    unaugment = torch.linalg.inv(c.image_aug[..., :3, :3].double())
    source = _affine(unaugment, -_apply(unaugment, c.image_aug[..., :3, 3].double()), frustum[None, None])
    homogeneous = torch.cat([source[..., :2] * source[..., 2:], source[..., 2:]], dim=-1)

    turn, shift = c.lidar_aug[:, None, :3, :3].double(), c.lidar_aug[:, None, :3, 3].double()
    unproject = turn @ c.camera2lidar[..., :3, :3].double() @ torch.linalg.inv(c.intrinsics[..., :3, :3].double())
    origin = _apply(turn, c.camera2lidar[..., :3, 3].double()) + shift
    return _affine(unproject, origin, homogeneous)


def rasterize_depth(points: list[Tensor], calibration: Calibration, image_size: tuple[int, int]) -> Tensor:
    """(B, N, H, W) float32 depth (m) of the nearest point in each network pixel, 0 where none fell.

    Depth is clamped to 1e-5..1e5 m before the division, so that points behind a camera land far outside its image.
    The nearest of several points wins, which depends on no order.

    Args:
        points: B × (P_i, ≥ 3), augmented LiDAR frame, m.
        calibration: of the B samples.
        image_size: H, W of the network's image.
    """
    samples = [
        _sample_raster(cloud[:, :3].float(), _point_to_pixel(calibration, i), calibration.image_aug[i], image_size)
        for i, cloud in enumerate(points)
    ]
    return torch.stack(samples)


def _point_to_pixel(calibration: Calibration, sample: int) -> tuple[Tensor, Tensor]:
    """Linear part (N, 3, 3) and offset (N, 3) from the augmented LiDAR frame to source pixels, homogeneous."""
    unaugment = torch.linalg.inv(calibration.lidar_aug[sample, :3, :3].double())
    project = calibration.lidar2image[sample].double()
    linear = project[:, :3, :3] @ unaugment
    return linear, project[:, :3, 3] - _apply(linear, calibration.lidar_aug[sample, :3, 3].double())


def _sample_raster(
    points: Tensor, projection: tuple[Tensor, Tensor], image_aug: Tensor, image_size: tuple[int, int]
) -> Tensor:
    """(N, H, W) raster of (P, 3) points."""
    height, width = image_size
    homogeneous = _affine(*projection, points[None])
    depth = homogeneous[..., 2].clamp(*_DEPTH_RANGE)
    source = torch.cat([homogeneous[..., :2], depth[..., None]], dim=-1)
    source = torch.cat([source[..., :2] / source[..., 2:], source[..., 2:]], dim=-1)
    pixel = _affine(image_aug[:, :3, :3].double(), image_aug[:, :3, 3].double(), source).floor()
    u, v = pixel[..., 0], pixel[..., 1]
    # Compared as floats: NaN and huge values have no defined integer.
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    # What is outside changes no pixel (its depth is infinite); spread out, since a GPU's atomics queue on one address.
    elsewhere = torch.arange(len(points), device=points.device) % (height * width)
    index = torch.where(inside, v * width + u, elsewhere).long()
    depth = torch.where(inside, depth, torch.inf)
    nearest = depth.new_full((len(depth), height * width), torch.inf).scatter_reduce(1, index, depth, "amin")
    return torch.where(nearest.isinf(), 0.0, nearest).view(-1, height, width)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """(..., 3) product of (..., 3, 3) and (..., 3)."""
    return (matrix * vector[..., None, :]).sum(dim=-1)


def _affine(linear: Tensor, offset: Tensor, points: Tensor) -> Tensor:
    """(*L, *P, 3) float32 points moved by (*L, 3, 3) linear parts and (*L, 3) offsets.

    `points` are (*L, *P, 3); a leading 1 is broadcast.
    """
    lead = offset.dim() - 1
    spread = (slice(None),) * lead + (None,) * (points.dim() - 1 - lead)
    of_x, of_y, of_z = linear.float()[spread].unbind(dim=-1)
    x, y, z = (points[..., i : i + 1] for i in range(3))
    return x * of_x + y * of_y + z * of_z + offset.float()[spread]
