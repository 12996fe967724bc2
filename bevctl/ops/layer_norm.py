"""Layer norm that reads one number format and writes another, and the scaled sum of a residual block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton

_LARGEST_ROW = 8192
"""Channels that the kernels hold at once."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalises the last axis and scales it, in float32 at least.

    A mixed-precision network keeps its residual stream in float32 and multiplies in half precision: writing `dtype` at
    once spares a pass over the map.

    Args:
        x: (..., C).
        weight: (C,) factor of each channel.
        bias: (C,) summand of each channel.
        eps: added to the variance.
        dtype: number format of the result.

    Returns:
        (..., C) of `dtype`.
    """
    # A compiler fuses the plain form with its neighbours.
    if not torch.compiler.is_compiling() and use_triton(x) and _fits_kernel(x):
        out: Tensor = _LayerNorm.apply(x.contiguous(), weight, bias, eps, dtype)
        return out
    return layer_norm_reference(x, weight, bias, eps, dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`layer_norm` in plain torch, on any device."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(dtype)


def scaled_residual(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """x + scale · branch.

    Args:
        x: (B, ...).
        branch: the same shape, perhaps of a narrower type.
        scale: (B,) float32 factor of each sample, without gradient.

    Returns:
        (B, ...) of x's dtype.
    """
    if not torch.compiler.is_compiling() and use_triton(x) and _fits_kernel(x):
        out: Tensor = _ScaledResidual.apply(x.contiguous(), branch.contiguous(), scale)
        return out
    return scaled_residual_reference(x, branch, scale)


def scaled_residual_reference(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """`scaled_residual` in plain torch, on any device."""
    factor = scale.view(-1, *[1] * (x.dim() - 1)).to(branch.dtype)
    return x + branch * factor


def _fits_kernel(x: Tensor) -> bool:
    return x.dtype != torch.float64 and 0 < x.shape[-1] <= _LARGEST_ROW and x.numel() > 0


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        from bevctl.ops.kernels.layer_norm import forward

        out, mean, deviation = forward(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, mean, deviation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from bevctl.ops.kernels.layer_norm import backward

        return *backward(grad.contiguous(), *ctx.saved_tensors), None, None


class _ScaledResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
        from bevctl.ops.kernels.layer_norm import scaled

        ctx.save_for_backward(scale)
        ctx.branch_dtype = branch.dtype
        return scaled(branch, scale, x.dtype, added=x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from bevctl.ops.kernels.layer_norm import scaled

        (scale,) = ctx.saved_tensors
        return grad, scaled(grad.contiguous(), scale, ctx.branch_dtype), None
