"""Info files of mmdet3d 1.1 and newer: `metainfo` and `data_list`, times in seconds, 4×4 matrices, labels by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bevctl.data.info import IGNORED, CameraInfo, CameraSweeps, SampleInfo, SweepInfo, box_rows
from bevctl.errors import BevctlError
from bevctl.geometry import Array, invert_rigid, quaternion_to_rotation, rigid


def is_early(metainfo: Mapping[str, Any]) -> bool:
    """Files of the first 1.1 release candidates (2022) carry no `info_version`."""
    return "info_version" not in metainfo


def format_of(metainfo: Mapping[str, Any]) -> str:
    return "mmdet3d-1.1-early" if is_early(metainfo) else f"mmdet3d-{metainfo['info_version']}"


def class_names(metainfo: Mapping[str, Any]) -> dict[int, str]:
    """Class name of each label; the formats number the classes differently, so the file itself has to say.

    Raises BevctlError where it does not.
    """
    categories = metainfo.get("categories")
    if isinstance(categories, Mapping):
        return {int(label): str(name) for name, label in categories.items()}
    names = metainfo.get("classes", metainfo.get("CLASSES"))
    if names is None:
        raise BevctlError(
            "The info file numbers its classes but does not name them: metainfo has neither categories nor classes.",
            "Add metainfo['categories'] = {name: label}, or rebuild the file with `bevctl data prepare`.",
        )
    return dict(enumerate(map(str, names)))


def read_sample(entry: Mapping[str, Any], names: Mapping[int, str], early: bool) -> SampleInfo:
    """One entry of `data_list`, of an early file or not; boxes are still as stored."""
    lidar = entry["lidar_points"]
    lidar2ego = np.asarray(lidar["lidar2ego"], dtype=np.float64)
    ego2global = np.asarray(entry["ego2global"], dtype=np.float64)
    sample = SampleInfo(
        token=str(entry["token"]),
        timestamp=float(entry["timestamp"]),
        lidar_path=str(lidar["lidar_path"]),
        lidar2ego=lidar2ego,
        ego2global=ego2global,
        cameras=_cameras(entry.get("images", {}), early),
        sweeps=_sweeps(entry.get("lidar_sweeps", ()), ego2global @ lidar2ego),
        location=entry.get("location"),
        scene=entry.get("scene_token"),
        camera_sweeps=np.asarray(entry.get("camera_sweeps", np.zeros((0, 0))), dtype=np.int32),
    )
    return _annotated(sample, entry["instances"], names) if "instances" in entry else sample


def read_camera_sweeps(document: Mapping[str, Any], samples: Sequence[SampleInfo]) -> CameraSweeps | None:
    """The images that `samples` look back on, which only files of `bevctl data prepare` hold.

    Raises ValueError or KeyError for a table that does not fit together.
    """
    stored = document.get("camera_sweeps")
    if stored is None:
        return None
    calibration = np.asarray(stored["calibration"], dtype=np.int32)
    camera2ego, ego2global = _poses(stored, "cam2ego"), _poses(stored, "ego2global")
    sweeps = CameraSweeps(
        cameras=tuple(map(str, stored["cameras"])),
        paths=np.asarray(stored["path"], dtype=np.bytes_),
        timestamps=np.asarray(stored["timestamp"], dtype=np.float64),
        camera2global=ego2global @ camera2ego[calibration],
        intrinsics=np.asarray(stored["cam2img"], dtype=np.float64),
        calibration=calibration,
    )
    check_camera_sweeps(sweeps, samples)
    return sweeps


def _poses(stored: Mapping[str, Any], name: str) -> Array:
    """(n, 4, 4)"""
    return rigid(quaternion_to_rotation(stored[f"{name}_rotation"]), stored[f"{name}_translation"])


def check_camera_sweeps(sweeps: CameraSweeps, samples: Sequence[SampleInfo]) -> None:
    """Raises ValueError where a sample points at an image that is not in `sweeps`."""
    count = len(sweeps.paths)
    if not len(sweeps.timestamps) == len(sweeps.camera2global) == count:
        raise ValueError("camera sweeps have paths, times and poses of different numbers")
    for sample in samples:
        rows = sample.camera_sweeps
        if len(rows) and (rows.shape[1:] != (len(sweeps.cameras),) or rows.max() >= count or rows.min() < -1):
            raise ValueError(f"sample {sample.token} names camera sweeps that are not there")


def _cameras(images: Mapping[str, Mapping[str, Any]], early: bool) -> dict[str, CameraInfo]:
    usable = {name: image for name, image in images.items() if image.get("img_path")}
    return {
        name: CameraInfo(
            path=str(image["img_path"]),
            intrinsics=np.asarray(image["cam2img"], dtype=np.float64)[:3, :3],
            camera2lidar=_camera2lidar(np.asarray(image["lidar2cam"], dtype=np.float64), early),
            timestamp=float(image["timestamp"]),
        )
        for name, image in usable.items()
    }


def _camera2lidar(lidar2camera: Array, early: bool) -> Array:
    """Early files turned the rotation round but only negated the translation, so that it still is the camera's
    position in the LiDAR frame, times -1."""
    return rigid(lidar2camera[:3, :3].T, -lidar2camera[:3, 3]) if early else invert_rigid(lidar2camera)


def _sweeps(entries: Sequence[Mapping[str, Any]], lidar2global: Array) -> tuple[SweepInfo, ...]:
    return tuple(
        SweepInfo(
            path=str(entry["lidar_points"]["lidar_path"]),
            sweep2key=_sweep2key(entry, lidar2global),
            timestamp=float(entry["timestamp"]),
        )
        for entry in entries
    )


def _sweep2key(entry: Mapping[str, Any], lidar2global: Array) -> Array:
    """`lidar2sensor` maps the keyframe to the sweep. Early files lack it: there the poses of both give the map."""
    lidar = entry["lidar_points"]
    if lidar.get("lidar2sensor") is not None:
        return invert_rigid(lidar["lidar2sensor"])
    sweep2global = np.asarray(entry["ego2global"], dtype=np.float64) @ np.asarray(lidar["lidar2ego"], dtype=np.float64)
    key: Array = invert_rigid(lidar2global) @ sweep2global
    return key


def _annotated(sample: SampleInfo, instances: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> SampleInfo:
    return dataclasses.replace(
        sample,
        boxes=box_rows([i["bbox_3d"] for i in instances], [_velocity(i) for i in instances]),
        names=tuple(_name(i, names) for i in instances),
        num_lidar_pts=np.array([i.get("num_lidar_pts", -1) for i in instances], dtype=np.int64),
        num_radar_pts=np.array([i.get("num_radar_pts", 0) for i in instances], dtype=np.int64),
        valid=np.array([bool(i.get("bbox_3d_isvalid", True)) for i in instances], dtype=bool),
        attributes=_attributes(instances),
    )


def _velocity(instance: Mapping[str, Any]) -> Any:
    """(vx, vy), a list or an array; NaN where the instance has none."""
    velocity = instance.get("velocity")
    return (np.nan, np.nan) if velocity is None or len(velocity) == 0 else velocity


def _name(instance: Mapping[str, Any], names: Mapping[int, str]) -> str:
    label = int(instance["bbox_label_3d"] if "bbox_label_3d" in instance else instance["bbox_label"])
    return IGNORED if label < 0 else names[label]


def _attributes(instances: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Only files of `bevctl data prepare` name them."""
    if not any("attribute" in instance for instance in instances):
        return ()
    return tuple(str(instance.get("attribute", "")) for instance in instances)
