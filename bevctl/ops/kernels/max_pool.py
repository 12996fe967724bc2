"""Triton kernels of `bevctl.ops.max_pool`: one pass over a channels-last map each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized

_COLUMNS, _ELEMENTS = 64, 2048
"""Most channels and numbers that a program holds at a time."""


@triton.jit
def _pixel(height, width, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sample, row and column of each pixel, channels, and which of them are there."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column, above = place % width, place // width
    return (above // height).to(tl.int64), above % height, column, channel, place < rows


@sized("height", "width", "out_height", "out_width", "rows")
def _forward_kernel(
    x, out, chosen, height, width, out_height, out_width, rows,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, row, column, channel, there = _pixel(out_height, out_width, rows, ROWS, COLUMNS)
    inside = there[:, None] & (channel < C)[None, :]
    best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    choice = tl.zeros((ROWS, COLUMNS), tl.int32)
    for offset in tl.static_range(9):
        y, z = 2 * row + offset // 3, 2 * column + offset % 3
        valid = inside & ((y < height) & (z < width))[:, None]
        source = ((sample * height + y) * width + z)[:, None] * C + channel[None, :]
        value = tl.load(x + source, mask=valid, other=float("-inf")).to(tl.float32)
        better = valid & ((value > best) | (value != value))
        best = tl.where(better, value, best)
        choice = tl.where(better, offset, choice)
    target = ((sample * out_height + row) * out_width + column)[:, None] * C + channel[None, :]
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)
    tl.store(chosen + target, choice.to(tl.uint8), mask=inside)


@sized("height", "width", "out_height", "out_width", "rows")
def _backward_kernel(
    grad, chosen, x_grad, height, width, out_height, out_width, rows,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, row, column, channel, there = _pixel(height, width, rows, ROWS, COLUMNS)
    inside = there[:, None] & (channel < C)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(4):
        # An even row is the first of one window and the last of the one before; an odd one is the middle of one.
        window_row, window_column = row // 2 - step // 2, column // 2 - step % 2
        y, z = row - 2 * window_row, column - 2 * window_column
        is_window = (y < 3) & (z < 3) & (window_row >= 0) & (window_column >= 0)
        is_window = is_window & (window_row < out_height) & (window_column < out_width)
        valid = inside & is_window[:, None]
        source = ((sample * out_height + window_row) * out_width + window_column)[:, None] * C + channel[None, :]
        choice = tl.load(chosen + source, mask=valid, other=255).to(tl.int32)
        value = tl.load(grad + source, mask=valid, other=0.0).to(tl.float32)
        total += tl.where(choice == (3 * y + z)[:, None], value, 0.0)
    target = ((sample * height + row) * width + column)[:, None] * C + channel[None, :]
    tl.store(x_grad + target, total.to(x_grad.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C, H, W) channels-last → the largest values and which of the nine each was, uint8, both channels-last."""
    batch, channels, height, width = x.shape
    size = (height // 2, width // 2)
    out = _empty(x, size, x.dtype)
    chosen = _empty(x, size, torch.uint8)
    rows = batch * size[0] * size[1]
    grid, sizes = _plan(rows, channels)
    launch(_forward_kernel, grid, x, out, chosen, height, width, *size, rows, **sizes)
    return out, chosen


def backward(grad: Tensor, chosen: Tensor, size: Sequence[int]) -> Tensor:
    """Gradient of a map of `size` (B, C, H, W), channels-last."""
    batch, channels, height, width = size
    out_height, out_width = grad.shape[2:]
    x_grad = _empty(grad, (height, width), grad.dtype)
    rows = batch * height * width
    grid, sizes = _plan(rows, channels)
    launch(_backward_kernel, grid, grad, chosen, x_grad, height, width, out_height, out_width, rows, **sizes)
    return x_grad


def _empty(like: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    shape = (*like.shape[:2], *size)
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _plan(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = min(_COLUMNS, power_of_two(channels))
    tall = _ELEMENTS // columns
    return (blocks(rows, tall), blocks(channels, columns)), {"C": channels, "ROWS": tall, "COLUMNS": columns}
