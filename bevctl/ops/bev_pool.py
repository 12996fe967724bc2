"""Lift-splat: features spread along their rays by a depth distribution, summed in bird's-eye-view cells.

After Philion and Fidler, Lift, Splat, Shoot (ECCV 2020). The outer product of depth and context is never held as a
whole, neither forward nor backward. Points are sorted by cell once a batch; each cell then adds its points, and in the
backward pass each pixel gathers from its cells. Nothing is added atomically, so results repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton

_SINKS = 1024
"""Rows behind the cells for points outside the grid: a single one would hold more than one thread can add."""


@dataclass(frozen=True)
class SplatIndex:
    """Frustum points by cell. Points are numbered in the order (B, N, h, w, D), cells in the order (B, X, Y)."""

    rows: Tensor
    """(B, N, h, w, D) int32 cell of each point; B · X · Y and more outside the grid."""
    order: Tensor
    """(points,) int32 points sorted by row, those of one row in ascending order."""
    starts: Tensor
    """(rows,) int32 place in `order` of the first point of each row."""
    grid: tuple[int, int]
    """X, Y."""

    @property
    def cells(self) -> int:
        """B · X · Y."""
        return len(self.rows) * self.grid[0] * self.grid[1]


def frustum_cells(
    rays: Tensor,
    origins: Tensor,
    depths: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor],
    truncate: bool = True,
) -> Tensor:
    """(B, N, h, w, D) int32 cell x · Y + y of the points ray · depth + origin, or -1 outside the grid.

    Args:
        rays: (B, N, h, w, 3) float32, m for a metre of depth.
        origins: (B, N, 3) float32, m.
        depths: (D,) float32, m.
        bounds: lower bounds (3,), m; cell edges (3,), m; number of cells (3,) int64 (X, Y, Z).
        truncate: whether the index is truncated toward zero, so that points up to one cell below a lower bound belong
            to the first cell; weights trained elsewhere rely on it (z from one cell below the range counts).

    Raises:
        ValueError: shapes that do not belong together.
    """
    if rays.dim() != 5 or rays.shape[-1] != 3 or origins.shape != (*rays.shape[:2], 3):
        raise ValueError(
            f"rays must be (B, N, h, w, 3) and origins (B, N, 3), got {tuple(rays.shape)} and {tuple(origins.shape)}"
        )
    if use_triton(rays):
        from bevctl.ops.kernels import bev_pool as kernels

        return kernels.cells(rays.contiguous(), origins.contiguous(), depths, bounds, truncate)
    cells = torch.empty(*rays.shape[:4], len(depths), dtype=torch.int32, device=rays.device)
    for sample, (ray, origin) in enumerate(zip(rays, origins, strict=True)):
        cells[sample] = _sample_cells(ray, origin, depths, bounds, truncate)
    return cells


def _sample_cells(
    rays: Tensor, origins: Tensor, depths: Tensor, bounds: tuple[Tensor, Tensor, Tensor], truncate: bool
) -> Tensor:
    """(N, h, w, D) float32 cells of one sample."""
    inside = torch.ones((), dtype=torch.bool, device=rays.device)
    index = []
    for axis, (low, size, count) in enumerate(zip(*bounds, strict=True)):
        along = (rays[..., axis, None] * depths + origins[:, None, None, None, axis] - low) / size
        # Compared as floats: NaN and huge values have no defined integer.
        inside = inside & (along > -1 if truncate else along >= 0) & (along < count)
        index.append(along.trunc())
    return torch.where(inside, index[0] * bounds[2][1] + index[1], -1.0)


def index_points(cells: Tensor, grid: tuple[int, int]) -> SplatIndex:
    """Sort frustum points by cell, without waiting for the device.

    Args:
        cells: (B, N, h, w, D) integer cell x · Y + y of each point in its sample's grid, or -1.
        grid: (X, Y).

    Raises:
        ValueError: cells of another shape, or more points or cells than int32 counts.
    """
    if cells.dim() != 5 or max(cells.numel(), len(cells) * grid[0] * grid[1] + _SINKS) >= 2**31:
        raise ValueError(f"cells must be (B, N, h, w, D) with fewer than 2³¹ points, got {tuple(cells.shape)}")
    count = len(cells) * grid[0] * grid[1]
    number = torch.arange(cells.shape[:-1].numel(), dtype=torch.int32, device=cells.device)
    outside = (count + number % _SINKS).view(*cells.shape[:-1], 1)
    sample = torch.arange(len(cells), dtype=torch.int32, device=cells.device).view(-1, 1, 1, 1, 1)
    rows = torch.where(cells < 0, outside, cells.int() + sample * (grid[0] * grid[1]))
    ascending, order = rows.flatten().sort(stable=True)
    every = torch.arange(count + _SINKS, dtype=torch.int32, device=cells.device)
    return SplatIndex(rows, order.int(), torch.searchsorted(ascending, every, out_int32=True), grid)


def lift_splat(logits: Tensor, index: SplatIndex) -> Tensor:
    """out[b, :, cell] = Σ softmax(depth logits) · context over the points of sample b that lie in the cell.

    Softmax and sums are float32 (float64 for float64 input) whatever the input; the result is rounded to its dtype.
    Only the logits and the index are kept for the backward pass.

    Args:
        logits: (B, N, D + C, h, w): logits of D depth bins, then C context features; least work in channels-last.
        index: of (B, N, h, w, D) points.

    Returns:
        (B, C, X, Y), channels-last in memory.

    Raises:
        ValueError: shapes that do not belong together.
    """
    batch, cameras, height, width, bins = index.rows.shape
    if logits.dim() != 5 or logits.shape[:2] + logits.shape[3:] != (batch, cameras, height, width):
        raise ValueError(
            f"logits must be ({batch}, {cameras}, {bins} + C, {height}, {width}), got {tuple(logits.shape)}"
        )
    if logits.shape[2] <= bins:
        raise ValueError(f"{logits.shape[2]} channels leave no context beside {bins} depth bins")
    pixels = logits.permute(0, 1, 3, 4, 2).flatten(0, 3).contiguous()
    function = _TritonSplat if use_triton(logits) and logits.dtype != torch.float64 else _TorchSplat
    pooled: Tensor = function.apply(pixels, index.rows, index.order, index.starts, index.cells)
    return pooled.view(batch, *index.grid, logits.shape[2] - bins).permute(0, 3, 1, 2)


class _TritonSplat(torch.autograd.Function):
    """(cells, C) from (pixels, D + C)."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, rows: Tensor, order: Tensor, starts: Tensor, cells: int) -> Tensor:
        from bevctl.ops.kernels import bev_pool as kernels

        out, log_sums = kernels.splat(pixels, order, starts, cells, rows.shape[-1])
        ctx.save_for_backward(pixels, log_sums, rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        from bevctl.ops.kernels import bev_pool as kernels

        pixels, log_sums, rows = ctx.saved_tensors
        return kernels.splat_gradient(pixels, log_sums, rows, gradient.contiguous()), None, None, None, None


class _TorchSplat(torch.autograd.Function):
    """(cells, C) from (pixels, D + C): a weighted sum over bags of pixels."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, rows: Tensor, order: Tensor, starts: Tensor, cells: int) -> Tensor:
        ctx.save_for_backward(pixels, rows)
        bins = rows.shape[-1]
        depth, context = _depth_and_context(pixels, bins)
        weights = depth.flatten().index_select(0, order)
        bags = F.embedding_bag(order // bins, context.contiguous(), starts, mode="sum", per_sample_weights=weights)
        return bags[:cells].to(pixels.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        pixels, rows = ctx.saved_tensors
        out = torch.empty_like(pixels)
        per_sample, cells_per_sample = len(pixels) // max(1, len(rows)), len(gradient) // max(1, len(rows))
        for sample, cells in enumerate(rows.flatten(1, 3)):
            # A point outside the grid gets the gradient of nothing: the row of zeros behind the cells.
            first = sample * cells_per_sample
            reachable = F.pad(gradient[first : first + cells_per_sample], (0, 0, 0, 1))
            local = (cells - first).clamp_(max=cells_per_sample)
            for part in _chunks(per_sample, local.shape[1] * gradient.shape[1], pixels.is_cuda):
                place = slice(sample * per_sample + part.start, sample * per_sample + part.stop)
                out[place] = _pixel_gradients(pixels[place], local[part], reachable)
        return out, None, None, None, None


def _depth_and_context(pixels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(Q, D) softmax and (Q, C) context in the dtype of the sums."""
    wide = torch.promote_types(pixels.dtype, torch.float32)
    return pixels[:, :bins].softmax(dim=1, dtype=wide), pixels[:, bins:].to(wide)


def _pixel_gradients(pixels: Tensor, cells: Tensor, gradient: Tensor) -> Tensor:
    """(q, D + C) gradient of a few pixels with (q, D) cells."""
    depth, context = _depth_and_context(pixels, cells.shape[1])
    reached = gradient.index_select(0, cells.flatten()).to(depth.dtype).view(*cells.shape, -1)
    depth_gradient = (reached * context[:, None]).sum(dim=2)
    context_gradient = (reached * depth[..., None]).sum(dim=1)
    logit_gradient = depth * (depth_gradient - (depth * depth_gradient).sum(dim=1, keepdim=True))
    return torch.cat([logit_gradient, context_gradient], dim=1)


def _chunks(pixels: int, elements_per_pixel: int, on_gpu: bool) -> Iterator[slice]:
    """Ranges of pixels whose outer product is small: in a CPU's cache if possible."""
    step = max(1, (2**24 if on_gpu else 2**19) // elements_per_pixel)
    for first in range(0, pixels, step):
        yield slice(first, min(first + step, pixels))
