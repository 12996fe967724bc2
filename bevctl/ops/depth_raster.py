"""Depth images: the nearest of the points that fall in each pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.ops.backend import use_triton

DEPTH_RANGE = (1e-5, 1e5)
"""m; depth is clamped to it before the division, so that points behind a camera land far outside its image."""


def nearest_depth(points: list[Tensor], projection: Tensor, image_aug: Tensor, image_size: tuple[int, int]) -> Tensor:
    """(B, N, H, W) float32 depth (m) of the nearest point in each pixel, 0 where none fell.

    A minimum depends on no order, so results repeat bit by bit.

    Args:
        points: B × (P_i, ≥ 3) float32 x, y, z, m.
        projection: (B, N, 3, 4) float32 to source pixels, homogeneous (u·d, v·d, d).
        image_aug: (B, N, 2, 3) float32 from source pixels to pixels.
        image_size: H, W.

    Raises:
        ValueError: shapes that do not belong together.
    """
    batch, cameras = projection.shape[:2]
    if len(points) != batch or projection.shape[2:] != (3, 4) or image_aug.shape != (batch, cameras, 2, 3):
        raise ValueError(
            f"projection must be ({len(points)}, N, 3, 4) and image_aug ({len(points)}, N, 2, 3) for {len(points)} "
            f"clouds, got {tuple(projection.shape)} and {tuple(image_aug.shape)}"
        )
    nearest = projection.new_full((batch, cameras, *image_size), torch.inf)
    if use_triton(projection):
        from bevctl.ops.kernels.depth_raster import lower
    else:
        lower = _lower
    for cloud, *of_sample in zip(points, projection, image_aug, nearest, strict=True):
        lower(cloud, *of_sample)
    return nearest.masked_fill_(nearest.isinf(), 0.0)


def _lower(points: Tensor, projection: Tensor, image_aug: Tensor, nearest: Tensor) -> None:
    """Lower each pixel of the (N, H, W) `nearest`, in place, to the depth of the points that fall in it."""
    height, width = nearest.shape[1:]
    x, y, depth = _affine(projection, points[:, 0], points[:, 1], points[:, 2])
    depth = depth.clamp(*DEPTH_RANGE)
    u, v = (pixel.floor() for pixel in _affine(image_aug, x / depth, y / depth))
    # Compared as floats: NaN and huge values have no defined integer.
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    # What is outside changes no pixel (its depth is infinite); spread out, since a GPU's atomics queue on one address.
    elsewhere = torch.arange(len(points), device=points.device) % (height * width)
    index = torch.where(inside, v * width + u, elsewhere).long()
    nearest.flatten(1).scatter_reduce_(1, index, torch.where(inside, depth, torch.inf), "amin")


def _affine(matrix: Tensor, *along: Tensor) -> list[Tensor]:
    """Rows of (N, rows, k + 1) matrices times k coordinates, each (P,) or (N, P): (N, P) each."""
    rows = []
    for coefficients in matrix.unbind(dim=1):
        *factors, offset = coefficients[..., None].unbind(dim=1)
        total = along[0] * factors[0]
        for values, factor in zip(along[1:], factors[1:], strict=True):
            total = total + values * factor
        rows.append(total + offset)
    return rows
