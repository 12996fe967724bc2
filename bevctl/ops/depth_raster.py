"""Depth images: the nearest of the points that fall in each pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.ops.backend import use_triton

DEPTH_RANGE = (1e-5, 1e5)
"""m; depth is clamped to it before the division, so that points behind a camera land far outside its image."""


def nearest_depth(points: list[Tensor], projection: Tensor, image_size: tuple[int, int]) -> Tensor:
    """(B, N, H, W) float32 depth (m) of the nearest point in each pixel, 0 where none fell.

    A minimum depends on no order, so results repeat bit by bit.

    Args:
        points: B × (P_i, ≥ 3) float32 x, y, z, m.
        projection: (B, N, 3, 4) float32 to pixels, homogeneous (u·d, v·d, d).
        image_size: H, W.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if projection.dim() != 4 or projection.shape[2:] != (3, 4) or len(points) != len(projection):
        raise ValueError(
            f"projection must be ({len(points)}, N, 3, 4) for {len(points)} clouds, got {tuple(projection.shape)}"
        )
    nearest = projection.new_full((*projection.shape[:2], *image_size), torch.inf)
    if use_triton(projection):
        from bevctl.ops.kernels.depth_raster import lower
    else:
        lower = _lower
    for cloud, of_sample, images in zip(points, projection, nearest, strict=True):
        lower(cloud, of_sample, images)
    return nearest.masked_fill_(nearest.isinf(), 0.0)


def _lower(points: Tensor, projection: Tensor, nearest: Tensor) -> None:
    """Lower each pixel of the (N, H, W) `nearest`, in place, to the depth of the points that fall in it."""
    height, width = nearest.shape[1:]
    x, y, z = points[:, :3].unbind(dim=1)
    # Rows of all cameras: (N, P) each. Not a matrix product, which could run in TF32.
    across, down, depth = (
        x * of_x + y * of_y + z * of_z + offset
        for of_x, of_y, of_z, offset in (row[..., None].unbind(dim=1) for row in projection.unbind(dim=1))
    )
    depth = depth.clamp(*DEPTH_RANGE)
    u, v = (across / depth).floor(), (down / depth).floor()
    # Compared as floats: NaN and huge values have no defined integer.
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    # What is outside changes no pixel (its depth is infinite); spread out, since a GPU's atomics queue on one address.
    elsewhere = torch.arange(len(points), device=points.device) % (height * width)
    index = torch.where(inside, v * width + u, elsewhere).long()
    nearest.flatten(1).scatter_reduce_(1, index, torch.where(inside, depth, torch.inf), "amin")
