"""Triton kernel of `bevctl.ops.matching`: one program a sample finds the assignment of least total cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch, sized

_BROKEN = tl.constexpr(1e9)


@triton.jit
def _row_of_cost(start, stride, column, valid):
    """Costs of one row as float64; what is not finite counts as very expensive, or very cheap for -inf."""
    value = tl.load(start + column * stride, mask=valid, other=0.0)
    value = tl.where(value != value, _BROKEN, value)
    value = tl.where(value == float("inf"), _BROKEN, value)
    value = tl.where(value == float("-inf"), -_BROKEN, value)
    return value.to(tl.float64)


@sized("predictions", "stride_b", "stride_p", "stride_m")
def _match_kernel(cost, counts, matched, predictions, stride_b, stride_p, stride_m, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    objects = tl.load(counts + sample).to(tl.int32)
    swapped = objects > predictions  # rows are the fewer of the two, and each of them gets a column
    rows = tl.where(swapped, predictions, objects)
    columns = tl.where(swapped, objects, predictions)
    row_stride = tl.where(swapped, stride_p, stride_m).to(tl.int64)
    column_stride = tl.where(swapped, stride_m, stride_p).to(tl.int64)

    column = tl.arange(0, BLOCK)
    valid = column < columns
    price = tl.zeros([BLOCK], tl.float64)
    row_of = tl.full([BLOCK], -1, tl.int32)
    for current in range(rows):
        # Shortest path, in costs reduced by prices, from the new row to a free column.
        distance = tl.full([BLOCK], float("inf"), tl.float64)
        came_from = tl.full([BLOCK], -1, tl.int32)
        scanned = column >= columns
        row = current
        via = tl.full([], -1, tl.int32)
        reached = tl.full([], 0.0, tl.float64)
        free = tl.full([], -1, tl.int32)
        while free < 0:
            reduced = _row_of_cost(cost + sample * stride_b + row * row_stride, column_stride, column, valid) - price
            own = tl.sum(tl.where(column == via, reduced, 0.0), axis=0)
            candidate = reduced + (reached - own)
            closer = (candidate < distance) & (scanned == 0)
            distance = tl.where(closer, candidate, distance)
            came_from = tl.where(closer, row, came_from)
            reached, via = tl.min(tl.where(scanned, float("inf"), distance), axis=0, return_indices=True)
            scanned = scanned | (column == via)
            row = tl.sum(tl.where(column == via, row_of, 0), axis=0)
            free = tl.where(row < 0, via, -1)
        price = tl.where(scanned & valid, price - (reached - distance), price)
        # Every row on the path moves to the column that it was left by.
        while free >= 0:
            row = tl.sum(tl.where(column == free, came_from, 0), axis=0)
            left = tl.max(tl.where(row_of == row, column, -1), axis=0)
            row_of = tl.where(column == free, row, tl.where(row_of == row, -1, row_of))
            free = left

    matched += sample * predictions
    prediction = tl.where(swapped, row_of, column)
    partner = tl.where(swapped, column, row_of)
    tl.store(matched + prediction, partner.to(tl.int64), mask=valid & (prediction >= 0))


def match(cost: Tensor, counts: Tensor) -> Tensor:
    """See `bevctl.ops.matching.match`; `counts` is (B,) int on the device of `cost`.

    Shortest augmenting paths (Jonker & Volgenant, Computing 1987) in float64. A program is a single warp for up to 256
    predictions or objects: it works on one row after the other, and a step in it is a few reductions over the columns.
    """
    batch, predictions, objects = cost.shape
    matched = torch.full((batch, predictions), -1, dtype=torch.int64, device=cost.device)
    if batch and predictions and objects:
        block = triton.next_power_of_2(max(predictions, objects, 32))
        warps = min(8, max(1, block // 256))
        strides = cost.stride()
        launch(_match_kernel, (batch,), cost, counts, matched, predictions, *strides, BLOCK=block, num_warps=warps)
    return matched
