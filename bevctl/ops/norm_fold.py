"""A norm with fixed statistics as part of the convolution before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevctl.ops.backend import use_triton


class FixedNorm(NamedTuple):
    """BatchNorm in evaluation mode: (x − mean) / √(variance + eps) · factor + summand for each of C channels."""

    eps: float
    factor: Tensor
    """(C,)."""
    summand: Tensor
    """(C,)."""
    mean: Tensor
    """(C,), without gradient."""
    variance: Tensor
    """(C,), without gradient."""


def fold_norm(weight: Tensor, norm: FixedNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and shift of the convolution that equals one with `weight` and then `norm`.

    The factor of each channel is multiplied into the weight before that is rounded. In Triton one kernel does it, and
    one its gradients, which takes two dozen otherwise.

    Args:
        weight: (C, C_in, k, k) of the convolution without bias.
        norm: the norm of its C channels.
        dtype: number format of the new weight.

    Returns:
        (C, C_in, k, k) of `dtype`, channels-last in memory on a GPU, and (C,) of the norm's dtype.
    """
    if torch.compiler.is_compiling() or weight.dtype == torch.float64 or not use_triton(weight):
        return fold_norm_reference(weight, norm, dtype)
    folded, shift = _FoldNorm.apply(weight.contiguous(), *norm, dtype)
    return folded, shift


def fold_norm_reference(weight: Tensor, norm: FixedNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`fold_norm` in plain torch, on any device."""
    factor = norm.factor * torch.rsqrt(norm.variance + norm.eps)
    return (weight * factor[:, None, None, None]).to(dtype), norm.summand - norm.mean * factor


class _FoldNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        eps: float,
        factor: Tensor,
        summand: Tensor,
        mean: Tensor,
        variance: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        from bevctl.ops.kernels.norm_fold import forward

        norm = FixedNorm(eps, factor, summand, mean, variance)
        ctx.save_for_backward(weight, *norm[1:])
        ctx.eps = eps
        return forward(weight, norm, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, folded_grad: Tensor, shift_grad: Tensor) -> tuple[Tensor | None, ...]:
        from bevctl.ops.kernels.norm_fold import backward

        weight, *values = ctx.saved_tensors
        dense = folded_grad.contiguous(memory_format=torch.channels_last)
        weight_grad, factor_grad = backward(dense, shift_grad.contiguous(), weight, FixedNorm(ctx.eps, *values))
        return weight_grad, None, factor_grad, shift_grad, None, None, None
