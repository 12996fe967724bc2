"""Depth images in Triton: one pass over the points for all cameras."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops import depth_raster
from bevctl.ops.kernels.launch import launch, sized

_BLOCK = 256
"""Points of a program."""
_LEAST, _MOST = (tl.constexpr(limit) for limit in depth_raster.DEPTH_RANGE)


def lower(points: Tensor, projection: Tensor, nearest: Tensor) -> None:
    """Lower each pixel of the (N, H, W) float32 `nearest`, in place, to the depth of the points that fall in it.

    Bit by bit as plain torch does it: nothing is contracted into a fused multiply-add.
    """
    if nearest.numel() and len(points):
        launch(
            _lower, (triton.cdiv(len(points), _BLOCK), len(nearest)),
            points, projection.contiguous(), nearest.view(torch.int32), *points.stride(), len(points),
            *nearest.shape[1:], BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip


@sized("stride", "step", "count", "height", "width")
def _lower(points, projections, nearest, stride, step, count, height, width, BLOCK: tl.constexpr):
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    camera = tl.program_id(1)
    mask = point < count
    row = points + point.to(tl.int64) * stride
    x = tl.load(row, mask, 0.0)
    y = tl.load(row + step, mask, 0.0)
    z = tl.load(row + 2 * step, mask, 0.0)
    projection = projections + camera * 12
    depth = tl.clamp(_affine(projection + 8, x, y, z), _LEAST, _MOST)
    u = tl.floor(tl.div_rn(_affine(projection, x, y, z), depth))
    v = tl.floor(tl.div_rn(_affine(projection + 4, x, y, z), depth))
    # Compared as floats: NaN and huge values have no defined integer.
    inside = mask & (u >= 0) & (u < width) & (v >= 0) & (v < height)
    pixel = (camera * height + tl.where(inside, v, 0.0).to(tl.int32)) * width + tl.where(inside, u, 0.0).to(tl.int32)
    # Positive floats are in the order of their bits.
    tl.atomic_min(nearest + pixel, depth.to(tl.int32, bitcast=True), inside, sem="relaxed")


@triton.jit
def _affine(row, x, y, z):
    return x * tl.load(row) + y * tl.load(row + 1) + z * tl.load(row + 2) + tl.load(row + 3)
