"""A small scene of moving objects of all ten classes, as an info file's samples and as nuScenes tables.

The tables are written from the global frame, where the objects are laid out; the samples hold the same objects in the
LiDAR frame. All rotations are about z, so that both describe exactly the same boxes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bevctl.batch import OBJECT_CLASSES
from bevctl.data.index import InfoFile, SampleInfo
from bevctl.evaluate.results import Objects
from bevctl.geometry import invert_rigid, rigid, rotation_z, transform_points, yaw_of, yaw_to_quaternion

VERSION = "v1.0-mini"
STEP_S = 0.5
LIDAR2EGO = rigid(rotation_z(-np.pi / 2), (0.9, 0.0, 1.8))
CATEGORIES = {
    "car": "vehicle.car",
    "truck": "vehicle.truck",
    "construction_vehicle": "vehicle.construction",
    "bus": "vehicle.bus.rigid",
    "trailer": "vehicle.trailer",
    "barrier": "movable_object.barrier",
    "motorcycle": "vehicle.motorcycle",
    "bicycle": "vehicle.bicycle",
    "pedestrian": "human.pedestrian.adult",
    "traffic_cone": "movable_object.trafficcone",
}
ATTRIBUTES = {
    "pedestrian": "pedestrian.moving",
    "motorcycle": "cycle.with_rider",
    "bicycle": "cycle.with_rider",
    "barrier": "",
    "traffic_cone": "",
}


@dataclass(frozen=True)
class Thing:
    """An object in the global frame: centre (m) at time zero, velocity (m/s), size l, w, h and heading."""

    name: str
    start: tuple[float, float, float]
    velocity: tuple[float, float]
    size: tuple[float, float, float]
    yaw: float
    points: int = 20

    def centre(self, step: int) -> np.ndarray:
        shift = np.array([*self.velocity, 0.0]) * STEP_S * step
        return np.asarray(self.start) + shift

    @property
    def attribute(self) -> str:
        return ATTRIBUTES.get(self.name, "vehicle.moving")


def ego_pose(step: int) -> np.ndarray:
    """Ego → global: a car that drives and turns."""
    return rigid(rotation_z(0.6 + 0.05 * step), (600.0 + 2.0 * step, 1400.0 - step, 0.0))


def things() -> list[Thing]:
    """Two objects of each class within 25 m of the ego, far enough apart for the widest matching distance."""
    found = []
    for index, name in enumerate(OBJECT_CLASSES * 2):
        angle, radius = 2 * np.pi * index / 20, 16.0 + 8.0 * (index % 2)
        start = (600.0 + radius * np.cos(angle), 1400.0 + radius * np.sin(angle), 1.0)
        speed = 0.0 if name in ("barrier", "traffic_cone") else 1.0
        heading = 0.3 * index
        velocity = (speed * np.cos(heading), speed * np.sin(heading))
        found.append(Thing(name, start, velocity, (4.0, 1.9, 1.6), heading))
    return found


def sample_of(step: int, contents: list[Thing], attributes: bool = False) -> SampleInfo:
    """The keyframe `step`, its boxes in the LiDAR frame."""
    lidar2global = ego_pose(step) @ LIDAR2EGO
    global2lidar = invert_rigid(lidar2global)
    rows = []
    for thing in contents:
        centre = transform_points(global2lidar, [thing.centre(step)])[0]
        velocity = global2lidar[:2, :2] @ thing.velocity
        rows.append([*centre, *thing.size, thing.yaw + yaw_of(global2lidar), *velocity])
    points = np.array([thing.points for thing in contents])
    return SampleInfo(
        token=f"sample{step}",
        timestamp=STEP_S * step,
        lidar_path=f"{step}.bin",
        lidar2ego=LIDAR2EGO,
        ego2global=ego_pose(step),
        cameras={},
        sweeps=(),
        boxes=np.array(rows).reshape(-1, 9),
        names=tuple(thing.name for thing in contents),
        num_lidar_pts=points,
        num_radar_pts=np.zeros_like(points),
        valid=points > 0,
        location=None,
        attributes=tuple(thing.attribute for thing in contents) if attributes else (),
    )


def samples(steps: int = 3, attributes: bool = False, contents: list[Thing] | None = None) -> tuple[SampleInfo, ...]:
    return tuple(sample_of(step, things() if contents is None else contents, attributes) for step in range(steps))


def without_boxes(sample: SampleInfo) -> SampleInfo:
    """The sample as a test split holds it."""
    none = np.zeros(0, np.int64)
    return dataclasses.replace(
        sample, boxes=None, names=(), num_lidar_pts=none, num_radar_pts=none, valid=none.astype(bool), attributes=()
    )


def info_file(keyframes: tuple[SampleInfo, ...]) -> InfoFile:
    return InfoFile(Path("infos.pkl"), "mmdet3d-1.1", VERSION, keyframes)


def perfect(sample: SampleInfo, score: float = 0.9) -> Objects:
    """The annotations as predictions, with slightly falling scores."""
    assert sample.boxes is not None
    scores = score - 1e-4 * np.arange(len(sample.names))
    labels = np.array([OBJECT_CLASSES.index(name) for name in sample.names], dtype=np.int64)
    return Objects(sample.boxes.astype(np.float32), scores.astype(np.float32), labels)


def write_tables(
    root: Path, steps: int = 3, contents: list[Thing] | None = None, racks: tuple[Thing, ...] = ()
) -> None:
    """The thirteen tables of `samples(steps)`, plus bicycle racks."""
    everything = [*(things() if contents is None else contents), *racks]
    folder = root / VERSION
    folder.mkdir(parents=True)
    Image.new("L", (4, 4)).save(root / "map.png")
    tables = _fixed_tables() | _keyframes(steps) | _annotations(steps, everything)
    for name, records in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(records))


def _fixed_tables() -> dict[str, list[dict[str, Any]]]:
    attributes = {thing.attribute for thing in things()} - {""}
    categories = [*CATEGORIES.values(), "static_object.bicycle_rack"]
    return {
        "category": [{"token": name, "name": name} for name in categories],
        "attribute": [{"token": name, "name": name} for name in attributes],
        "visibility": [{"token": "4", "level": "v80-100"}],
        "sensor": [{"token": "lidar", "channel": "LIDAR_TOP", "modality": "lidar"}],
        "calibrated_sensor": [
            {
                "token": "lidar",
                "sensor_token": "lidar",
                "translation": LIDAR2EGO[:3, 3].tolist(),
                "rotation": yaw_to_quaternion(yaw_of(LIDAR2EGO)).tolist(),
            }
        ],
        "log": [{"token": "log", "location": "singapore-onenorth"}],
        "map": [{"token": "map", "filename": "map.png", "log_tokens": ["log"]}],
        "scene": [{"token": "scene", "name": "scene-0001", "log_token": "log"}],
    }


def _keyframes(steps: int) -> dict[str, list[dict[str, Any]]]:
    poses, records, data = [], [], []
    for step in range(steps):
        pose, time = ego_pose(step), int(1e6 * STEP_S * step)
        rotation = yaw_to_quaternion(yaw_of(pose)).tolist()
        poses.append({"token": f"pose{step}", "translation": pose[:3, 3].tolist(), "rotation": rotation})
        records.append({"token": f"sample{step}", "timestamp": time, "scene_token": "scene"})
        data.append(
            {
                "token": f"data{step}",
                "sample_token": f"sample{step}",
                "ego_pose_token": f"pose{step}",
                "calibrated_sensor_token": "lidar",
                "is_key_frame": True,
                "timestamp": time,
                "filename": f"{step}.bin",
            }
        )
    return {"ego_pose": poses, "sample": records, "sample_data": data}


def _annotations(steps: int, everything: list[Thing]) -> dict[str, list[dict[str, Any]]]:
    instances, records = [], []
    for index, thing in enumerate(everything):
        category = CATEGORIES.get(thing.name, thing.name)
        instances.append({"token": f"thing{index}", "category_token": category})
        for step in range(steps):
            length, width, height = thing.size
            attribute = thing.attribute if thing.name in CATEGORIES else ""
            records.append(
                {
                    "token": f"ann{index}.{step}",
                    "sample_token": f"sample{step}",
                    "instance_token": f"thing{index}",
                    "attribute_tokens": [attribute] if attribute else [],
                    "translation": thing.centre(step).tolist(),
                    "size": [width, length, height],
                    "rotation": yaw_to_quaternion(thing.yaw).tolist(),
                    "prev": f"ann{index}.{step - 1}" if step else "",
                    "next": f"ann{index}.{step + 1}" if step + 1 < steps else "",
                    "num_lidar_pts": thing.points,
                    "num_radar_pts": 0,
                }
            )
    return {"instance": instances, "sample_annotation": records}
