"""Info files with `infos` and `metadata`: mmdet3d before 1.1, mit-bevfusion and PETR. Times are in microseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bevctl.data.info import CameraInfo, SampleInfo, SweepInfo, box_rows
from bevctl.geometry import Array, quaternion_to_rotation, rigid

MICROSECONDS = 1e-6


def format_of(document: Mapping[str, Any], convention: str) -> str:
    """mit-bevfusion and PETR leave marks of their own; the two mmdet3d layouts differ in nothing but the boxes."""
    first = document["infos"][0] if document["infos"] else {}
    sweeps = next((entry["sweeps"] for entry in document["infos"] if entry.get("sweeps")), ())
    cameras = first.get("cams", {}).values()
    if "location" in first or "radars" in first or any("camera_intrinsics" in camera for camera in cameras):
        return "mit-bevfusion"
    if any("data_path" not in sweep for sweep in sweeps):
        return "petr"
    return "mmdet3d-1.0" if convention == "lwh" else "mmdet3d-0.x"


def read_sample(entry: Mapping[str, Any]) -> SampleInfo:
    """One entry of `infos`; boxes are still as stored."""
    sample = SampleInfo(
        token=str(entry["token"]),
        timestamp=entry["timestamp"] * MICROSECONDS,
        lidar_path=str(entry["lidar_path"]),
        lidar2ego=_pose(entry, "lidar2ego"),
        ego2global=_pose(entry, "ego2global"),
        cameras={name: _camera(camera) for name, camera in entry.get("cams", {}).items()},
        sweeps=_sweeps(entry.get("sweeps", ())),
        location=entry.get("location"),
        scene=entry.get("scene_token"),
    )
    return _annotated(sample, entry) if "gt_boxes" in entry else sample


def _pose(entry: Mapping[str, Any], name: str) -> Array:
    return rigid(quaternion_to_rotation(entry[f"{name}_rotation"]), entry[f"{name}_translation"])


def _sensor2lidar(entry: Mapping[str, Any]) -> Array:
    return rigid(entry["sensor2lidar_rotation"], entry["sensor2lidar_translation"])


def _camera(entry: Mapping[str, Any]) -> CameraInfo:
    intrinsics = entry["cam_intrinsic"] if "cam_intrinsic" in entry else entry["camera_intrinsics"]
    return CameraInfo(
        path=str(entry["data_path"]),
        intrinsics=np.asarray(intrinsics, dtype=np.float64)[:3, :3],
        camera2lidar=_sensor2lidar(entry),
        timestamp=entry["timestamp"] * MICROSECONDS,
    )


def _sweeps(entries: Sequence[Mapping[str, Any]]) -> tuple[SweepInfo, ...]:
    """LiDAR sweeps; PETR's files list camera frames here instead, which have no `data_path` of their own."""
    return tuple(
        SweepInfo(str(entry["data_path"]), _sensor2lidar(entry), entry["timestamp"] * MICROSECONDS)
        for entry in entries
        if "data_path" in entry
    )


def _annotated(sample: SampleInfo, entry: Mapping[str, Any]) -> SampleInfo:
    boxes = box_rows(entry["gt_boxes"], entry.get("gt_velocity"))
    count = len(boxes)
    lidar_points = np.asarray(entry.get("num_lidar_pts", np.full(count, -1)), dtype=np.int64).reshape(count)
    radar_points = np.asarray(entry.get("num_radar_pts", np.zeros(count)), dtype=np.int64).reshape(count)
    valid = entry.get("valid_flag", lidar_points + radar_points != 0)
    return dataclasses.replace(
        sample,
        boxes=boxes,
        names=tuple(map(str, entry["gt_names"])),
        num_lidar_pts=lidar_points,
        num_radar_pts=radar_points,
        valid=np.asarray(valid, dtype=bool).reshape(count),
    )
