"""What an info file says about a data set, in one form whatever its layout was.

All matrices are 4×4 float64 on column vectors; times are in seconds; boxes are rows as in `bevctl.batch`, in the LiDAR
frame of the keyframe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.geometry import Array

IGNORED = "ignored"
"""Name of an annotated object whose class the info file leaves out (label -1)."""


@dataclass(frozen=True, eq=False)
class CameraInfo:
    """One image of a sample."""

    path: str
    intrinsics: Array
    """(3, 3) camera frame → pixels."""
    camera2lidar: Array
    """(4, 4) camera frame at its own time → LiDAR frame of the keyframe, ego motion in between included."""
    timestamp: float


@dataclass(frozen=True, eq=False)
class CameraSweeps:
    """The images that samples look back on, each stored once however many samples do."""

    cameras: tuple[str, ...]
    """K names, one for each column of `SampleInfo.camera_sweeps`."""
    paths: NDArray[np.bytes_]
    """(F,)"""
    timestamps: Array
    """(F,)"""
    camera2global: Array
    """(F, 4, 4) at each image's own time."""
    intrinsics: Array
    """(S, 3, 3) camera frame → pixels, of each calibration."""
    calibration: NDArray[np.int32]
    """(F,) which of them."""

    def image(self, index: int, global2lidar: Array) -> CameraInfo:
        """An image as a keyframe whose LiDAR lies at `global2lidar` sees it."""
        return CameraInfo(
            path=os.fsdecode(self.paths[index]),
            intrinsics=self.intrinsics[self.calibration[index]],
            camera2lidar=global2lidar @ self.camera2global[index],
            timestamp=float(self.timestamps[index]),
        )


@dataclass(frozen=True, eq=False)
class SweepInfo:
    """One earlier LiDAR sweep."""

    path: str
    sweep2key: Array
    """(4, 4) LiDAR frame of the sweep → LiDAR frame of the keyframe."""
    timestamp: float


@dataclass(frozen=True, eq=False)
class SampleInfo:
    """One annotated keyframe. File names are as stored: `index.resolve` finds the file."""

    token: str
    timestamp: float
    lidar_path: str
    lidar2ego: Array
    ego2global: Array
    cameras: dict[str, CameraInfo]
    sweeps: tuple[SweepInfo, ...]
    """Nearest in time first."""
    boxes: Array | None = None
    """(n, 9), or None where the file has no annotations (a test split)."""
    names: tuple[str, ...] = ()
    """Class name of each box; `IGNORED` for label -1."""
    num_lidar_pts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(n,), -1 where the file does not say."""
    num_radar_pts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """(n,) False where no LiDAR or radar point lies on the object."""
    location: str | None = None
    """Name of the map, as in nuScenes' `log` table."""
    attributes: tuple[str, ...] = ()
    """nuScenes attribute of each box, "" where it has none; empty where the file does not say."""
    scene: str | None = None
    """Token of its scene; None where the file does not say."""
    camera_sweeps: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    """(n, K) images of n earlier moments in the file's `CameraSweeps`, nearest in time first; -1: a camera has none."""

    @property
    def lidar2global(self) -> Array:
        """(4, 4) at the time of the keyframe's sweep."""
        pose: Array = self.ego2global @ self.lidar2ego
        return pose


@dataclass(frozen=True, eq=False)
class InfoFile:
    """A whole info file."""

    path: Path
    format: str
    """mmdet3d-1.1, mmdet3d-1.1-early, mmdet3d-1.0, mmdet3d-0.x, mit-bevfusion or petr."""
    version: str
    """nuScenes version, e.g. v1.0-trainval; "unknown" where the file does not say."""
    samples: tuple[SampleInfo, ...]
    box_convention: str = "lwh"
    """How the file stores boxes: lwh (l, w, h, yaw) or wlh (w, l, h, -yaw - π/2)."""
    notes: tuple[str, ...] = ()
    """What was assumed in reading, one sentence each."""
    camera_sweeps: CameraSweeps | None = None
    """None where the file has none."""


def box_rows(boxes: Any, velocity: Any) -> Array:
    """(n, 9) rows from (n, 7) boxes and (n, 2) velocities in m/s; None as velocity means unknown, and so does infinity,
    which becomes NaN."""
    seven = np.asarray(boxes, dtype=np.float64).reshape(-1, 7)
    two = np.full((len(seven), 2), np.nan) if velocity is None else np.asarray(velocity, np.float64).reshape(-1, 2)
    return np.concatenate([seven, np.where(np.isfinite(two), two, np.nan)], axis=1)
