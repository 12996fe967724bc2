"""Bilinear resampling onto an axis-aligned grid, as two matrix products.

Separable weights make it a matrix product per axis: half precision on tensor cores, and a backward pass that is
deterministic on a GPU, which interpolate's and grid_sample's are not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_weights(positions: Tensor, size: int) -> Tensor:
    """(n, size) weights that read a line of `size` samples at (n,) positions, counted in samples from the first.

    Between samples they interpolate; beyond the ends they fall to zero within one sample.
    """
    samples = torch.arange(size, device=positions.device, dtype=positions.dtype)
    return (1 - (positions[:, None] - samples).abs()).clamp(min=0)


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, C, H, W) read at the weights `rows` (H', H) and `columns` (W', W) → (B, C, H', W').

    The result keeps the memory format of `x`, channels-first or channels-last.
    """
    rows, columns = _aligned(rows, x.dtype), _aligned(columns, x.dtype)
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return rows @ (x @ columns.T)
    batch, channels, height, width = x.shape
    lines = x.permute(0, 2, 3, 1).reshape(batch * height, width, channels)
    stretched = columns.expand(len(lines), -1, -1).bmm(lines).view(batch, height, -1)
    resampled = rows.expand(batch, -1, -1).bmm(stretched)
    return resampled.view(batch, len(rows), len(columns), channels).permute(0, 3, 1, 2)


def _aligned(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The same weights in rows that start at multiples of 16 bytes, as fast matrix products want them."""
    length = weights.shape[1]
    return F.pad(weights.to(dtype), (0, -length % 8))[:, :length]


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) stretched to (B, C, *size); the corners of both images, not their outer samples, coincide."""
    rows, columns = (_stretched(old, new, x, 0.5) for old, new in zip(x.shape[-2:], size, strict=True))
    return resample(x, rows, columns)


def resize_samples(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) stretched to (B, C, *size); the outer samples of both images, not their corners, coincide."""
    rows, columns = (_stretched(old, new, x, 0.0) for old, new in zip(x.shape[-2:], size, strict=True))
    return resample(x, rows, columns)


def _stretched(old: int, new: int, like: Tensor, margin: float) -> Tensor:
    """Weights that read `old` samples `new` times; an image ends `margin` samples beyond its outer ones."""
    # At least float32: half precision counts whole numbers only to 2048, bfloat16 to 256.
    dtype = torch.promote_types(like.dtype, torch.float32)
    step = (old - 1 + 2 * margin) / max(new - 1 + 2 * margin, 1)
    positions = (torch.arange(new, device=like.device, dtype=dtype) + margin) * step - margin
    return linear_weights(positions.clamp(0, old - 1), old).to(like.dtype)
