"""The scene from above: LiDAR points, predicted and annotated boxes, and map classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.evaluate.canvas import (
    FAINT,
    INK,
    SUPERSAMPLE,
    TRUTH,
    Box,
    Color,
    Labels,
    class_color,
    finish,
    new_panel,
    stroke,
)
from bevctl.evaluate.draw_camera import DrawnBoxes
from bevctl.geometry import Array, box_corners

HEIGHTS = (-2.5, 3.0)
"""Heights in m (LiDAR frame) at the two ends of the colour scale."""
_HEIGHT_COLORS = np.array(
    [[68, 30, 110], [62, 76, 148], [40, 118, 152], [32, 150, 130], [96, 170, 70], [190, 160, 30]], dtype=np.float64
)
_RING: Color = (203, 208, 214)
MAP_COLORS: dict[str, Color] = {
    "drivable_area": (214, 219, 226),
    "carpark_area": (172, 203, 235),
    "walkway": (244, 206, 158),
    "ped_crossing": (122, 196, 140),
    "stop_line": (228, 78, 52),
    "divider": (92, 62, 170),
    "vehicle": (44, 110, 178),
}
"""In the order of painting: areas first, thin things on top."""
ERROR_COLORS: dict[str, Color] = {
    "map right": (226, 230, 235),
    "map wrong": (240, 150, 40),
    "map missed": (196, 38, 110),
}


@dataclass(frozen=True)
class Ground:
    """Map classes under the scene."""

    layers: NDArray[np.integer | np.floating]
    """(K, X, Y), painted from 0.5."""
    names: tuple[str, ...]
    xbound: tuple[float, float, float]
    """Lower end, upper end and cell in x, m."""
    ybound: tuple[float, float, float]

    @property
    def reach(self) -> float:
        """How far it reaches from the LiDAR along x or y, m."""
        return max(map(abs, (*self.xbound[:2], *self.ybound[:2])))


class Plane:
    """From metres in the LiDAR frame to pixels of an enlarged square panel: x to the right, y (forward) upwards."""

    def __init__(self, side: int, reach: float) -> None:
        self.side = side * SUPERSAMPLE
        self.reach = reach
        self.scale = self.side / (2 * reach)

    def pixels(self, points: NDArray[np.floating]) -> Array:
        """(n, 2) pixels of (n, ≥ 2) points."""
        xy = np.asarray(points, dtype=np.float64)[:, :2]
        return self.side / 2 + xy * self.scale * np.array([1.0, -1.0])


def height_colors(height: NDArray[np.floating]) -> NDArray[np.uint8]:
    """(n, 3) colours of heights in m."""
    low, high = HEIGHTS
    place = np.clip((np.asarray(height) - low) / (high - low), 0, 1) * (len(_HEIGHT_COLORS) - 1)
    steps = np.arange(len(_HEIGHT_COLORS))
    return np.stack([np.interp(place, steps, channel) for channel in _HEIGHT_COLORS.T], axis=1).astype(np.uint8)


def draw_bev(
    points: NDArray[np.floating],
    predictions: DrawnBoxes,
    truth: DrawnBoxes,
    side: int,
    reach: float,
    title: str,
    *,
    ground: Ground | None = None,
    motion: bool = False,
) -> Image.Image:
    """A square of ± `reach` m around the LiDAR: `points` (P, ≥ 3) coloured by height, ground truth dashed and hollow,
    predictions solid with their score and a tick to the front, range rings.

    `ground` is painted below; with `motion` a line leads from each prediction to where its centre is in one second.
    """
    plane = Plane(side, reach)
    panel = new_panel(side, side)
    if ground is not None:
        panel.paste(_laid_out(_painted(ground.layers, ground.names), ground, plane))
    _draw_points(panel, plane, points)
    layer = Image.new("RGBA", panel.size, (255, 255, 255, 0))
    draw = ImageDraw.Draw(layer)
    rings = _draw_rings(draw, plane)
    _draw_ego(draw, plane)
    shown = _inside(predictions, reach)
    for corners in box_corners(predictions.boxes[shown])[:, :4]:
        _outline(draw, plane.pixels(corners), (255, 255, 255, 170), 4.0)
    for i in shown[::-1]:
        _draw_prediction(draw, plane, box_corners(predictions.boxes[i : i + 1])[0], class_color(predictions.names[i]))
    if motion:
        _draw_motion(draw, plane, predictions.boxes[shown])
    for i in _inside(truth, reach):
        _draw_truth(draw, plane, box_corners(truth.boxes[i : i + 1])[0])
    panel.alpha_composite(layer)
    _write_texts(panel, plane, rings, predictions, shown, title)
    ImageDraw.Draw(panel).rectangle((0, 0, panel.width - 1, panel.height - 1), outline=_RING, width=SUPERSAMPLE)
    return finish(panel)


def _inside(boxes: DrawnBoxes, reach: float) -> NDArray[np.intp]:
    """Indices of the boxes whose centre is in the panel."""
    return np.flatnonzero((np.abs(boxes.boxes[:, :2]) < reach).all(axis=1))


def _laid_out(painted: NDArray[np.uint8], ground: Ground, plane: Plane) -> Image.Image:
    """(X, Y, 3) colours of the cells of `ground` at each pixel of the panel; white beyond them."""
    middles = (np.arange(plane.side) + 0.5) / plane.scale - plane.reach
    x, y = (np.floor((middles - low) / cell).astype(np.int64) for low, _, cell in (ground.xbound, ground.ybound))
    x, y = x[None, :], y[::-1, None]
    inside = (x >= 0) & (x < painted.shape[0]) & (y >= 0) & (y < painted.shape[1])
    colors = painted[np.clip(x, 0, painted.shape[0] - 1), np.clip(y, 0, painted.shape[1] - 1)]
    return Image.fromarray(np.where(inside[..., None], colors, np.uint8(255)))


def _draw_motion(draw: ImageDraw.ImageDraw, plane: Plane, boxes: Array) -> None:
    """A line from each centre along the velocity, one second long; none where it is unknown."""
    moving = boxes[np.isfinite(boxes[:, 7:9]).all(axis=1)]
    for start, stop in zip(plane.pixels(moving), plane.pixels(moving[:, :2] + moving[:, 7:9]), strict=True):
        stroke(draw, start, stop, (*INK, 255), 1.2)


def _draw_points(panel: Image.Image, plane: Plane, points: NDArray[np.floating]) -> None:
    """Each point a square of about 12 cm, at least one finished pixel; high ones cover low ones."""
    points = points[np.argsort(points[:, 2], kind="stable")]
    pixels = np.floor(plane.pixels(points)).astype(np.int64)
    colors = height_colors(points[:, 2])
    canvas = np.array(panel)
    side = max(SUPERSAMPLE, round(0.12 * plane.scale))
    for dx in range(side):
        for dy in range(side):
            x, y = pixels[:, 0] + dx, pixels[:, 1] + dy
            seen = (x >= 0) & (x < plane.side) & (y >= 0) & (y < plane.side)
            canvas[y[seen], x[seen], :3] = colors[seen]
    panel.paste(Image.fromarray(canvas))


def _draw_rings(draw: ImageDraw.ImageDraw, plane: Plane) -> list[tuple[int, float, float]]:
    """Range rings; returns (metres, x, y) of where each may be labelled."""
    step = 10 if plane.reach > 30 else 5
    centre, labels = plane.side / 2, []
    for radius in range(step, int(plane.reach) + 1, step):
        r = radius * plane.scale
        draw.ellipse((centre - r, centre - r, centre + r, centre + r), outline=(*_RING, 255), width=SUPERSAMPLE)
        labels.append((radius, centre + r * np.cos(np.pi / 4), centre - r * np.sin(np.pi / 4)))
    return labels


def _draw_ego(draw: ImageDraw.ImageDraw, plane: Plane) -> None:
    """An arrowhead at the LiDAR that points forward."""
    shape = np.array([[0.0, 2.2], [1.0, -1.6], [0.0, -0.8], [-1.0, -1.6]])
    draw.polygon([tuple(p) for p in plane.pixels(shape)], fill=(*INK, 255))


def _outline(
    draw: ImageDraw.ImageDraw,
    corners: Array,
    color: tuple[int, int, int, int],
    width: float,
    dash: tuple[float, float] | None = None,
) -> None:
    for i in range(4):
        stroke(draw, corners[i], corners[(i + 1) % 4], color, width, dash)


def _draw_prediction(draw: ImageDraw.ImageDraw, plane: Plane, corners: Array, color: Color) -> None:
    pixels = plane.pixels(corners[:4])
    draw.polygon([tuple(p) for p in pixels], fill=(*color, 60))
    _outline(draw, pixels, (*color, 255), 1.8)
    _draw_heading(draw, pixels, (*color, 255), 1.8)


def _draw_truth(draw: ImageDraw.ImageDraw, plane: Plane, corners: Array) -> None:
    pixels = plane.pixels(corners[:4])
    _outline(draw, pixels, (*TRUTH, 255), 1.0, dash=(3, 2))
    _draw_heading(draw, pixels, (*TRUTH, 255), 1.0)


def _draw_heading(draw: ImageDraw.ImageDraw, corners: Array, color: tuple[int, int, int, int], width: float) -> None:
    """A tick from the middle of the front edge (corners 0 and 3) forward, of 4 to 10 pixels."""
    front, back = corners[[0, 3]].mean(axis=0), corners[[1, 2]].mean(axis=0)
    length = max(float(np.linalg.norm(front - back)), 1e-6)
    tick = (front - back) / length * np.clip(0.4 * length, 4.0 * SUPERSAMPLE, 10.0 * SUPERSAMPLE)
    stroke(draw, front, front + tick, color, width)


def _write_texts(
    panel: Image.Image,
    plane: Plane,
    rings: Sequence[tuple[int, float, float]],
    predictions: DrawnBoxes,
    shown: NDArray[np.intp],
    title: str,
) -> None:
    """Title, ring labels and scores; a score goes beside its box, where no box and no text is."""
    footprints = [_extent(plane.pixels(c[:4])) for c in box_corners(predictions.boxes[shown])]
    titles = Labels(panel, 14)
    titles.place(title, [(8.0, 8.0)], INK, (255, 255, 255, 225))
    placer = Labels(panel, 11, footprints + titles.taken)
    for metres, x, y in rings:
        width, height = placer.size_of(f"{metres} m")
        placer.place(f"{metres} m", [(x - width / 2, y - height / 2)], FAINT, (255, 255, 255, 210))
    if predictions.scores is None:
        return
    for i, area in zip(shown, footprints, strict=True):
        text = f"{predictions.scores[i]:.2f}"
        anchors = _around(area, *placer.size_of(text))
        placer.place(text, anchors, class_color(predictions.names[i]), (255, 255, 255, 190))


def _extent(pixels: Array) -> Box:
    (left, top), (right, bottom) = pixels.min(axis=0), pixels.max(axis=0)
    return float(left), float(top), float(right), float(bottom)


def _around(area: Box, width: float, height: float) -> list[tuple[float, float]]:
    """Where a text of this size fits beside an area: right, left, above, below."""
    left, top, right, bottom = area
    middle_x, middle_y, gap = (left + right - width) / 2, (top + bottom - height) / 2, 1.0 * SUPERSAMPLE
    return [
        (right + gap, middle_y),
        (left - width - gap, middle_y),
        (middle_x, top - height - gap),
        (middle_x, bottom + gap),
    ]


def draw_map(ground: Ground, side: int, title: str) -> Image.Image:
    """Map classes, a cell painted where its value is at least 0.5, seen as in `draw_bev`."""
    return _map_panel(_painted(ground.layers, ground.names), ground, side, title)


def _painted(layers: NDArray[np.integer | np.floating], names: Sequence[str]) -> NDArray[np.uint8]:
    """(X, Y, 3) colours of the classes, thin things on top."""
    painted = np.full((*layers.shape[1:], 3), 255, dtype=np.uint8)
    for name, color in MAP_COLORS.items():
        if name in names:
            painted[layers[list(names).index(name)] >= 0.5] = color
    return painted


def draw_map_errors(prediction: Ground, truth: NDArray[np.integer | np.floating], side: int, title: str) -> Image.Image:
    """Where a predicted map and the true layers (K, X, Y) differ in any class: missed cells over wrong ones over those
    that agree."""
    seen, real = prediction.layers >= 0.5, truth >= 0.5
    painted = np.full((*truth.shape[1:], 3), 255, dtype=np.uint8)
    for color, cells in zip(ERROR_COLORS.values(), (seen & real, seen & ~real, real & ~seen), strict=True):
        painted[cells.any(axis=0)] = color
    return _map_panel(painted, prediction, side, title)


def _map_panel(painted: NDArray[np.uint8], ground: Ground, side: int, title: str) -> Image.Image:
    """(X, Y, 3) colours of the cells of `ground`, with x to the right and y upwards."""
    plane = Plane(side, ground.reach)
    panel = _laid_out(painted, ground, plane).convert("RGBA")
    _draw_ego(ImageDraw.Draw(panel), plane)
    Labels(panel, 14).place(title, [(8.0, 8.0)], INK, (255, 255, 255, 225))
    ImageDraw.Draw(panel).rectangle((0, 0, panel.width - 1, panel.height - 1), outline=_RING, width=SUPERSAMPLE)
    return finish(panel)
