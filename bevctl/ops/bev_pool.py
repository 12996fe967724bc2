"""Splat: add depth-weighted image features into the cells of the bird's-eye view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SINKS = 1024
"""Rows that take the products which fall outside the grid; a single one would serialise a GPU's atomics."""


def bev_cells(points: Tensor, low: Tensor, size: Tensor, counts: Tensor) -> Tensor:
    """Flat cell x · Y + y of each point, int64, or -1 outside the grid.

    The index is truncated toward zero, not floored: points up to one cell below a lower bound belong to the first
    cell. Weights trained elsewhere rely on it (z from one cell below the range counts).

    Args:
        points: (..., 3) x, y, z, m.
        low: (3,) lower bounds, m.
        size: (3,) cell edges, m.
        counts: (3,) number of cells (X, Y, 1).

    Raises:
        ValueError: points that are not (..., 3).
    """
    if points.shape[-1] != 3:
        raise ValueError(f"points must be (..., 3), got {tuple(points.shape)}")
    index = (points - low) / size
    # Compared as floats: NaN and huge values have no defined integer.
    inside = ((index > -1) & (index < counts)).all(dim=-1)
    x, y = index[..., 0].trunc(), index[..., 1].trunc()
    return torch.where(inside, x * counts[1] + y, -1.0).long()


def bev_pool(depth: Tensor, context: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """out[b, :, cell] = Σ depth · context over the frustum points of sample b that lie in the cell.

    The outer product is never held as a whole, neither here nor in the backward pass, which makes it again piece by
    piece. Sums are float32 (float64 for float64 input) whatever the input, and so is the result.
    After Philion and Fidler, Lift, Splat, Shoot (ECCV 2020).

    Args:
        depth: (B, N, D, H, W) weight of each depth bin.
        context: (B, N, C, H, W) features.
        cells: (B, N, D, H, W) int64 flat cell x · Y + y, or -1.
        shape: (X, Y).

    Returns:
        (B, C, X, Y).

    Raises:
        ValueError: shapes that do not belong together.
    """
    if depth.dim() != 5 or depth.shape != cells.shape or context.shape != _context_shape(depth, context):
        raise ValueError(
            "depth and cells must be (B, N, D, H, W) and context (B, N, C, H, W), got "
            f"{tuple(depth.shape)}, {tuple(cells.shape)} and {tuple(context.shape)}"
        )
    pooled: Tensor = _Splat.apply(depth, context.permute(0, 1, 3, 4, 2).contiguous(), cells, shape)
    return pooled.view(len(depth), *shape, -1).permute(0, 3, 1, 2)


def _context_shape(depth: Tensor, context: Tensor) -> tuple[int, ...]:
    """The shape that `context` must have, whatever its channels."""
    return (*depth.shape[:2], *context.shape[2:3], *depth.shape[3:])


class _Splat(torch.autograd.Function):
    """(B · X · Y, C) cells from (B, N, D, H, W) depth and (B, N, H, W, C) context."""

    @staticmethod
    def forward(ctx: Any, depth: Tensor, context: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(depth, context, cells)
        ctx.cells_per_sample = shape[0] * shape[1]
        channels, rows = context.shape[-1], len(depth) * ctx.cells_per_sample
        wide = _wide(depth, context)
        context = context.to(wide)
        out = torch.zeros(rows + _SINKS, channels, dtype=wide, device=depth.device)
        for bins in _chunks(depth, channels):
            product = depth[:, :, bins, ..., None].to(wide) * context[:, :, None]
            target = _rows(cells[:, :, bins], ctx.cells_per_sample)
            sinks = rows + torch.arange(len(target), device=target.device) % _SINKS
            out.index_add_(0, torch.where(target < 0, sinks, target), product.view(-1, channels))
        return out[:rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        depth, context, cells = ctx.saved_tensors
        channels, wide = context.shape[-1], grad.dtype
        depth_grad = torch.empty_like(depth)
        context_grad = torch.zeros_like(context, dtype=wide)
        for bins in _chunks(depth, channels):
            target = _rows(cells[:, :, bins], ctx.cells_per_sample)
            # A product that fell outside the grid gets the gradient of nothing.
            reached = grad.index_select(0, target.clamp(min=0)).masked_fill_((target < 0)[:, None], 0)
            reached = reached.view(*cells[:, :, bins].shape, channels)
            depth_grad[:, :, bins] = (reached * context[:, :, None]).sum(dim=-1)
            context_grad += (reached * depth[:, :, bins, ..., None]).sum(dim=2)
        return depth_grad, context_grad.to(context.dtype), None, None


def _wide(depth: Tensor, context: Tensor) -> torch.dtype:
    """dtype of the sums."""
    return torch.promote_types(torch.promote_types(depth.dtype, context.dtype), torch.float32)


def _chunks(depth: Tensor, channels: int) -> Iterator[slice]:
    """Ranges of depth bins, one bin or as many as keep their outer product small: in a CPU's cache if possible."""
    elements = 2**24 if depth.is_cuda else 2**20
    step = max(1, elements // max(1, depth[:, :, :1].numel() * channels))
    for first in range(0, depth.shape[2], step):
        yield slice(first, first + step)


def _rows(cells: Tensor, cells_per_sample: int) -> Tensor:
    """Flat rows of the output that cells of a (B, ...) tensor go to; -1 stays."""
    offset = torch.arange(len(cells), device=cells.device).view(-1, *[1] * (cells.dim() - 1)) * cells_per_sample
    return torch.where(cells < 0, -1, cells + offset).flatten()
