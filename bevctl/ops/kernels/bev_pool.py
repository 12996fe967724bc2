"""Lift-splat in Triton: cells of frustum points, sums by cell, gradients by pixel. No atomics, so results repeat.

Pixels are the Q feature cells of all cameras of a batch, row by row; a pixel has D depth bins and C channels, and a
point is a bin of a pixel, numbered q · D + d.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch, sized

_CELL_POINTS = 512
"""Points that a program finds the cells of."""
_GATHER_POINTS = 4
"""Points that a program of the forward pass adds at a time."""
_GATHER_WARPS = 1
_GRADIENT_ROWS = 8
"""Pixels of one image column that a program of the backward pass takes in turn: they mostly hit the same cells."""
_GRADIENT_WARPS = 2


def cells(
    rays: Tensor, origins: Tensor, depths: Tensor, bounds: tuple[Tensor, Tensor, Tensor], truncate: bool
) -> Tensor:
    """As `bevctl.ops.bev_pool.frustum_cells`, bit by bit: nothing is contracted into a fused multiply-add."""
    height, width = rays.shape[2:4]
    out = torch.empty(*rays.shape[:4], len(depths), dtype=torch.int32, device=rays.device)
    if out.numel():
        launch(
            _cells, (triton.cdiv(out.numel(), _CELL_POINTS),),
            rays, origins, depths, *bounds, out, out.numel(), height * width,
            BINS=len(depths), TRUNCATE=truncate, BLOCK=_CELL_POINTS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@sized("points", "camera_pixels")
def _cells(
    rays, origins, depths, low, size, counts, out, points, camera_pixels, BINS: tl.constexpr, TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = point < points
    pixel = point // BINS
    camera = pixel // camera_pixels
    depth = tl.load(depths + point % BINS, mask, 0.0)
    x = _cell_along(0, rays, origins, low, size, depth, pixel, camera, mask)
    y = _cell_along(1, rays, origins, low, size, depth, pixel, camera, mask)
    z = _cell_along(2, rays, origins, low, size, depth, pixel, camera, mask)
    columns = tl.load(counts + 1).to(tl.int32)
    # Compared as floats: NaN and huge values have no defined integer.
    inside = (x > -1) & (x < tl.load(counts)) & (y > -1) & (y < columns) & (z > -1) & (z < tl.load(counts + 2))
    if not TRUNCATE:
        inside = inside & (x >= 0) & (y >= 0) & (z >= 0)
    cell = tl.where(inside, x, 0.0).to(tl.int32) * columns + tl.where(inside, y, 0.0).to(tl.int32)
    tl.store(out + point, tl.where(inside, cell, -1), mask)


@triton.jit
def _cell_along(axis: tl.constexpr, rays, origins, low, size, depth, pixel, camera, mask):
    ray = tl.load(rays + pixel * 3 + axis, mask, 0.0)
    position = ray * depth + tl.load(origins + camera * 3 + axis, mask, 0.0)
    return tl.div_rn(position - tl.load(low + axis), tl.load(size + axis))


def splat(pixels: Tensor, order: Tensor, starts: Tensor, rows: int, bins: int) -> tuple[Tensor, Tensor]:
    """(rows, C) sums by cell of the pixels' dtype, and (Q,) logarithms of the depth softmax's denominators.

    Args:
        pixels: (Q, D + C) contiguous depth logits and context.
        order: (Q · D,) int32 points by cell.
        starts: (≥ rows + 1,) int32 first place of each cell in `order`.
        rows: cells.
        bins: D.
    """
    count, channels = len(pixels), pixels.shape[1] - bins
    log_sums = torch.empty(count, dtype=torch.float32, device=pixels.device)
    # Rows of their own start at aligned addresses, which lets a thread load several channels at once.
    context = pixels.new_empty(count, channels)
    out = pixels.new_empty(rows, channels)
    sizes = {"BINS": bins, "CHANNELS": channels, "BLOCK_CHANNELS": triton.next_power_of_2(channels)}
    if count:
        launch(
            _prepare, (count,), pixels, log_sums, context,
            BLOCK_BINS=triton.next_power_of_2(bins), **sizes, num_warps=1,
        )  # fmt: skip
    if rows:
        launch(
            _sum_cells, (rows,), pixels, context, log_sums, order, starts, out,
            BLOCK_POINTS=_GATHER_POINTS, **sizes, num_warps=_GATHER_WARPS,
        )  # fmt: skip
    return out, log_sums


@sized()
def _prepare(
    pixels, log_sums, context, BLOCK_BINS: tl.constexpr, BINS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0)
    row = pixels + pixel.to(tl.int64) * (BINS + CHANNELS)
    depth_bin = tl.arange(0, BLOCK_BINS)
    logits = tl.load(row + depth_bin, depth_bin < BINS, -float("inf")).to(tl.float32)
    largest = tl.max(logits, 0)
    tl.store(log_sums + pixel, largest + tl.log(tl.sum(tl.exp(logits - largest), 0)))
    channel = tl.arange(0, BLOCK_CHANNELS)
    values = tl.load(row + BINS + channel, channel < CHANNELS)
    tl.store(context + pixel.to(tl.int64) * CHANNELS + channel, values, channel < CHANNELS)


@sized()
def _sum_cells(
    pixels, context, log_sums, order, starts, out, BLOCK_POINTS: tl.constexpr, BINS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0)
    first = tl.load(starts + cell)
    last = tl.load(starts + cell + 1)
    channel = tl.arange(0, BLOCK_CHANNELS)
    total = tl.zeros([BLOCK_POINTS, BLOCK_CHANNELS], tl.float32)
    for start in range(first, last, BLOCK_POINTS):
        place = start + tl.arange(0, BLOCK_POINTS)
        mask = place < last
        point = tl.load(order + place, mask, 0)
        pixel = (point // BINS).to(tl.int64)
        logit = tl.load(pixels + pixel * (BINS + CHANNELS) + point % BINS, mask, -float("inf")).to(tl.float32)
        weight = tl.exp(logit - tl.load(log_sums + pixel, mask, 0.0))
        address = context + pixel[:, None] * CHANNELS + channel[None, :]
        values = tl.load(address, mask[:, None] & (channel < CHANNELS)[None, :], 0.0)
        total += weight[:, None] * values.to(tl.float32)
    address = out + cell.to(tl.int64) * CHANNELS + channel
    tl.store(address, tl.sum(total, 0).to(out.dtype.element_ty), channel < CHANNELS)


def splat_gradient(pixels: Tensor, log_sums: Tensor, rows: Tensor, gradient: Tensor) -> Tensor:
    """(Q, D + C) gradient of the pixels.

    Args:
        pixels: (Q, D + C) contiguous depth logits and context.
        log_sums: (Q,) from `splat`.
        rows: (B, N, h, w, D) int32 cell of each point; from `len(gradient)` on it is none.
        gradient: (cells, C) contiguous gradient of the sums.
    """
    cells, channels = gradient.shape
    height, width, bins = rows.shape[2:]
    out = torch.empty_like(pixels)
    groups = triton.cdiv(height, _GRADIENT_ROWS)
    if out.numel():
        launch(
            _pixel_gradients, (len(pixels) // (height * width) * width * groups,),
            pixels, log_sums, rows, gradient, out, cells, height, width, groups,
            ROWS=_GRADIENT_ROWS, BINS=bins, CHANNELS=channels, BLOCK_BINS=triton.next_power_of_2(bins),
            BLOCK_CHANNELS=triton.next_power_of_2(channels), num_warps=_GRADIENT_WARPS,
        )  # fmt: skip
    return out


@sized("cells", "height", "width", "groups")
def _pixel_gradients(
    pixels, log_sums, rows, gradient, out, cells, height, width, groups, ROWS: tl.constexpr, BINS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_BINS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = program // groups
    camera = column // width
    depth_bin = tl.arange(0, BLOCK_BINS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    top = program % groups * ROWS
    for v in range(top, min(top + ROWS, height)):
        pixel = ((camera * height + v) * width + column % width).to(tl.int64)
        cell = tl.load(rows + pixel * BINS + depth_bin, depth_bin < BINS, cells)
        address = gradient + cell.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        reached = tl.load(address, (cell < cells)[:, None] & (channel < CHANNELS)[None, :], 0.0).to(tl.float32)
        row = pixel * (BINS + CHANNELS)
        context = tl.load(pixels + row + BINS + channel, channel < CHANNELS, 0.0).to(tl.float32)
        logit = tl.load(pixels + row + depth_bin, depth_bin < BINS, -float("inf")).to(tl.float32)
        weight = tl.exp(logit - tl.load(log_sums + pixel))
        weight_gradient = tl.sum(reached * context[None, :], 1)
        context_gradient = tl.sum(reached * weight[:, None], 0)
        logit_gradient = weight * (weight_gradient - tl.sum(weight * weight_gradient, 0))
        dtype = out.dtype.element_ty
        tl.store(out + row + depth_bin, logit_gradient.to(dtype), depth_bin < BINS)
        tl.store(out + row + BINS + channel, context_gradient.to(dtype), channel < CHANNELS)
