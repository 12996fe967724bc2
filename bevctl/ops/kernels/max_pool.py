"""Triton kernels of `bevctl.ops.max_pool`, on channels-last maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, sized

_ELEMENTS = 1024


@triton.jit
def _position(elements, height, width, channels, BLOCK: tl.constexpr):
    """Sample, row, column and channel of each element of a channels-last map, and which of them are there."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel = element // channels
    line = pixel // width
    return element, line // height, line % height, pixel % width, element % channels, element < elements


@sized("elements", "height", "width", "pooled_height", "pooled_width", "channels")
def _forward_kernel(
    x, pooled, source, elements, height, width, pooled_height, pooled_width, channels, BLOCK: tl.constexpr
):
    element, sample, row, column, channel, valid = _position(elements, pooled_height, pooled_width, channels, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for tap in tl.static_range(9):
        y, z = 2 * row + tap // 3, 2 * column + tap % 3
        there = valid & (y < height) & (z < width)
        value = tl.load(x + ((sample * height + y) * width + z) * channels + channel, mask=there, other=-float("inf"))
        value = value.to(tl.float32)
        larger = there & ((value > largest) | (value != value))
        largest = tl.where(larger, value, largest)
        place = tl.where(larger, tap, place)
    tl.store(pooled + element, largest.to(pooled.dtype.element_ty), mask=valid)
    tl.store(source + element, place.to(tl.uint8), mask=valid)


@sized("elements", "height", "width", "pooled_height", "pooled_width", "channels")
def _backward_kernel(
    grad, source, out, elements, height, width, pooled_height, pooled_width, channels, BLOCK: tl.constexpr
):
    """Each pixel looks at the up to four windows that it is in."""
    element, sample, row, column, channel, valid = _position(elements, height, width, channels, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for window in tl.static_range(4):
        y, z = row // 2 - window // 2, column // 2 - window % 2
        down, right = row - 2 * y, column - 2 * z
        there = valid & (y >= 0) & (z >= 0) & (y < pooled_height) & (z < pooled_width) & (down < 3) & (right < 3)
        place = ((sample * pooled_height + y) * pooled_width + z) * channels + channel
        chosen = tl.load(source + place, mask=there, other=255).to(tl.int64) == 3 * down + right
        total += tl.load(grad + place, mask=there & chosen, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=valid)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled map, and the place in the window that each value is from, 0 to 8 by rows, uint8."""
    batch, channels, height, width = x.shape
    pooled_height, pooled_width = height // 2, width // 2
    shape = (batch, channels, pooled_height, pooled_width)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    source = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    sizes = (pooled.numel(), height, width, pooled_height, pooled_width, channels)
    launch(_forward_kernel, (blocks(pooled.numel(), _ELEMENTS),), x, pooled, source, *sizes, BLOCK=_ELEMENTS)
    return pooled, source


def backward(grad: Tensor, source: Tensor, size: Sequence[int]) -> Tensor:
    """Gradient of a map of `size` (B, C, H, W)."""
    batch, channels, height, width = size
    out = torch.empty(
        (batch, channels, height, width), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    sizes = (out.numel(), height, width, grad.shape[2], grad.shape[3], channels)
    launch(_backward_kernel, (blocks(out.numel(), _ELEMENTS),), grad, source, out, *sizes, BLOCK=_ELEMENTS)
    return out
