"""Samples made in memory at the real sensors' size, for measuring where no data set is at hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bevctl.config.schema import Config
from bevctl.data.previous import usual_age
from bevctl.data.sample import Sample
from bevctl.data.synth.lidar import scan
from bevctl.data.synth.options import TRAIN_LOCATIONS
from bevctl.data.synth.rig import CAMERAS, LIDAR2EGO, image_size
from bevctl.data.synth.scene import Scene, ScenePlan, make_scene
from bevctl.geometry import Array, invert_rigid, rigid, transform_boxes, transform_points

AZIMUTH_STEPS = 1084
"""LiDAR firings a revolution of the real sensor."""
SWEEP_PERIOD = 0.05
"""s"""
_SCENE_KEYFRAMES = 8


def street_sample(config: Config, seed: int) -> Sample:
    """A sample before any transform: a synthetic street, seen by the real rig at full resolution.

    The cloud, for a model that reads it, has `data.sweeps` + 1 sweeps of 32 × 1084 firings. Images and maps are random
    numbers: what they show changes nothing about the cost of a step. The same `seed` gives the same sample.
    """
    rng = np.random.default_rng([config.seed, seed])
    scene = make_scene(ScenePlan(f"street-{seed}", seed, TRAIN_LOCATIONS[0], 0), config.seed, _SCENE_KEYFRAMES)
    time = config.data.sweeps * SWEEP_PERIOD
    boxes, labels = _objects(scene, time, config.data.classes)
    ages = _ages(config)
    intrinsics = np.stack([rigid(camera.intrinsics(1.0), np.zeros(3)) for camera in CAMERAS])
    return Sample(
        token=f"street-{seed}",
        images=_images(rng, config.data.frames) if config.model.camera is not None else None,
        points=_cloud(scene, time, config.data.sweeps, rng) if config.model.reads_points else None,
        intrinsics=np.tile(intrinsics, (len(ages), 1, 1)),
        camera2lidar=np.concatenate([_camera2lidar(scene, time, age) for age in ages]),
        times=np.repeat(ages, len(CAMERAS)),
        image_aug=np.broadcast_to(np.eye(4), (len(ages) * len(CAMERAS), 4, 4)),
        lidar_aug=np.eye(4),
        boxes=boxes,
        labels=labels,
        has_boxes=True,
        bev_map=_map(config, rng),
    )


def _images(rng: np.random.Generator, frames: int) -> tuple[NDArray[np.uint8], ...]:
    width, height = image_size(1.0)
    return tuple(rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(frames * len(CAMERAS)))


def _ages(config: Config) -> list[float]:
    """Of the images of each moment, s."""
    previous = config.data.previous
    return [0.0] if previous is None else [0.0, usual_age(previous, previous.eval)]


def _camera2lidar(scene: Scene, time: float, age: float) -> Array:
    """(N, 4, 4) cameras `age` s before `time` → LiDAR frame at `time`."""
    ego2lidar = invert_rigid(_lidar2global(scene, time)) @ scene.ego2global(time - age)
    return np.stack([ego2lidar @ camera.camera2ego for camera in CAMERAS])


def _lidar2global(scene: Scene, time: float) -> Array:
    return scene.ego2global(time) @ LIDAR2EGO


def _cloud(scene: Scene, time: float, sweeps: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """(P, 5) x, y, z (LiDAR frame at `time`), intensity, dt of the last sweep and those before it."""
    global2lidar = invert_rigid(_lidar2global(scene, time))
    clouds = []
    for number in range(sweeps + 1):
        dt = number * SWEEP_PERIOD
        points = scan(scene, time - dt, AZIMUTH_STEPS, rng)
        points[:, :3] = transform_points(global2lidar @ _lidar2global(scene, time - dt), points[:, :3])
        points[:, 4] = dt
        clouds.append(points)
    return np.concatenate(clouds)


def _objects(scene: Scene, time: float, classes: tuple[str, ...]) -> tuple[Array, NDArray[np.int64]]:
    """(n, 9) boxes in the LiDAR frame and their labels."""
    boxes = scene.boxes(scene.poses(time))
    speed = np.array([solid.speed for solid in scene.solids])
    velocity = np.stack([np.cos(boxes[:, 6]), np.sin(boxes[:, 6])], axis=1) * speed[:, None]
    rows = transform_boxes(invert_rigid(_lidar2global(scene, time)), np.concatenate([boxes, velocity], axis=1))
    labels = np.array([classes.index(s.kind) if s.kind in classes else -1 for s in scene.solids], dtype=np.int64)
    return rows[labels >= 0], labels[labels >= 0]


def _map(config: Config, rng: np.random.Generator) -> NDArray[np.uint8] | None:
    head = config.model.map
    if head is None:
        return None
    x, y = (round((high - low) / step) for low, high, step in (head.xbound, head.ybound))
    return rng.integers(0, 2, (len(config.data.map_classes), x, y), dtype=np.uint8)
