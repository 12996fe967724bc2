"""Triton kernel of `bevctl.ops.linear`: sums over the rows of a matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch_specialised

_ROWS, _COLUMNS = 64, 128
_PROGRAMS = 512


@triton.jit(do_not_specialize=["rows"])
def _column_sums_kernel(values, shares, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`shares` (programs, columns) holds the sum of each program's rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(values + place, mask=(row < rows)[:, None] & valid[None, :], other=0.0).to(tl.float32)
    tl.store(shares + tl.program_id(1) * columns + column, tl.sum(total, axis=0), mask=valid)


def column_sums(values: Tensor) -> Tensor:
    """(R, C) → (C,) float32; the order of every sum is fixed."""
    rows, columns = values.shape
    blocks = triton.cdiv(columns, _COLUMNS)
    programs = max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS // blocks))
    shares = values.new_empty(programs, columns, dtype=torch.float32)
    grid = (blocks, programs)
    launch_specialised(
        _column_sums_kernel, grid, values.contiguous(), shares, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return shares.sum(0)
