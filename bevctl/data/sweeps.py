"""The point cloud of a sample: the keyframe and earlier sweeps, moved into the keyframe's LiDAR frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bevctl.data.files import read_points
from bevctl.data.index import resolve
from bevctl.data.info import SampleInfo, SweepInfo
from bevctl.geometry import transform_points

LIDAR = "LIDAR_TOP"
EGO_HALF_SIDE = 1.0
"""Sweep points with |x| and |y| below this (m) are echoes from the car itself."""

Points = NDArray[np.float32]


def load_points(root: Path, info: SampleInfo, count: int, rng: np.random.Generator | None) -> Points:
    """(P, 5) x, y, z, intensity, dt of the keyframe, then of `count` earlier sweeps (all, where fewer are stored).

    `rng` chooses among the stored sweeps; None takes the nearest. dt = time of the keyframe - time of the sweep, s.
    Points near the sensor are removed from sweeps only. A sample without any stored sweep gets its keyframe `count`
    times more, so that point density does not tell the two apart. Raises BevctlError for an unreadable file.
    """
    keyframe = _with_dt(read_points(resolve(root, info.lidar_path, LIDAR)), 0.0)
    if not info.sweeps:
        return np.concatenate([keyframe] + [_without_ego(keyframe)] * count)
    sweeps = [_load_sweep(root, sweep, info.timestamp) for sweep in _choose(info.sweeps, count, rng)]
    return np.concatenate([keyframe, *sweeps])


def _choose(sweeps: Sequence[SweepInfo], count: int, rng: np.random.Generator | None) -> list[SweepInfo]:
    if rng is None or len(sweeps) <= count:
        return list(sweeps[:count])
    return [sweeps[i] for i in rng.choice(len(sweeps), size=count, replace=False)]


def _load_sweep(root: Path, sweep: SweepInfo, key_timestamp: float) -> Points:
    points = _without_ego(read_points(resolve(root, sweep.path, LIDAR)))
    moved = _with_dt(points, key_timestamp - sweep.timestamp)
    moved[:, :3] = transform_points(sweep.sweep2key, points[:, :3])
    return moved


def _without_ego(points: Points) -> Points:
    return points[~(np.abs(points[:, :2]) < EGO_HALF_SIDE).all(axis=1)]


def _with_dt(points: Points, dt: float) -> Points:
    """A copy with the time difference in place of the ring number."""
    timed = points.copy()
    timed[:, 4] = dt
    return timed
