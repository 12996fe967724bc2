"""Strided convolution of a one-channel image that an affine map and a ReLU first spread over channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton


def affine_relu_conv(image: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """conv(relu(image · scale + shift)) with zero padding of half the kernel around the ReLU's result.

    In Triton the C channels are never held: each kernel makes the values that it needs from the image, in the forward
    and again in the backward pass. Sums have a fixed order. Runs in the autocast dtype.

    Args:
        image: (N, H, W) float32, no gradient.
        scale: (C,) factor of each channel.
        shift: (C,) offset of each channel.
        weight: (O, C, k, k), k odd.
        bias: (O,).
        stride: pixels of the image to one of the result, both ways.

    Returns:
        (N, O, H', W'), channels-last in memory where the device convolves that way.

    Raises:
        ValueError: shapes that do not belong together, or an image that needs a gradient.
    """
    channels, size = weight.shape[1], weight.shape[2]
    if image.dim() != 3 or weight.shape[2:] != (size, size) or size % 2 == 0 or scale.shape != (channels,):
        raise ValueError(
            f"image must be (N, H, W), weight (O, C, k, k) with odd k and scale (C,), got {tuple(image.shape)}, "
            f"{tuple(weight.shape)} and {tuple(scale.shape)}"
        )
    if image.requires_grad:
        raise ValueError("image needs a gradient, which affine_relu_conv does not give")
    device = image.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else weight.dtype
    if use_triton(image) and dtype != torch.float64:
        out: Tensor = _AffineReluConv.apply(image, scale, shift, weight.to(dtype), bias, stride)
        return out
    spread = (image[..., None] * scale + shift).relu().to(dtype).permute(0, 3, 1, 2)
    return F.conv2d(spread, weight, bias, stride, size // 2)


class _AffineReluConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, stride: int
    ) -> Tensor:
        from bevctl.ops.kernels import affine_conv as kernels

        ctx.save_for_backward(image, scale, shift, weight)
        ctx.stride = stride
        return kernels.convolve(image, scale, shift, weight, bias, stride).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from bevctl.ops.kernels import affine_conv as kernels

        image, scale, shift, weight = ctx.saved_tensors
        gradient = gradient.permute(0, 2, 3, 1).contiguous()
        return None, *kernels.gradients(image, scale, shift, weight, gradient, ctx.stride), None
