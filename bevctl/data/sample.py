"""One sample as NumPy arrays: what the data set loads, transforms change, and the loader stacks into a `Batch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bevctl.data.files import ImageArray, ImageFile
from bevctl.data.info import CameraInfo
from bevctl.geometry import Array

Views = tuple[CameraInfo | None, ...]
"""None for a camera that has no image."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Frames and box rows as in `bevctl.batch`. A sensor that is not used is None."""

    token: str
    images: tuple[ImageArray, ...] | None
    """V × (H, W, 3) RGB; sizes may differ before augmentation. None while they are `encoded`."""
    points: NDArray[np.float32] | None
    """(P, 5) x, y, z, intensity, dt."""
    intrinsics: Array
    """(V, 4, 4) camera frame → source pixels."""
    camera2lidar: Array
    """(V, 4, 4) camera frame at the image's time → LiDAR frame of the keyframe before augmentation."""
    times: Array
    """(V,) time of the keyframe's LiDAR sweep - time of the image, s."""
    image_aug: Array
    """(V, 4, 4) source pixels → pixels of `images`."""
    lidar_aug: Array
    """(4, 4) LiDAR frame → augmented LiDAR frame, in which `points`, `boxes` and `bev_map` are."""
    boxes: Array
    """(n, 9)"""
    labels: NDArray[np.int64]
    """(n,)"""
    has_boxes: bool
    bev_map: NDArray[np.uint8] | None = None
    """(K, X, Y) 0/1, or None where the sample has no map."""
    padding: NDArray[np.bool_] | None = None
    """(V, H, W) True beyond the edges of the images' sources; None unless images are padded."""
    views: Views = ()
    """V images that are not read yet: those of the keyframe, then those of an earlier moment."""
    encoded: tuple[ImageArray | ImageFile, ...] = ()
    """V images, most of them not yet decoded, that the image augmentation turns into `images`."""


@dataclass(frozen=True, eq=False)
class Item:
    """What became of one index: a sample, or none, and a sentence for each unreadable file on the way."""

    sample: Sample | None
    problems: tuple[str, ...] = ()


Transform = Callable[[Sample, np.random.Generator], Sample]
"""Gives a changed copy; every random choice comes from the generator."""
