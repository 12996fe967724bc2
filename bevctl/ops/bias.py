"""A bias whose gradient costs one pass over the output's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bevctl.ops.backend import use_triton


class BiasedConv2d(nn.Conv2d):
    """Convolution with a bias. On a GPU the gradient of the bias does not go through torch's column sums, which reach
    a fifth of the bandwidth in half precision."""

    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) → (B, C, H', W')."""
        if torch.compiler.is_compiling() or x.dtype == torch.float64 or x.numel() == 0 or not use_triton(x):
            return super().forward(x)
        out: Tensor = _AddBias.apply(self._conv_forward(x, self.weight, None), self.bias)
        return out


class _AddBias(torch.autograd.Function):
    """Adds a (C,) bias to a (B, C, H, W) map in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.dtype = bias.dtype
        return x.add_(bias.to(x.dtype).view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        from bevctl.ops.kernels.linear import column_sums

        if not ctx.needs_input_grad[1]:
            return gradient, None
        return gradient, column_sums(gradient.permute(0, 2, 3, 1).flatten(0, 2)).to(ctx.dtype)
