"""The views of a sample: which images it has, their calibration, and their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bevctl.data.files import ImageArray, ImageFile, read_image_file
from bevctl.data.index import resolve
from bevctl.data.info import CameraInfo
from bevctl.data.sample import Sample, Views
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import Array, rigid

_FAR_AWAY = rigid(np.diag([1.0, -1.0, -1.0]), [0.0, 0.0, -1e4])
"""Pose of a camera that a sample lacks: 10 km below and looking down, so that it sees no point and fills no cell."""


def add_views(sample: Sample, views: Views, time: float) -> Sample:
    """The sample with one more moment's views, behind those it has; its keyframe's LiDAR sweep was taken at `time`.

    A camera without an image sees nothing, and its image is as old as those of the others on average.
    """
    known = [time - view.timestamp for view in views if view is not None]
    usual = float(np.mean(known)) if known else 0.0
    ages = [usual if view is None else time - view.timestamp for view in views]
    poses = [_FAR_AWAY if view is None else view.camera2lidar for view in views]
    return dataclasses.replace(
        sample,
        views=(*sample.views, *views),
        intrinsics=_appended(sample.intrinsics, [_intrinsics(view) for view in views]),
        camera2lidar=_appended(sample.camera2lidar, poses),
        times=np.append(sample.times, ages),
        image_aug=_appended(sample.image_aug, [np.eye(4)] * len(views)),
    )


def _appended(matrices: Array, more: Sequence[Array]) -> Array:
    return np.concatenate([matrices, np.stack(more)]) if more else matrices


def _intrinsics(view: CameraInfo | None) -> Array:
    matrix = np.eye(4)
    if view is not None:
        matrix[:3, :3] = view.intrinsics
    return matrix


def read_views(root: Path, cameras: Sequence[str], sample: Sample) -> Sample:
    """The sample with its image files read, black where a camera has none.

    `cameras` names the views of one moment. Raises BevctlError (exit 4) for an unreadable file, or a sample without any
    image.
    """
    files = [
        None if view is None else read_image_file(resolve(root, view.path, cameras[place % len(cameras)]))
        for place, view in enumerate(sample.views)
    ]
    size = next((file.size for file in files if file is not None), None)
    if size is None:
        raise BevctlError(f"sample {sample.token} has no image at all", code=ExitCode.RUN_FAILED)
    blank = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    encoded: tuple[ImageArray | ImageFile, ...] = tuple(blank if file is None else file for file in files)
    return dataclasses.replace(sample, encoded=encoded, views=())
