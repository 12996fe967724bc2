"""Reading one image or LiDAR file, with a sentence for each way in which it can be broken."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bevctl.data.sample import ImageArray
from bevctl.errors import BevctlError, ExitCode

POINT_FEATURES = 5
"""float32 values a point in a nuScenes LiDAR file: x, y, z, intensity, ring."""

logger = logging.getLogger(__name__)


def _unreadable(path: Path, reason: str) -> BevctlError:
    return BevctlError(
        f"{path} cannot be read: {reason}.",
        "Copy the file again, or remove its sample from the info file; `bevctl data check` counts missing files.",
        ExitCode.RUN_FAILED,
    )


def read_image(path: Path) -> ImageArray:
    """(H, W, 3) RGB. Raises BevctlError (exit 4) for a missing, truncated or foreign file."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise _unreadable(path, "not an image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None


def read_points(path: Path) -> NDArray[np.float32]:
    """(P, 5) x, y, z (m, sensor frame), intensity 0..255, ring. Rows with a non-finite value are dropped, and logged.

    Raises BevctlError (exit 4) for a missing or empty file, or one whose size is not a whole number of points.
    """
    try:
        values = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    row_bytes = POINT_FEATURES * 4
    if len(values) == 0 or len(values) % row_bytes:
        raise _unreadable(path, f"{len(values)} bytes are not a whole number of points of {row_bytes} bytes")
    points = values.view(np.float32).reshape(-1, POINT_FEATURES)
    finite = np.isfinite(points).all(axis=1)
    if finite.all():
        return points
    _report_dropped(path, int((~finite).sum()))
    return points[finite]


@functools.lru_cache(maxsize=4096)
def _report_dropped(path: Path, count: int) -> None:
    """Once a file and process, by the cache."""
    logger.warning("%s: %d points with non-finite values are left out.", path, count)
