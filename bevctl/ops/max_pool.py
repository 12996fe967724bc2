"""Max pooling that keeps one byte for each result: where in its window it is from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton

WINDOW, STRIDE = 3, 2


def max_pool(x: Tensor) -> Tensor:
    """The largest of each 3 × 3 window, two apart; the last ones may reach beyond the map, which counts for nothing.

    torch keeps eight bytes for each result, four times what a map in half precision takes itself, and in the backward
    pass adds up gradients in an order that varies. Of equal values the first counts, a NaN is the largest.

    Args:
        x: (B, C, H, W).

    Returns:
        (B, C, ⌊H / 2⌋, ⌊W / 2⌋), channels-last in memory on a GPU.

    Raises:
        ValueError: a map of a single row or column.
    """
    if x.dim() != 4 or min(x.shape[2:]) < 2:
        raise ValueError(f"x must be (B, C, H, W) with H and W of at least 2, got {tuple(x.shape)}")
    if not torch.compiler.is_compiling() and use_triton(x) and x.numel() > 0 and x.dtype != torch.float64:
        pooled: Tensor = _MaxPool.apply(x.contiguous(memory_format=torch.channels_last))
        return pooled
    return F.max_pool2d(x, WINDOW, STRIDE, ceil_mode=True)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from bevctl.ops.kernels.max_pool import forward

        pooled, source = forward(x)
        ctx.save_for_backward(source)
        ctx.size = x.shape
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from bevctl.ops.kernels.max_pool import backward

        (source,) = ctx.saved_tensors
        return backward(grad.contiguous(memory_format=torch.channels_last), source, ctx.size)
