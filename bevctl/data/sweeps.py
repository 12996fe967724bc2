"""The point cloud of a sample: the keyframe and earlier sweeps, moved into the keyframe's LiDAR frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bevctl.data.files import read_points
from bevctl.data.index import resolve
from bevctl.data.info import SampleInfo, SweepInfo
from bevctl.geometry import Array, transform_points

LIDAR = "LIDAR_TOP"
EGO_HALF_SIDE = 1.0
"""Sweep points with |x| and |y| below this (m) are echoes from the car itself."""

Points = NDArray[np.float32]


def load_points(
    root: Path, info: SampleInfo, count: int, rng: np.random.Generator | None, pose: str = "exact"
) -> Points:
    """(P, 5) x, y, z, intensity, dt of the keyframe, then of `count` earlier sweeps (all, where fewer are stored).

    `rng` chooses among the stored sweeps; None takes the nearest. `pose` is "exact", or "mmdet3d" for sweeps moved as
    mmdet3d 1.1 and newer does, R p + Rᵀ t instead of R p + t. dt = time of the keyframe - time of the sweep, s.
    Points near the sensor are removed from sweeps only. A sample without any stored sweep gets its keyframe `count`
    times more, so that point density does not tell the two apart. Raises BevctlError for an unreadable file.
    """
    keyframe = read_points(resolve(root, info.lidar_path, LIDAR))
    sweeps = _choose(info.sweeps, count, rng)
    earlier = [_without_ego(read_points(resolve(root, sweep.path, LIDAR))) for sweep in sweeps]
    if not info.sweeps:
        earlier = [_without_ego(keyframe)] * count
    points = np.concatenate([keyframe, *earlier])
    points[:, 4] = 0.0
    end = len(keyframe)
    for sweep, cloud in zip(sweeps, earlier, strict=False):  # copies of the keyframe stay where they are
        start, end = end, end + len(cloud)
        points[start:end, 4] = info.timestamp - sweep.timestamp
        sweep2key = _as_mmdet3d_has_it(sweep.sweep2key) if pose == "mmdet3d" else sweep.sweep2key
        points[start:end, :3] = transform_points(sweep2key, cloud[:, :3])
    return points


def _choose(sweeps: Sequence[SweepInfo], count: int, rng: np.random.Generator | None) -> list[SweepInfo]:
    if rng is None or len(sweeps) <= count:
        return list(sweeps[:count])
    return [sweeps[i] for i in rng.choice(len(sweeps), size=count, replace=False)]


def _as_mmdet3d_has_it(sweep2key: Array) -> Array:
    """The translation along the sweep's axes instead of the keyframe's: the same where the car went straight on."""
    moved = sweep2key.copy()
    moved[:3, 3] = sweep2key[:3, :3].T @ sweep2key[:3, 3]
    return moved


def _without_ego(points: Points) -> Points:
    x, y = np.abs(points[:, 0]), np.abs(points[:, 1])
    return points.take(np.flatnonzero((x >= EGO_HALF_SIDE) | (y >= EGO_HALF_SIDE)), axis=0)
