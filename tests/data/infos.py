"""Hand-made info documents: one scene description, written in each layout."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bevctl.geometry import Array, invert_rigid, rigid, rotation_z, wrap_angle

MODERN_ORDER = (
    "car",
    "truck",
    "trailer",
    "bus",
    "construction_vehicle",
    "bicycle",
    "motorcycle",
    "pedestrian",
    "traffic_cone",
    "barrier",
)
NAMES = ("car", "barrier", "pedestrian")
# x, y, z, l, w, h, yaw
BOXES = np.array(
    [
        [10.0, 5.0, -0.5, 4.5, 1.9, 1.6, 0.7],
        [-8.0, 3.0, -0.9, 0.5, 2.5, 1.0, -2.9],
        [4.0, -6.0, -0.6, 0.7, 0.7, 1.8, 2.0],
    ]
)
VELOCITY = np.array([[3.0, -1.0], [np.nan, np.nan], [0.5, 1.0]])
LIDAR_POINTS, RADAR_POINTS = (25, 0, 4), (1, 0, 0)
TIMES = {"key": 1_533_201_470_448_696, "sweep": 1_533_201_470_398_274, "camera": 1_533_201_470_412_460}
QUATERNION = (0.9, 0.1, -0.05, 0.42)
INTRINSICS = np.array([[50.0, 0.0, 32.0], [0.0, 50.0, 18.0], [0.0, 0.0, 1.0]])
LIDAR2EGO = rigid(rotation_z(-1.5), [0.9, 0.0, 1.8])
EGO2GLOBAL = rigid(rotation_z(0.4), [249.9, 917.5, 0.0])
# the car turned by 10 degrees and drove five metres since the sweep
SWEEP2KEY = rigid(rotation_z(-np.deg2rad(10.0)), [0.3, -5.0, 0.1])
CAMERA2LIDAR = rigid([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]], [0.1, 0.7, -0.3])


def legacy(boxes: Array) -> Array:
    """w, l, h, -yaw - π/2 from l, w, h, yaw."""
    old = boxes.copy()
    old[:, 3:5] = boxes[:, [4, 3]]
    old[:, 6] = wrap_angle(-boxes[:, 6] - np.pi / 2)
    return old


def quaternion(rotation: Array) -> list[float]:
    """w, x, y, z of a rotation about z."""
    half = np.arctan2(rotation[1, 0], rotation[0, 0]) / 2
    return [float(np.cos(half)), 0.0, 0.0, float(np.sin(half))]


def data_list(**changes: Any) -> dict[str, Any]:
    """mmdet3d 1.1; `changes` replace keys of the sample."""
    labels = [MODERN_ORDER.index(name) for name in NAMES]
    sample = {
        "sample_idx": 0,
        "token": "sample-0",
        "timestamp": TIMES["key"] / 1e6,
        "ego2global": EGO2GLOBAL.tolist(),
        "lidar_points": {"num_pts_feats": 5, "lidar_path": "key.pcd.bin", "lidar2ego": LIDAR2EGO.tolist()},
        "images": {
            "CAM_FRONT": {
                "img_path": "front.jpg",
                "cam2img": INTRINSICS.tolist(),
                "lidar2cam": invert_rigid(CAMERA2LIDAR).tolist(),
                "timestamp": TIMES["camera"] / 1e6,
            }
        },
        "lidar_sweeps": [
            {
                "timestamp": TIMES["sweep"] / 1e6,
                "ego2global": EGO2GLOBAL.tolist(),
                "lidar_points": {
                    "lidar_path": "sweeps/LIDAR_TOP/sweep.pcd.bin",
                    "lidar2ego": LIDAR2EGO.tolist(),
                    "lidar2sensor": invert_rigid(SWEEP2KEY).tolist(),
                },
            }
        ],
        "instances": [
            {
                "bbox_3d": BOXES[i].tolist(),
                "bbox_label": labels[i],
                "bbox_label_3d": labels[i],
                "velocity": VELOCITY[i].tolist(),
                "num_lidar_pts": LIDAR_POINTS[i],
                "num_radar_pts": RADAR_POINTS[i],
                "bbox_3d_isvalid": LIDAR_POINTS[i] + RADAR_POINTS[i] > 0,
            }
            for i in range(len(NAMES))
        ],
    }
    metainfo = {
        "categories": {name: label for label, name in enumerate(MODERN_ORDER)},
        "dataset": "nuscenes",
        "version": "v1.0-mini",
        "info_version": "1.1",
    }
    return {"metainfo": metainfo, "data_list": [{**sample, **changes}]}


def infos(boxes: Array = BOXES, **changes: Any) -> dict[str, Any]:
    """mmdet3d 1.0 (or 0.x with `legacy(BOXES)`); `changes` replace keys of the sample."""
    sample = {
        "token": "sample-0",
        "timestamp": TIMES["key"],
        "lidar_path": "./data/nuscenes/samples/LIDAR_TOP/key.pcd.bin",
        "lidar2ego_rotation": quaternion(LIDAR2EGO),
        "lidar2ego_translation": LIDAR2EGO[:3, 3].tolist(),
        "ego2global_rotation": quaternion(EGO2GLOBAL),
        "ego2global_translation": EGO2GLOBAL[:3, 3].tolist(),
        "cams": {
            "CAM_FRONT": {
                "data_path": "./data/nuscenes/samples/CAM_FRONT/front.jpg",
                "cam_intrinsic": INTRINSICS,
                "sensor2lidar_rotation": CAMERA2LIDAR[:3, :3],
                "sensor2lidar_translation": CAMERA2LIDAR[:3, 3],
                "timestamp": TIMES["camera"],
            }
        },
        "sweeps": [
            {
                "data_path": "./data/nuscenes/sweeps/LIDAR_TOP/sweep.pcd.bin",
                "sensor2lidar_rotation": SWEEP2KEY[:3, :3],
                "sensor2lidar_translation": SWEEP2KEY[:3, 3],
                "timestamp": TIMES["sweep"],
            }
        ],
        "gt_boxes": boxes,
        "gt_names": np.array(NAMES),
        "gt_velocity": VELOCITY,
        "num_lidar_pts": np.array(LIDAR_POINTS),
        "num_radar_pts": np.array(RADAR_POINTS),
        "valid_flag": np.array([True, False, True]),
    }
    return {"infos": [{**sample, **changes}], "metadata": {"version": "v1.0-trainval"}}


def mit_bevfusion() -> dict[str, Any]:
    """The layout of mit-bevfusion's published code: legacy boxes, a location, another name for the intrinsics."""
    document = infos(legacy(BOXES), location="boston-seaport")
    camera = document["infos"][0]["cams"]["CAM_FRONT"]
    camera["camera_intrinsics"] = camera.pop("cam_intrinsic")
    return document


def early() -> dict[str, Any]:
    """A file of the first 1.1 release candidates: legacy boxes, CLASSES, sweeps by their poses, a slip in lidar2cam."""
    document = data_list()
    document["metainfo"] = {"CLASSES": MODERN_ORDER, "DATASET": "Nuscenes", "version": "v1.0-trainval"}
    sample = document["data_list"][0]
    for instance, row in zip(sample["instances"], legacy(BOXES), strict=True):
        instance["bbox_3d"] = row.tolist()
    slipped = rigid(CAMERA2LIDAR[:3, :3].T, -CAMERA2LIDAR[:3, 3])
    sample["images"]["CAM_FRONT"]["lidar2cam"] = slipped.tolist()
    sweep = sample["lidar_sweeps"][0]
    del sweep["lidar_points"]["lidar2sensor"]
    sweep["ego2global"] = (EGO2GLOBAL @ LIDAR2EGO @ SWEEP2KEY @ invert_rigid(LIDAR2EGO)).tolist()
    return document


def write(path: Path, document: object) -> Path:
    path.write_bytes(pickle.dumps(document))
    return path
