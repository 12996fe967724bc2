"""Triton kernels of `bevctl.ops.voxelize`: cells, limits and means around one stable sort, no read by the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized
from bevctl.ops.rulebook import Triple
from bevctl.ops.transfer import to_device

_BLOCK = 256


@sized("first", "count", "sample", "columns", "size_x", "size_y", "size_z")
def _cell_kernel(
    points, keys, first, count, sample, columns, low_x, low_y, low_z, edge_x, edge_y, edge_z, size_x, size_y, size_z,
    OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = point < count
    row = points + (first + point) * columns
    # Divisions round as torch's do: a point on a boundary must not change its cell.
    x = tl.floor(tl.div_rn(tl.load(row, mask=exists, other=0.0) - low_x, edge_x))
    y = tl.floor(tl.div_rn(tl.load(row + 1, mask=exists, other=0.0) - low_y, edge_y))
    z = tl.floor(tl.div_rn(tl.load(row + 2, mask=exists, other=0.0) - low_z, edge_z))
    # Compared as floats: NaN and huge values have no defined integer.
    inside = (x >= 0) & (x < size_x) & (y >= 0) & (y < size_y) & (z >= 0) & (z < size_z)
    kind = keys.dtype.element_ty
    key = (tl.cast(sample, kind) * size_x + tl.where(inside, x, 0.0).to(kind)) * size_y
    key = (key + tl.where(inside, y, 0.0).to(kind)) * size_z + tl.where(inside, z, 0.0).to(kind)
    tl.store(keys + first + point, tl.where(inside, key, OUTSIDE), mask=exists)


@triton.jit
def _starts(keys, place, points, OUTSIDE: tl.constexpr):
    """Keys at places of the sorted list, and whether each is the first of its voxel."""
    key = tl.load(keys + place, mask=place < points, other=OUTSIDE)
    before = tl.load(keys + place - 1, mask=(place > 0) & (place < points), other=-1)
    return key, (key != before) & (key != OUTSIDE)


@sized("points")
def _open_kernel(keys, order, opens, points, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, start = _starts(keys, place, points, OUTSIDE)
    point = tl.load(order + place, mask=place < points, other=0)
    tl.store(opens + point, start.to(tl.int32), mask=place < points)


@sized("points", "cells", "max_voxels")
def _keep_kernel(
    keys, order, opened, bounds, kept, points, cells, max_voxels, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, start = _starts(keys, place, points, OUTSIDE)
    point = tl.load(order + place, mask=start, other=0)
    first = tl.load(bounds + (key // cells).to(tl.int32), mask=start, other=0)
    # Voxels opened up to and including this one, in order of arrival, less those of the samples before.
    number = tl.load(opened + point, mask=start, other=0)
    number -= tl.load(opened + first - 1, mask=start & (first > 0), other=0)
    tl.store(kept + place, (start & (number <= max_voxels)).to(tl.int32), mask=place < points)


@sized("total", "size_x", "size_y", "size_z", "max_points")
def _mean_kernel(
    points, keys, order, ends, features, coords, counts, total, size_x, size_y, size_z, max_points,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + place, mask=place < total, other=0)
    before = tl.load(ends + place - 1, mask=(place > 0) & (place < total), other=0)
    kept = end > before
    voxel = (end - 1).to(tl.int64)
    key = tl.load(keys + place, mask=place < total, other=OUTSIDE)
    column = tl.arange(0, WIDTH)[None, :]
    value = tl.zeros((BLOCK, WIDTH), tl.float32)
    stored = tl.zeros((BLOCK,), tl.int32)
    for rank in range(max_points):
        here = kept & (place + rank < total)
        here = here & (tl.load(keys + place + rank, mask=here, other=OUTSIDE) == key)
        point = tl.load(order + place + rank, mask=here, other=0)
        value += tl.load(points + point[:, None] * COLUMNS + column, mask=here[:, None] & (column < COLUMNS), other=0.0)
        stored += here.to(tl.int32)
    mean = tl.div_rn(value, tl.broadcast_to(tl.maximum(stored, 1).to(tl.float32)[:, None], (BLOCK, WIDTH)))
    tl.store(features + voxel[:, None] * COLUMNS + column, mean, mask=kept[:, None] & (column < COLUMNS))
    tl.store(counts + voxel, stored.to(tl.int64), mask=kept)
    key = key.to(tl.int64)
    tl.store(coords + voxel * 4, key // size_z // size_y // size_x, mask=kept)
    tl.store(coords + voxel * 4 + 1, key // size_z // size_y % size_x, mask=kept)
    tl.store(coords + voxel * 4 + 2, key // size_z % size_y, mask=kept)
    tl.store(coords + voxel * 4 + 3, key % size_z, mask=kept)


def voxelize(
    points: Tensor, sizes: list[int], low: Sequence[float], edges: Sequence[float], shape: Triple,
    max_points: int, max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Features, coordinates and counts as in `Voxels`, with rows of padding (b = -1) after the last voxel.

    `points` (P, F) float32 holds the samples one after another, `sizes` their points; P is at least 1.
    """
    total, columns = points.shape
    cells = shape[0] * shape[1] * shape[2]
    kind = torch.int32 if len(sizes) * cells < 2**31 - 1 else torch.int64
    outside = torch.iinfo(kind).max
    bounds = [sum(sizes[:sample]) for sample in range(len(sizes))]
    firsts = to_device(torch.tensor(bounds, dtype=torch.int32), points.device)
    keys = torch.empty(total, dtype=kind, device=points.device)
    for sample, (first, count) in enumerate(zip(bounds, sizes, strict=True)):
        if count:
            launch(
                _cell_kernel,
                _grid(count),
                points,
                keys,
                first,
                count,
                sample,
                columns,
                *map(float, low),
                *map(float, edges),
                *shape,
                OUTSIDE=outside,
                BLOCK=_BLOCK,
            )
    keys, order = torch.sort(keys, stable=True)
    flags = torch.empty(total, dtype=torch.int32, device=points.device)
    launch(_open_kernel, _grid(total), keys, order, flags, total, OUTSIDE=outside, BLOCK=_BLOCK)
    opened = flags.cumsum(0, dtype=torch.int32)
    launch(
        _keep_kernel,
        _grid(total),
        keys,
        order,
        opened,
        firsts,
        flags,
        total,
        cells,
        max_voxels,
        OUTSIDE=outside,
        BLOCK=_BLOCK,
    )
    ends = flags.cumsum(0, dtype=torch.int32)
    limit = min(total, len(sizes) * max_voxels)
    features = points.new_zeros(limit, columns)
    coords = torch.full((limit, 4), -1, dtype=torch.int64, device=points.device)
    counts = torch.zeros(limit, dtype=torch.int64, device=points.device)
    launch(
        _mean_kernel, _grid(total), points, keys, order, ends, features, coords, counts, total, *shape, max_points,
        COLUMNS=columns, WIDTH=power_of_two(columns), OUTSIDE=outside, BLOCK=_BLOCK,
    )  # fmt: skip
    return features, coords, counts


def _grid(elements: int) -> tuple[int]:
    return (blocks(elements, _BLOCK),)
