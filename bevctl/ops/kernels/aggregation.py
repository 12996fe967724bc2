"""Triton kernels of `bevctl.ops.aggregation`: one pass over a channels-last map each, with sums beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized

_COLUMNS, _ELEMENTS = 64, 4096
"""Most channels and numbers that a program holds at a time; 64 of them are a memory transaction in half precision."""
_PROGRAMS = 2112
"""Sixteen a processor of an H200, and as many elsewhere, to add in the same order."""


@triton.jit
def _tile(first, per_sample, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of the whole map, channels, and which of them are there."""
    inside = first + tl.arange(0, ROWS)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(2).to(tl.int64) * per_sample + inside
    return row, channel, (inside < per_sample)[:, None] & (channel < C)[None, :]


@triton.jit
def _store_sums(total, sums, C: tl.constexpr, COLUMNS: tl.constexpr):
    """`sums` is (samples, shares, C)."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + share * C + channel, tl.sum(total, axis=0), mask=channel < C)


@sized("per_sample")
def _activate_kernel(
    values, shift, copy, sums, per_sample,
    C: tl.constexpr, STRIDE: tl.constexpr, COPY: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, per_sample, tl.num_programs(1) * ROWS):
        row, channel, valid = _tile(first, per_sample, C, ROWS, COLUMNS)
        place = row[:, None] * C + channel[None, :]
        summand = tl.load(shift + channel, mask=channel < C, other=0.0)
        value = tl.load(values + place, mask=valid, other=0.0).to(tl.float32) + summand[None, :]
        value = tl.where((value < 0) | ~valid, 0.0, value)  # a NaN stays one
        narrow = value.to(values.dtype.element_ty)
        tl.store(values + place, narrow, mask=valid)
        if COPY:
            tl.store(copy + row[:, None] * STRIDE + channel[None, :], narrow, mask=valid)
        if SUM:
            total += value
    if SUM:
        _store_sums(total, sums, C, COLUMNS)


@sized("per_sample")
def _mask_kernel(
    grad, mean_grad, kept, out, sums, per_sample,
    C: tl.constexpr, MEAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, per_sample, tl.num_programs(1) * ROWS):
        row, channel, valid = _tile(first, per_sample, C, ROWS, COLUMNS)
        place = row[:, None] * C + channel[None, :]
        value = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32)
        if MEAN:
            everywhere = tl.load(mean_grad + tl.program_id(2) * C + channel, mask=channel < C, other=0.0)
            value += everywhere[None, :] / per_sample
        result = tl.load(kept + place, mask=valid, other=0.0)
        value = tl.where((result <= 0) | ~valid, 0.0, value)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=valid)
        total += value
    _store_sums(total, sums, C, COLUMNS)


@sized("per_sample")
def _gate_kernel(
    values, gates, other, out, sums, per_sample,
    C: tl.constexpr, ADD: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, per_sample, tl.num_programs(1) * ROWS):
        row, channel, valid = _tile(first, per_sample, C, ROWS, COLUMNS)
        place = row[:, None] * C + channel[None, :]
        gate = tl.load(gates + tl.program_id(2) * C + channel, mask=channel < C, other=0.0)
        value = tl.load(values + place, mask=valid, other=0.0).to(tl.float32)
        result = value * gate[None, :]
        if ADD:
            result += tl.load(other + place, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=valid)
        if SUM:
            total += value * tl.load(other + place, mask=valid, other=0.0).to(tl.float32)
    if SUM:
        _store_sums(total, sums, C, COLUMNS)


def activate(values: Tensor, shift: Tensor, copy: Tensor | None = None) -> None:
    """values = relu(values + shift) in place, and into `copy`.

    Args:
        values: (B, C, H, W), dense and channels-last.
        shift: (C,) float32.
        copy: (B, C, H, W) slice of the channels of a dense channels-last map.
    """
    grid, per_sample, sizes = _plan(values)
    launch(
        _activate_kernel, grid, values, shift, values if copy is None else copy, shift, per_sample,
        STRIDE=_row_stride(values if copy is None else copy), COPY=copy is not None, SUM=False, **sizes,
    )  # fmt: skip


def activate_and_average(values: Tensor, shift: Tensor) -> Tensor:
    """values = relu(values + shift) in place; returns the (B, C) float32 means over H and W."""
    grid, per_sample, sizes = _plan(values)
    sums = _sums(values, grid)
    launch(
        _activate_kernel, grid, values, shift, values, sums, per_sample,
        STRIDE=sizes["C"], COPY=False, SUM=True, **sizes,
    )  # fmt: skip
    return sums.sum(1) / max(per_sample, 1)


def masked(grad: Tensor, kept: Tensor, mean_grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(grad + mean_grad / (H · W)) where `kept` > 0, and its sum over all positions.

    Args:
        grad: (B, C, H, W), dense and channels-last.
        kept: (B, C, H, W) result of the ReLU, dense and channels-last.
        mean_grad: (B, C) float32 gradient of the means.

    Returns:
        A map like `kept`, and (C,) float32.
    """
    grid, per_sample, sizes = _plan(kept)
    out, sums = torch.empty_like(kept), _sums(kept, grid)
    launch(
        _mask_kernel, grid, grad, sums if mean_grad is None else mean_grad, kept, out, sums, per_sample,
        MEAN=mean_grad is not None, **sizes,
    )  # fmt: skip
    return out, sums.sum((0, 1))


def gated(values: Tensor, gates: Tensor, added: Tensor | None) -> Tensor:
    """values · gates (+ added): (B, C, H, W) channels-last maps and (B, C) float32."""
    grid, per_sample, sizes = _plan(values)
    out = torch.empty_like(values)
    launch(
        _gate_kernel, grid, values, gates, values if added is None else added, out, gates, per_sample,
        ADD=added is not None, SUM=False, **sizes,
    )  # fmt: skip
    return out


def gate_gradients(grad: Tensor, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """grad · gates as a map, and the (B, C) float32 sums of grad · values over H and W."""
    grid, per_sample, sizes = _plan(values)
    out, sums = torch.empty_like(values), _sums(values, grid)
    launch(_gate_kernel, grid, grad, gates, values, out, sums, per_sample, ADD=False, SUM=True, **sizes)
    return out, sums.sum(1)


def _plan(values: Tensor) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """Grid over channels, shares of a sample's rows, and samples; rows of a sample; constants."""
    batch, channels, height, width = values.shape
    columns = min(_COLUMNS, power_of_two(channels))
    rows = _ELEMENTS // columns
    slices = blocks(channels, columns)
    shares = max(1, min(blocks(height * width, rows), _PROGRAMS // (slices * batch)))
    return (slices, shares, batch), height * width, {"C": channels, "ROWS": rows, "COLUMNS": columns}


def _sums(values: Tensor, grid: tuple[int, int, int]) -> Tensor:
    return torch.empty(grid[2], grid[1], values.shape[1], dtype=torch.float32, device=values.device)


def _row_stride(values: Tensor) -> int:
    """From a position to the next one, where channels are side by side; axes of one element may have any stride."""
    axis = next((axis for axis in (3, 2) if values.shape[axis] > 1), 0)
    return values.stride(axis)
