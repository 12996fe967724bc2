"""One sample as NumPy arrays: what the data set loads, transforms change, and the loader stacks into a `Batch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bevctl.data.files import ImageArray, ImageFile
from bevctl.geometry import Array


@dataclass(frozen=True, eq=False)
class Sample:
    """Frames and box rows as in `bevctl.batch`. A sensor that is not used is None."""

    token: str
    images: tuple[ImageArray, ...] | None
    """N × (H, W, 3) RGB; sizes may differ before augmentation. None while they are `encoded`."""
    points: NDArray[np.float32] | None
    """(P, 5) x, y, z, intensity, dt."""
    intrinsics: Array
    """(N, 4, 4) camera frame → source pixels."""
    camera2lidar: Array
    """(N, 4, 4) camera frame → LiDAR frame before augmentation."""
    image_aug: Array
    """(N, 4, 4) source pixels → pixels of `images`."""
    lidar_aug: Array
    """(4, 4) LiDAR frame → augmented LiDAR frame, in which `points`, `boxes` and `bev_map` are."""
    boxes: Array
    """(n, 9)"""
    labels: NDArray[np.int64]
    """(n,)"""
    has_boxes: bool
    bev_map: NDArray[np.uint8] | None = None
    """(K, X, Y) 0/1, or None where the sample has no map."""
    encoded: tuple[ImageArray | ImageFile, ...] = ()
    """N images, most of them not yet decoded, that the image augmentation turns into `images`."""


Transform = Callable[[Sample, np.random.Generator], Sample]
"""Gives a changed copy; every random choice comes from the generator."""
