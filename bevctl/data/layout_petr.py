"""The camera sweeps of PETR's info files: `sweeps` lists earlier moments, each a dict of images by camera.

Their matrices start from the LiDAR of the sample that lists them, so that one image comes with other numbers in every
sample; here each image is kept once, with its place in the world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bevctl.batch import CAMERAS
from bevctl.data.info import CameraSweeps, SampleInfo
from bevctl.geometry import Array, invert_rigid, rigid

MICROSECONDS = 1e-6


def read_camera_sweeps(
    entries: Sequence[Mapping[str, Any]], samples: Sequence[SampleInfo]
) -> tuple[CameraSweeps | None, list[SampleInfo]]:
    """What the `entries` of a file list beside the keyframes, and `samples` that point at it.

    Files of other projects, whose sweeps are LiDAR files, have none: None, and the samples as they were.
    """
    images = _Images()
    pointing = [
        dataclasses.replace(sample, camera_sweeps=images.rows(entry.get("sweeps", ()), sample.lidar2global))
        for entry, sample in zip(entries, samples, strict=True)
    ]
    return (images.table(), pointing) if images.indices else (None, list(samples))


class _Images:
    """Every image that was met, once."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {}
        self._timestamps: list[float] = []
        self._poses: list[Array] = []
        self._calibration: list[int] = []
        self._calibrations: dict[bytes, int] = {}

    def rows(self, moments: Sequence[Mapping[str, Any]], lidar2global: Array) -> np.ndarray:
        """(n, K) index of each image, -1 where a moment lacks a camera; no rows where there is no image at all."""
        found = np.full((len(moments), len(CAMERAS)), -1, dtype=np.int32)
        for row, moment in zip(found, moments, strict=True):
            for column, camera in enumerate(CAMERAS):
                if isinstance(moment.get(camera), Mapping):
                    row[column] = self._index(moment[camera], lidar2global)
        return found if (found >= 0).any() else found[:0]

    def _index(self, image: Mapping[str, Any], lidar2global: Array) -> int:
        path = str(image["data_path"])
        index = self.indices.setdefault(path, len(self.indices))
        if index == len(self._poses):
            intrinsics = np.asarray(image["intrinsics"], dtype=np.float64)[:3, :3]
            self._poses.append(lidar2global @ _camera2lidar(image, intrinsics))
            self._timestamps.append(image["timestamp"] * MICROSECONDS)
            self._calibration.append(self._calibrations.setdefault(intrinsics.tobytes(), len(self._calibrations)))
        return index

    def table(self) -> CameraSweeps:
        intrinsics = [np.frombuffer(stored).reshape(3, 3) for stored in self._calibrations]
        return CameraSweeps(
            cameras=CAMERAS,
            paths=np.array([path.encode() for path in self.indices]),
            timestamps=np.array(self._timestamps),
            camera2global=np.stack(self._poses),
            intrinsics=np.stack(intrinsics),
            calibration=np.array(self._calibration, dtype=np.int32),
        )


def _camera2lidar(image: Mapping[str, Any], intrinsics: Array) -> Array:
    """From `lidar2img`, which is what PETR's network reads; else from the pose in the LiDAR frame."""
    if "lidar2img" not in image:
        return rigid(image["sensor2lidar_rotation"], image["sensor2lidar_translation"])
    lidar2camera = np.linalg.inv(intrinsics) @ np.asarray(image["lidar2img"], dtype=np.float64)[:3]
    return invert_rigid(rigid(lidar2camera[:, :3], lidar2camera[:, 3]))
