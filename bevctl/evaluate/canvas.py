"""Drawing primitives that every panel of a picture shares: colours, strokes, clipping, labels that don't overlap.

Panels are drawn at `SUPERSAMPLE` times their size and reduced at the end, which is what smooths their edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from bevctl.geometry import Array

SUPERSAMPLE = 2
Color = tuple[int, int, int]
Box = tuple[float, float, float, float]

INK: Color = (38, 43, 51)
FAINT: Color = (120, 128, 138)
PAPER: Color = (255, 255, 255)
TRUTH: Color = (20, 24, 30)
CLASS_COLORS: dict[str, Color] = {
    "car": (33, 118, 214),
    "truck": (132, 60, 178),
    "construction_vehicle": (176, 124, 8),
    "bus": (235, 108, 20),
    "trailer": (0, 146, 136),
    "barrier": (120, 84, 70),
    "motorcycle": (232, 62, 148),
    "bicycle": (30, 158, 75),
    "pedestrian": (214, 40, 44),
    "traffic_cone": (136, 150, 0),
}


def class_color(name: str) -> Color:
    """Colour of an object class; grey for one outside nuScenes' ten."""
    return CLASS_COLORS.get(name, FAINT)


@lru_cache(maxsize=16)
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, so that a picture doesn't depend on what a machine has installed."""
    return ImageFont.load_default(size=size)


def new_panel(width: int, height: int, background: Color = PAPER) -> Image.Image:
    """An enlarged RGBA panel that `finish` brings to (width, height)."""
    return Image.new("RGBA", (width * SUPERSAMPLE, height * SUPERSAMPLE), (*background, 255))


def finish(panel: Image.Image) -> Image.Image:
    """The panel at its real size, RGB."""
    size = (panel.width // SUPERSAMPLE, panel.height // SUPERSAMPLE)
    return panel.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def clip_polygon(points: ArrayLike, normal: ArrayLike, offset: float) -> Array:
    """The part of a closed polygon (n, d) where `points @ normal ≥ offset` (Sutherland-Hodgman); maybe empty."""
    p = np.asarray(points, dtype=np.float64)
    height = p @ np.asarray(normal, dtype=np.float64) - offset
    kept: list[NDArray[np.float64]] = []
    for i in range(len(p)):
        j = (i + 1) % len(p)
        if height[i] >= 0:
            kept.append(p[i])
        if (height[i] >= 0) != (height[j] >= 0):
            share = height[i] / (height[i] - height[j])
            kept.append(p[i] + share * (p[j] - p[i]))
    return np.array(kept).reshape(-1, p.shape[1])


def clip_segment(a: Array, b: Array, low: Sequence[float], high: Sequence[float]) -> tuple[Array, Array] | None:
    """The part of the segment a-b inside the axis-aligned box low..high (Liang-Barsky), or None."""
    start, stop = 0.0, 1.0
    step = b - a
    for axis in range(len(a)):
        for bound, sign in ((low[axis], -1.0), (high[axis], 1.0)):
            gap, slope = sign * (bound - a[axis]), sign * step[axis]
            if slope == 0:
                if gap < 0:
                    return None
            elif slope > 0:
                stop = min(stop, gap / slope)
            else:
                start = max(start, gap / slope)
    return (a + start * step, a + stop * step) if start <= stop else None


def stroke(
    draw: ImageDraw.ImageDraw,
    a: ArrayLike,
    b: ArrayLike,
    color: tuple[int, ...],
    width: float,
    dash: tuple[float, float] | None = None,
) -> None:
    """A line from a to b; `width` and `dash` (on, off) are in pixels of the finished picture."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    thickness = max(1, round(width * SUPERSAMPLE))
    if dash is None:
        draw.line([tuple(a), tuple(b)], fill=color, width=thickness)
        return
    length = float(np.linalg.norm(b - a))
    on, off = dash[0] * SUPERSAMPLE, dash[1] * SUPERSAMPLE
    for start in np.arange(0.0, length, on + off):
        ends = a + (b - a) * (np.array([start, min(start + on, length)]) / length)[:, None]
        draw.line([tuple(ends[0]), tuple(ends[1])], fill=color, width=thickness)


class Labels:
    """Places short texts where no earlier one is; what finds no room is left out."""

    def __init__(self, panel: Image.Image, size: int, occupied: Iterable[Box] = ()) -> None:
        self.panel = panel
        self.draw = ImageDraw.Draw(panel)
        self.font = font(size * SUPERSAMPLE)
        self.taken: list[Box] = list(occupied)

    def place(
        self,
        text: str,
        anchors: Iterable[tuple[float, float]],
        color: Color,
        background: tuple[int, int, int, int] | None = None,
    ) -> bool:
        """Write `text` with its top left at the first of `anchors` (enlarged pixels) that is free and in the panel.

        An anchor may leave room for the text by `size_of`. Returns whether the text was written.
        """
        pad = 2.0 * SUPERSAMPLE
        left, top, right, bottom = self.draw.textbbox((0, 0), text, font=self.font)
        for x, y in anchors:
            area = (x, y, x + right - left + 2 * pad, y + bottom - top + 2 * pad)
            if self._is_free(area):
                self.taken.append(area)
                if background is not None:
                    self.draw.rounded_rectangle(area, radius=2 * SUPERSAMPLE, fill=background)
                self.draw.text((x + pad - left, y + pad - top), text, fill=color, font=self.font)
                return True
        return False

    def size_of(self, text: str) -> tuple[float, float]:
        """Width and height of a placed text in enlarged pixels, padding included."""
        left, top, right, bottom = self.draw.textbbox((0, 0), text, font=self.font)
        return right - left + 4.0 * SUPERSAMPLE, bottom - top + 4.0 * SUPERSAMPLE

    def _is_free(self, area: Box) -> bool:
        if area[0] < 0 or area[1] < 0 or area[2] > self.panel.width or area[3] > self.panel.height:
            return False
        return not any(
            area[0] < other[2] and other[0] < area[2] and area[1] < other[3] and other[1] < area[3]
            for other in self.taken
        )
