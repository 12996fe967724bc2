"""Looking at single samples: do their files open, are their matrices rotations, do their boxes land in images?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from bevctl.data.files import read_image
from bevctl.data.index import locate
from bevctl.data.info import SampleInfo
from bevctl.data.sweeps import LIDAR
from bevctl.errors import BevctlError
from bevctl.geometry import Array, invert_rigid, project_points

MIN_LIDAR_POINTS = 5
"""Boxes with fewer points may be hidden from the cameras, too."""
_FARTHEST_M = 1000.0
_LARGEST_RING = 256
_SWEEPS = 3
"""Sweeps of a sample that are looked for."""


def open_files(root: Path, sample: SampleInfo, cameras: bool, points: bool, width: int) -> tuple[int, list[str]]:
    """How many files of a sample opened, and what is wrong with the others; `width` values make a point."""
    problems = []
    opened = 0
    wanted = [(name, camera.path) for name, camera in sample.cameras.items()] if cameras else []
    wanted += [(LIDAR, sample.lidar_path), *((LIDAR, s.path) for s in sample.sweeps[:_SWEEPS])] if points else []
    for sensor, name in wanted:
        path = locate(root, name, sensor)
        if path is None:
            problems.append(f"{sensor} file {name} is not in {root}")
            continue
        problem = _bad_points(path, width) if sensor == LIDAR else _bad_image(path)
        opened += not problem
        problems += [problem] if problem else []
    return opened, problems


def _bad_image(path: Path) -> str:
    try:
        read_image(path)
    except BevctlError as error:
        return error.message
    return ""


def _bad_points(path: Path, width: int) -> str:
    """What speaks against a file of float32 points of `width` values; empty for a sound one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if not data:
        return f"{path} is empty"
    if len(data) % (4 * width):
        return f"{path}: {len(data):,} bytes are no whole number of points of {width} values"
    points = np.frombuffer(data, dtype=np.float32).reshape(-1, width)
    finite = points[np.isfinite(points).all(axis=1)]
    if len(finite) < len(points) / 2:
        return f"{path}: half of the points are not finite"
    far = (np.abs(finite[:, :3]) > _FARTHEST_M).any(axis=1).mean()
    rings = finite[:, 4] if width == 5 else np.zeros(1)
    if far > 0.01 or (rings != np.round(rings)).any() or rings.min() < 0 or rings.max() > _LARGEST_RING:
        return f"{path}: the values are no points of {width} values (x, y, z in m, intensity, ring)"
    return ""


def bad_matrices(sample: SampleInfo) -> Iterator[str]:
    """A sentence for each transform of a sample that is no rigid motion, and each camera without a focal length."""
    named = [("lidar2ego", sample.lidar2ego), ("ego2global", sample.ego2global)]
    named += [(f"{name} camera2lidar", camera.camera2lidar) for name, camera in sample.cameras.items()]
    for name, matrix in named:
        if not _is_rigid(matrix):
            yield f"{name} of sample {sample.token} is no rigid transform"
    for name, camera in sample.cameras.items():
        k = camera.intrinsics
        if not np.isfinite(k).all() or k[0, 0] <= 0 or k[1, 1] <= 0:
            yield f"the intrinsics of {name} of sample {sample.token} have no positive focal length"


def _is_rigid(matrix: Array) -> bool:
    rotation = matrix[:3, :3]
    return bool(
        np.isfinite(matrix).all()
        and np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3)
        and np.linalg.det(rotation) > 0
    )


def boxes_in_images(root: Path, samples: Sequence[SampleInfo]) -> tuple[int, int]:
    """(boxes whose centre lands in an image, boxes in all) of the boxes that LiDAR points lie on."""
    seen = total = 0
    for sample in samples:
        if sample.boxes is None or not sample.cameras:
            continue
        known = sample.num_lidar_pts if len(sample.num_lidar_pts) == len(sample.boxes) else np.zeros(0)
        boxes = sample.boxes[known >= MIN_LIDAR_POINTS] if len(known) else sample.boxes
        total += len(boxes)
        seen += int(_lands(root, sample, boxes[:, :3]).sum())
    return seen, total


def _lands(root: Path, sample: SampleInfo, centres: Array) -> Array:
    """(n,) whether each centre (LiDAR frame) lies in one of the sample's images."""
    lands = np.zeros(len(centres), dtype=bool)
    for name, camera in sample.cameras.items():
        projection = np.eye(4)
        projection[:3, :3] = camera.intrinsics
        pixels, depth = project_points(projection @ invert_rigid(camera.camera2lidar), centres)
        size = _image_size(root, camera.path, name) or (2 * camera.intrinsics[0, 2], 2 * camera.intrinsics[1, 2])
        lands |= (depth > 0) & (pixels >= 0).all(axis=1) & (pixels < np.asarray(size)).all(axis=1)
    return lands


def _image_size(root: Path, name: str, sensor: str) -> tuple[int, int] | None:
    """(width, height) by the file's header."""
    path = locate(root, name, sensor)
    if path is None:
        return None
    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
