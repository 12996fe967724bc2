"""Reading one image or LiDAR file, with a sentence for each way in which it can be broken."""

from __future__ import annotations

import functools
import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bevctl.errors import BevctlError, ExitCode

POINT_FEATURES = 5
"""float32 values a point in a nuScenes LiDAR file: x, y, z, intensity, ring."""
_POINT_BYTES = 4 * POINT_FEATURES
_JPEG_ENDS = (b"\xff\xd8", b"\xff\xd9")
"""The first and the last two bytes of a JPEG."""

ImageArray = NDArray[np.uint8]

logger = logging.getLogger(__name__)


def _unreadable(path: Path, reason: str) -> BevctlError:
    return BevctlError(
        f"{path} cannot be read: {reason}.",
        "Copy the file again, or remove its sample from the info file; `bevctl data check` counts such files.",
        ExitCode.RUN_FAILED,
    )


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image file that was read but not decoded, so that it can be decoded at the size that is needed."""

    path: Path
    data: bytes
    size: tuple[int, int]
    """(width, height)"""

    def decode(self, at_least: tuple[int, int] | None = None) -> Image.Image:
        """The RGB picture at full size; with `at_least` = (width, height) a JPEG at a half, a quarter or an eighth of
        it, where that is whole and no smaller.

        The smaller picture is the low frequencies of each block: a good low-pass filter at half the work. Raises
        BevctlError (exit 4) for a truncated file.
        """
        factor = 1 if at_least is None else _reduction(self.size, at_least)
        try:
            with Image.open(io.BytesIO(self.data)) as image:
                if factor > 1:
                    image.draft("RGB", (self.size[0] // factor, self.size[1] // factor))
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise _unreadable(self.path, str(error)) from None


def _reduction(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 and 1 that divides `size` and leaves `at_least`."""
    pairs = list(zip(size, at_least, strict=True))
    fitting = (f for f in (8, 4, 2) if all(side % f == 0 and side // f >= least for side, least in pairs))
    return next(fitting, 1)


def read_image_file(path: Path) -> ImageFile:
    """The file, its header read. Raises BevctlError (exit 4) for a missing or foreign file."""
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            return ImageFile(path, data, image.size)
    except UnidentifiedImageError:
        raise _unreadable(path, "not an image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None


def read_image(path: Path) -> ImageArray:
    """(H, W, 3) RGB. Raises BevctlError (exit 4) for a missing, truncated or foreign file."""
    return np.asarray(read_image_file(path).decode())


def read_points(path: Path) -> NDArray[np.float32]:
    """(P, 5) x, y, z (m, sensor frame), intensity 0..255, ring. Rows with a non-finite value are dropped, and logged.

    Raises BevctlError (exit 4) for a missing or empty file, or one whose size is not a whole number of points.
    """
    try:
        values = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if not _whole_points(len(values)):
        raise _unreadable(path, f"{len(values)} bytes are not a whole number of points of {_POINT_BYTES} bytes")
    points = values.view(np.float32).reshape(-1, POINT_FEATURES)
    finite = np.isfinite(points)
    if finite.all():
        return points
    finite = finite.all(axis=1)
    _report_dropped(path, int((~finite).sum()))
    return points[finite]


def _whole_points(size: int) -> bool:
    return size > 0 and size % _POINT_BYTES == 0


def points_are_whole(path: Path) -> bool:
    """Whether a file is as long as a whole number of points; it is not opened."""
    try:
        return _whole_points(path.stat().st_size)
    except OSError:
        return False


def image_is_whole(path: Path) -> bool:
    """Whether an image can be read: what begins and ends as a JPEG does is taken for one, any other file is decoded."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
            file.seek(-2, os.SEEK_END)
            if (start, file.read(2)) == _JPEG_ENDS:
                return True
        read_image(path)
    except (OSError, BevctlError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _report_dropped(path: Path, count: int) -> None:
    """Once a file and process, by the cache."""
    logger.warning("%s: %d points with non-finite values are left out.", path, count)
