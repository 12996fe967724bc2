"""One camera image with 3D boxes drawn into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.evaluate.canvas import (
    FAINT,
    PAPER,
    SUPERSAMPLE,
    Color,
    Labels,
    class_color,
    clip_polygon,
    clip_segment,
    finish,
    font,
    new_panel,
    stroke,
)
from bevctl.geometry import Array, box_corners, transform_points

NEAR = 0.3
"""Distance in m in front of the camera at which boxes are cut off."""
FACES = ((0, 1, 2, 3), (4, 5, 6, 7), (0, 3, 7, 4), (1, 2, 6, 5), (0, 1, 5, 4), (3, 2, 6, 7))
FRONT = (0, 3, 7, 4)
EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))
_WHITE: Color = (255, 255, 255)
_SHADOW = (0, 0, 0, 110)


@dataclass(frozen=True)
class View:
    """A camera: its image and how it sees the LiDAR frame."""

    image: Image.Image
    """RGB."""
    intrinsics: NDArray[np.float64]
    """(3, 3) camera frame → pixels of `image`."""
    lidar2camera: NDArray[np.float64]
    """(4, 4)."""


@dataclass(frozen=True)
class DrawnBoxes:
    """Boxes to draw: LiDAR frame, as in `bevctl.batch`."""

    boxes: NDArray[np.floating]
    """(n, ≥ 7)."""
    names: tuple[str, ...]
    """Class of each."""
    scores: NDArray[np.floating] | None = None
    """(n,), of predictions."""

    def __len__(self) -> int:
        return len(self.names)


def draw_camera(
    view: View | None, title: str, predictions: DrawnBoxes, truth: DrawnBoxes, width: int, height: int
) -> Image.Image:
    """The camera's image at (width, height): predictions solid in their class's colour with the front face filled,
    ground truth dashed in white. Without a view: an empty panel that says so."""
    if view is None:
        panel = new_panel(width, height, (236, 238, 241))
        ImageDraw.Draw(panel).text(
            (panel.width / 2, panel.height / 2), "no image", fill=FAINT, font=font(16 * SUPERSAMPLE), anchor="mm"
        )
    else:
        panel = view.image.convert("RGBA").resize((width * SUPERSAMPLE, height * SUPERSAMPLE))
        projection = _enlarged(view, panel)
        layer = Image.new("RGBA", panel.size, (0, 0, 0, 0))
        draw = ImageDraw.Draw(layer)
        for corners in (transform_points(view.lidar2camera, c) for c in box_corners(truth.boxes)):
            _wireframe(draw, corners, projection, panel.size, (*_WHITE, 255), width=1.5, dash=(5, 3))
        labels = _draw_predictions(draw, view, predictions, projection, panel.size)
        panel.alpha_composite(layer)
        _write_labels(panel, labels)
    Labels(panel, 14).place(title, [(8.0, 8.0)], _WHITE, (20, 24, 30, 200))
    return finish(panel)


def _enlarged(view: View, panel: Image.Image) -> Array:
    """(3, 3) camera frame → pixels of the panel."""
    scale = np.diag([panel.width / view.image.width, panel.height / view.image.height, 1.0])
    projection: Array = scale @ view.intrinsics
    return projection


def _draw_predictions(
    draw: ImageDraw.ImageDraw, view: View, predictions: DrawnBoxes, projection: Array, size: tuple[int, int]
) -> list[tuple[float, str, Color, Array]]:
    """Draw far boxes first; returns (depth, text, colour, outline's top left) of each that is visible."""
    corners = [transform_points(view.lidar2camera, c) for c in box_corners(predictions.boxes)]
    order = sorted(range(len(corners)), key=lambda i: -corners[i][:, 2].mean())
    labels = []
    for i in order:
        color = class_color(predictions.names[i])
        front = _project_face(corners[i][list(FRONT)], projection, size)
        if len(front) >= 3:
            draw.polygon([tuple(p) for p in front], fill=(*color, 90))
        outline = _wireframe(draw, corners[i], projection, size, (*color, 255), width=1.8)
        if outline is not None:
            score = "" if predictions.scores is None else f" {predictions.scores[i]:.2f}"
            text = predictions.names[i].replace("_", " ") + score
            labels.append((float(corners[i][:, 2].mean()), text, color, outline))
    return labels


def _wireframe(
    draw: ImageDraw.ImageDraw,
    corners: Array,
    projection: Array,
    size: tuple[int, int],
    color: tuple[int, int, int, int],
    *,
    width: float,
    dash: tuple[float, float] | None = None,
) -> Array | None:
    """The twelve edges of a box given by its (8, 3) corners in the camera frame, cut at the near plane and the
    image's borders. Returns the (2, 2) extent of what was drawn, or None where nothing is visible."""
    segments = [s for a, b in EDGES if (s := _project_edge(corners[a], corners[b], projection, size)) is not None]
    for a, b in segments:
        stroke(draw, a, b, _SHADOW, width + 1.4)
    for a, b in segments:
        stroke(draw, a, b, color, width, dash)
    if not segments:
        return None
    points = np.concatenate([np.stack(s) for s in segments])
    return np.stack([points.min(axis=0), points.max(axis=0)])


def _project_edge(a: Array, b: Array, projection: Array, size: tuple[int, int]) -> tuple[Array, Array] | None:
    far = (np.inf, np.inf, np.inf)
    visible = clip_segment(a, b, (-np.inf, -np.inf, NEAR), far)
    if visible is None:
        return None
    start, stop = (_pixel(point, projection) for point in visible)
    return clip_segment(start, stop, (0.0, 0.0), size)


def _project_face(corners: Array, projection: Array, size: tuple[int, int]) -> Array:
    """Pixels (m, 2) of the visible part of a face given in the camera frame; m is 0 where nothing is."""
    face = clip_polygon(corners, (0.0, 0.0, 1.0), NEAR)
    if not len(face):
        return np.zeros((0, 2))
    pixels = np.array([_pixel(point, projection) for point in face])
    for normal, offset in (((1, 0), 0), ((-1, 0), -size[0]), ((0, 1), 0), ((0, -1), -size[1])):
        pixels = clip_polygon(pixels, normal, offset) if len(pixels) else pixels
    return pixels


def _pixel(point: Array, projection: Array) -> Array:
    homogeneous = projection @ point
    pixel: Array = homogeneous[:2] / homogeneous[2]
    return pixel


def _write_labels(panel: Image.Image, labels: list[tuple[float, str, Color, Array]]) -> None:
    """Name and score above or below each box, near ones first; a text covers neither another text nor another box."""
    title_area = (0.0, 0.0, 170.0 * SUPERSAMPLE, 30.0 * SUPERSAMPLE)
    outlines = [(*outline[0], *outline[1]) for _, _, _, outline in labels]
    placer = Labels(panel, 11, [title_area, *outlines])
    for _, text, color, ((left, top), (right, bottom)) in sorted(labels, key=lambda item: item[0]):
        width, height = placer.size_of(text)
        x = min(max((left + right - width) / 2, 0.0), panel.width - width)
        placer.place(text, [(x, top - height), (x, bottom)], PAPER, (*color, 225))
