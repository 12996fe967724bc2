"""Hard voxelisation: points into voxels of limited number and filling, each voxel the mean of its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bevctl.ops.backend import use_triton
from bevctl.ops.rulebook import Triple, unravel

_OUTSIDE = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Voxels:
    """M voxels of B samples, ascending in (b, x, y, z)."""

    features: Tensor
    """(M, F) float32 mean of the stored points."""
    coords: Tensor
    """(M, 4) int64 (b, x, y, z): sample and cell."""
    counts: Tensor
    """(M,) int64 stored points, 1..max_points."""


@dataclass(frozen=True)
class _Runs:
    """Points sorted by voxel: a run is the points of one voxel, in their order of arrival."""

    order: Tensor
    """(P,) point at each place of the sorted list."""
    starts: Tensor
    """(R,) place where each kept run starts."""
    lengths: Tensor
    """(R,) points in each kept run."""


def grid_shape(voxel_size: Sequence[float], point_cloud_range: Sequence[float]) -> Triple:
    """Number of voxels along x, y, z inside the range (x, y, z lower bounds, then upper bounds; m)."""
    low, high = point_cloud_range[:3], point_cloud_range[3:]
    x, y, z = (round((b - a) / size) for a, b, size in zip(low, high, voxel_size, strict=True))
    return x, y, z


def voxelize(
    points: list[Tensor],
    voxel_size: Sequence[float],
    point_cloud_range: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> Voxels:
    """Group the points of each sample into voxels, in float32 whatever the input and autocast.

    Order matters twice: a sample keeps the first `max_voxels` voxels that its points open, a voxel the first
    `max_points` points that fall into it. Points outside the range, or not finite, are dropped.

    Args:
        points: B × (P_i, F) float; columns x, y, z (m) come first.
        voxel_size: (3,) edge lengths, m.
        point_cloud_range: (6,) lower bounds of x, y, z, then upper bounds, m.
        max_points: points stored in a voxel.
        max_voxels: voxels kept in a sample.

    Raises:
        ValueError: no samples, or one that is not (P, ≥ 3).
    """
    voxels = padded_voxels(points, voxel_size, point_cloud_range, max_points, max_voxels)
    size = int((voxels.counts > 0).sum())
    return Voxels(voxels.features[:size], voxels.coords[:size], voxels.counts[:size])


def padded_voxels(
    points: list[Tensor],
    voxel_size: Sequence[float],
    point_cloud_range: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> Voxels:
    """`voxelize` with rows of padding (b = -1, count 0) at the end, so that the host need not wait for their number."""
    if not points or any(cloud.dim() != 2 or cloud.shape[1] < 3 for cloud in points):
        raise ValueError(f"points must be (P, F ≥ 3) for each sample, got {[tuple(p.shape) for p in points]}")
    shape = grid_shape(voxel_size, point_cloud_range)
    flat = torch.cat([cloud.float() for cloud in points])
    sizes = [len(cloud) for cloud in points]
    if len(flat) and use_triton(flat):
        from bevctl.ops.kernels import voxelize as kernels

        return Voxels(*kernels.voxelize(flat, sizes, point_cloud_range[:3], voxel_size, shape, max_points, max_voxels))
    keys = torch.cat([_cell_keys(cloud, i, voxel_size, point_cloud_range, shape) for i, cloud in enumerate(points)])
    runs = _kept_runs(keys, sizes, max_voxels)
    counts = runs.lengths.clamp(max=max_points)
    return Voxels(_mean(flat, runs, counts, max_points), unravel(keys[runs.order[runs.starts]], shape), counts)


def _cell_keys(
    cloud: Tensor,
    sample: int,
    voxel_size: Sequence[float],
    point_cloud_range: Sequence[float],
    shape: Triple,
) -> Tensor:
    """(P,) int64 linear index (b, x, y, z) of each point's voxel, _OUTSIDE for points out of range."""
    inside = torch.ones(len(cloud), dtype=torch.bool, device=cloud.device)
    axes = []
    for axis in range(3):
        # A number would be divided by through its reciprocal on a GPU; a tensor from a list would wait for it.
        edge = torch.full((1,), voxel_size[axis], dtype=torch.float32, device=cloud.device)
        cell = torch.floor((cloud[:, axis].float() - point_cloud_range[axis]) / edge)
        # Compared as floats: NaN and huge values have no defined integer.
        inside &= (cell >= 0) & (cell < shape[axis])
        axes.append(cell)
    x, y, z = (torch.where(inside, cell, 0).long() for cell in axes)
    keys = ((sample * shape[0] + x) * shape[1] + y) * shape[2] + z
    return torch.where(inside, keys, _OUTSIDE)


def _kept_runs(keys: Tensor, sizes: list[int], max_voxels: int) -> _Runs:
    """Runs of equal keys, less those opened after a sample has `max_voxels` of them."""
    sorted_keys, order = torch.sort(keys, stable=True)
    is_start = torch.ones_like(keys, dtype=torch.bool)
    is_start[1:] = sorted_keys[1:] != sorted_keys[:-1]
    is_start &= sorted_keys != _OUTSIDE
    opens = torch.zeros_like(keys).index_copy(0, order, is_start.long())
    # Voxels opened in the same sample up to and including each point, in order of arrival.
    opened = torch.cat([part.cumsum(dim=0) for part in opens.split(sizes)])
    starts = (is_start & (opened[order] <= max_voxels)).nonzero().squeeze(1)
    lengths = torch.searchsorted(sorted_keys, sorted_keys[starts], right=True) - starts
    return _Runs(order, starts, lengths)


def _mean(points: Tensor, runs: _Runs, counts: Tensor, max_points: int) -> Tensor:
    """(R, F) mean of the first `counts` points of each run, added in order of arrival on every device."""
    total = points.new_zeros(len(counts), points.shape[1])
    for rank in range(max_points if len(counts) else 0):
        place = (runs.starts + rank).clamp(max=len(points) - 1)
        total += torch.where((rank < counts)[:, None], points[runs.order[place]], 0)
    return total / counts[:, None]
