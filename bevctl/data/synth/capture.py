"""Records one scene: drives through it, writes every sensor file and returns the tables' records."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

from bevctl.data.synth.camera import render
from bevctl.data.synth.lidar import scan
from bevctl.data.synth.maps import make_token
from bevctl.data.synth.objects import CLASSES
from bevctl.data.synth.options import SynthOptions
from bevctl.data.synth.rig import CAMERAS, LIDAR2EGO, Camera, image_size
from bevctl.data.synth.road import Layout
from bevctl.data.synth.scene import KEYFRAME_PERIOD, Scene, ScenePlan, make_scene
from bevctl.data.synth.tables import Record, Tables, empty_tables, link, visibility_token
from bevctl.geometry import invert_rigid, points_in_boxes, transform_points, yaw_of, yaw_to_quaternion

Array = NDArray[np.float64]

LIDAR = "LIDAR_TOP"
SWEEPS_PER_KEYFRAME = {"camera": 5, "lidar": 10}
"""10 Hz and 20 Hz over 2 Hz."""
ANNOTATION_RANGE = 70.0
"""Objects farther from the ego vehicle are not annotated, m."""
JPEG_QUALITY = 88
FIRST_TIMESTAMP = 1_700_000_000_000_000
SCENE_INTERVAL = 60_000_000
"""Between the first keyframes of two scenes, µs."""


@dataclass(frozen=True)
class Captured:
    """What is left of a scene when its sensor files are written."""

    layout: Layout
    tables: Tables
    bytes: int


@dataclass(frozen=True)
class Frame:
    """One firing of one sensor."""

    channel: str
    camera: Camera | None
    """None: the LiDAR."""
    time: float
    """s after the first keyframe."""
    sample: int
    """Keyframe it belongs to; a sweep belongs to the next one."""
    is_key: bool


def frames_of(channel: str, camera: Camera | None, options: SynthOptions) -> list[Frame]:
    """Every firing of one sensor in a scene, in order."""
    wanted = options.sweeps if camera is None else options.camera_sweeps
    rate = SWEEPS_PER_KEYFRAME["camera" if camera else "lidar"] if wanted else 1
    delay = camera.delay if camera else 0.0
    steps = range((options.keyframes - 1) * rate + 1)
    return [Frame(channel, camera, i * KEYFRAME_PERIOD / rate + delay, -(-i // rate), i % rate == 0) for i in steps]


def capture_scene(root: Path, plan: ScenePlan, options: SynthOptions) -> Captured:
    """Make a scene, write its images and LiDAR files below `root`, return its records.

    The result and every byte written depend on `plan` and `options` alone. Raises OSError where a file can't be
    written.
    """
    return _Recorder(root, plan, options).run()


class _Recorder:
    """Writes the files of one scene and collects its records."""

    def __init__(self, root: Path, plan: ScenePlan, options: SynthOptions) -> None:
        self.root, self.plan, self.options = root, plan, options
        self.scene: Scene = make_scene(plan, options.seed, options.keyframes)
        self.tables = empty_tables()
        self.bytes = 0
        self.log_file = f"synth-{options.seed:04d}-{plan.name}"
        self.start = FIRST_TIMESTAMP + plan.number * SCENE_INTERVAL
        seen = (options.keyframes, len(self.scene.solids))
        self.visible, self.silhouette = np.zeros(seen), np.zeros(seen)
        self.points = np.zeros(seen, dtype=np.int64)

    def run(self) -> Captured:
        self._add_scene()
        for camera in CAMERAS:
            self._add_sensor(camera.channel, camera)
        self._add_sensor(LIDAR, None)
        self._add_annotations()
        return Captured(self.scene.layout, self.tables, self.bytes)

    def token(self, *parts: object) -> str:
        return make_token(self.options.seed, self.plan.name, *parts)

    def timestamp(self, time: float) -> int:
        return self.start + round(time * 1e6)

    def _add_scene(self) -> None:
        count = self.options.keyframes
        samples = [
            {
                "token": self.token("sample", i),
                "timestamp": self.timestamp(i * KEYFRAME_PERIOD),
                "scene_token": self.token("scene"),
            }
            for i in range(count)
        ]
        link(samples)
        self.tables["sample"] = samples
        self.tables["scene"].append(
            {
                "token": self.token("scene"),
                "log_token": self.token("log"),
                "nbr_samples": count,
                "first_sample_token": samples[0]["token"],
                "last_sample_token": samples[-1]["token"],
                "name": self.plan.name,
                "description": "Synthetic street with all ten detection classes",
            }
        )
        self.tables["log"].append(
            {
                "token": self.token("log"),
                "logfile": self.log_file,
                "vehicle": "synth",
                "date_captured": "2023-11-14",
                "location": self.plan.location,
            }
        )

    def _add_sensor(self, channel: str, camera: Camera | None) -> None:
        """Calibration, files and sample_data of one sensor."""
        scale = self.options.image_scale
        sensor2ego = camera.camera2ego if camera else LIDAR2EGO
        self.tables["calibrated_sensor"].append(
            {
                "token": self.token("calibrated_sensor", channel),
                "sensor_token": make_token("sensor", channel),
                "translation": sensor2ego[:3, 3].tolist(),
                "rotation": _quaternion(sensor2ego[:3, :3]),
                "camera_intrinsic": camera.intrinsics(scale).tolist() if camera else [],
            }
        )
        records = [self._add_frame(frame) for frame in frames_of(channel, camera, self.options)]
        link(records)
        self.tables["sample_data"].extend(records)

    def _add_frame(self, frame: Frame) -> Record:
        """Record one firing: its file, its ego pose, its sample_data."""
        timestamp = self.timestamp(frame.time)
        token = self.token("sample_data", frame.channel, timestamp)
        pose = self.scene.ego2global(frame.time)
        self.tables["ego_pose"].append(
            {
                "token": token,
                "timestamp": timestamp,
                "rotation": yaw_to_quaternion(yaw_of(pose)).tolist(),
                "translation": pose[:3, 3].tolist(),
            }
        )
        extension = "jpg" if frame.camera else "pcd.bin"
        folder = "samples" if frame.is_key else "sweeps"
        name = f"{folder}/{frame.channel}/{self.log_file}__{frame.channel}__{timestamp}.{extension}"
        width, height = image_size(self.options.image_scale) if frame.camera else (0, 0)
        self._write(name, self._photograph(frame) if frame.camera else self._scan(frame))
        return {
            "token": token,
            "sample_token": self.token("sample", frame.sample),
            "ego_pose_token": token,
            "calibrated_sensor_token": self.token("calibrated_sensor", frame.channel),
            "timestamp": timestamp,
            "fileformat": "jpg" if frame.camera else "pcd",
            "is_key_frame": frame.is_key,
            "height": height,
            "width": width,
            "filename": name,
        }

    def _write(self, name: str, content: bytes) -> None:
        (self.root / name).write_bytes(content)
        self.bytes += len(content)

    def _photograph(self, frame: Frame) -> bytes:
        assert frame.camera is not None
        picture = render(self.scene, frame.camera, frame.time, self.options.image_scale)
        if frame.is_key:
            solids = picture.hits.solid
            self.visible[frame.sample] += np.bincount(solids[solids >= 0], minlength=len(self.scene.solids))
            self.silhouette[frame.sample] += picture.hits.silhouettes
        content = io.BytesIO()
        Image.fromarray(picture.pixels).save(content, "JPEG", quality=JPEG_QUALITY)
        return content.getvalue()

    def _scan(self, frame: Frame) -> bytes:
        rng = np.random.default_rng([self.options.seed, self.plan.number, round(frame.time * 1000)])
        points = scan(self.scene, frame.time, self.options.azimuth_steps, rng, self.options.lidar_beams)
        if frame.is_key:
            self.points[frame.sample] = self._count_points(points, frame.time)
        return points.tobytes()

    def _count_points(self, points: NDArray[np.float32], time: float) -> NDArray[np.int64]:
        """(solids,) points inside each solid's box."""
        lidar2global = self.scene.ego2global(time) @ LIDAR2EGO
        boxes = self.scene.boxes(self.scene.poses(time))
        boxes[:, :3] = transform_points(invert_rigid(lidar2global), boxes[:, :3])
        boxes[:, 6] -= yaw_of(lidar2global)
        return points_in_boxes(points, boxes).sum(axis=1)

    def _add_annotations(self) -> None:
        """sample_annotation and instance records, object by object."""
        times = [i * KEYFRAME_PERIOD for i in range(self.options.keyframes)]
        poses = [self.scene.poses(time) for time in times]
        places = np.stack([self.scene.boxes(pose) for pose in poses])
        egos = np.stack([self.scene.ego2global(time)[:2, 3] for time in times])
        near = np.linalg.norm(places[..., :2] - egos[:, None], axis=-1) < ANNOTATION_RANGE
        for index, solid in enumerate(self.scene.solids):
            samples = np.flatnonzero(near[:, index])
            if not solid.is_annotated or len(samples) == 0:
                continue
            records = [self._annotation(index, int(i), places[i, index]) for i in samples]
            link(records)
            self.tables["sample_annotation"].extend(records)
            self.tables["instance"].append(
                {
                    "token": self.token("instance", index),
                    "category_token": make_token("category", CLASSES[solid.kind].category),
                    "nbr_annotations": len(records),
                    "first_annotation_token": records[0]["token"],
                    "last_annotation_token": records[-1]["token"],
                }
            )

    def _annotation(self, index: int, sample: int, box: Array) -> Record:
        solid = self.scene.solids[index]
        share = self.visible[sample, index] / max(self.silhouette[sample, index], 1)
        length, width, height = solid.size
        return {
            "token": self.token("annotation", index, sample),
            "sample_token": self.token("sample", sample),
            "instance_token": self.token("instance", index),
            "visibility_token": visibility_token(share),
            "attribute_tokens": [make_token("attribute", solid.attribute)] if solid.attribute else [],
            "translation": box[:3].tolist(),
            "size": [width, length, height],
            "rotation": yaw_to_quaternion(float(box[6])).tolist(),
            "num_lidar_pts": int(self.points[sample, index]),
            "num_radar_pts": 0,
        }


def _quaternion(rotation: Array) -> list[float]:
    """(w, x, y, z) of a (3, 3) rotation."""
    x, y, z, w = Rotation.from_matrix(rotation).as_quat()
    return [float(w), float(x), float(y), float(z)]
