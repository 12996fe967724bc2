"""A linear layer whose bias gradient costs one pass over the output's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton


def linear(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias, multiplied in `dtype`.

    The gradient of the bias sums over all positions of a map; torch's column sums of half precision reach a fifth of
    a GPU's bandwidth.

    Args:
        x: (..., C_in).
        weight: (C, C_in), rounded to `dtype`.
        bias: (C,), rounded to `dtype`.
        dtype: number format of the product and the result.

    Returns:
        (..., C) of `dtype`.
    """
    if not torch.compiler.is_compiling() and use_triton(x) and x.numel() > 0 and dtype != torch.float64:
        out: Tensor = _Linear.apply(x.to(dtype), weight, bias, dtype)
        return out
    return linear_reference(x, weight, bias, dtype)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`linear` in plain torch, on any device."""
    return F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        narrow = weight.to(dtype)
        ctx.save_for_backward(x, narrow)
        ctx.bias_dtype, ctx.weight_dtype = bias.dtype, weight.dtype
        return F.linear(x, narrow, bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        from bevctl.ops.kernels.linear import column_sums

        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        x_grad = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        weight_grad = (rows.T @ x.reshape(-1, x.shape[-1])).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        bias_grad = column_sums(rows).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None
