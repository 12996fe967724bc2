"""Triton kernels of `bevctl.ops.norm_fold`: weights are (C, C_in, taps) in memory, folded ones (C, taps, C_in)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized

if TYPE_CHECKING:
    from bevctl.ops.norm_fold import FixedNorm

_MOST_CHANNELS = 256
"""Input channels that a program holds at a time."""


@sized("channels_in")
def _forward_kernel(
    weight, factor, summand, mean, variance, folded, shift, channels_in, eps,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    scale = tl.load(factor + channel) / tl.sqrt(tl.load(variance + channel) + eps)
    source = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = channel * channels_in * TAPS
    for tap in tl.static_range(TAPS):
        value = tl.load(weight + row + source * TAPS + tap, mask=source < channels_in) * scale
        tl.store(
            folded + row + tap * channels_in + source, value.to(folded.dtype.element_ty), mask=source < channels_in
        )
    if tl.program_id(1) == 0:
        tl.store(shift + channel, tl.load(summand + channel) - tl.load(mean + channel) * scale)


@sized("channels_in")
def _backward_kernel(
    folded_grad, shift_grad, weight, factor, mean, variance, weight_grad, factor_grad, channels_in, eps,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    deviation = tl.sqrt(tl.load(variance + channel) + eps)
    scale = tl.load(factor + channel) / deviation
    row = channel * channels_in * TAPS
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, channels_in, BLOCK):
        source = first + tl.arange(0, BLOCK)
        for tap in tl.static_range(TAPS):
            place = row + source * TAPS + tap
            grad = tl.load(folded_grad + row + tap * channels_in + source, mask=source < channels_in, other=0.0)
            grad = grad.to(tl.float32)
            total += grad * tl.load(weight + place, mask=source < channels_in, other=0.0)
            tl.store(weight_grad + place, grad * scale, mask=source < channels_in)
    of_scale = tl.sum(total, axis=0) - tl.load(shift_grad + channel) * tl.load(mean + channel)
    tl.store(factor_grad + channel, of_scale / deviation)


def forward(weight: Tensor, norm: FixedNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The folded weight of `dtype`, channels-last, and the shift; `weight` is float32 and contiguous."""
    channels, channels_in, height, width = weight.shape
    folded = torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=torch.channels_last)
    shift = torch.empty_like(norm.summand)
    block = min(_MOST_CHANNELS, power_of_two(channels_in))
    tensors = (weight, norm.factor, norm.summand, norm.mean, norm.variance, folded, shift)
    grid = (channels, blocks(channels_in, block))
    launch(_forward_kernel, grid, *tensors, channels_in, norm.eps, TAPS=height * width, BLOCK=block)
    return folded, shift


def backward(folded_grad: Tensor, shift_grad: Tensor, weight: Tensor, norm: FixedNorm) -> tuple[Tensor, Tensor]:
    """Gradients of weight and factor, in a fixed order of sums; `folded_grad` is channels-last."""
    channels, channels_in, height, width = weight.shape
    weight_grad, factor_grad = torch.empty_like(weight), torch.empty_like(norm.factor)
    block = min(_MOST_CHANNELS, power_of_two(channels_in))
    tensors = (folded_grad, shift_grad, weight, norm.factor, norm.mean, norm.variance, weight_grad, factor_grad)
    launch(_backward_kernel, (channels,), *tensors, channels_in, norm.eps, TAPS=height * width, BLOCK=block)
    return weight_grad, factor_grad
