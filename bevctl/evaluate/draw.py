"""A picture of one sample: six cameras, the scene from above, the map, and a legend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.evaluate.canvas import (
    CLASS_COLORS,
    FAINT,
    INK,
    PAPER,
    SUPERSAMPLE,
    TRUTH,
    class_color,
    finish,
    font,
    new_panel,
)
from bevctl.evaluate.draw_bev import ERROR_COLORS, MAP_COLORS, Ground, draw_bev, draw_map, draw_map_errors
from bevctl.evaluate.draw_camera import DrawnBoxes, View, draw_camera
from bevctl.evaluate.legend import LegendRow

GRID = (("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT"), ("CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"))
WIDTH = 1920
GAP = 8
TITLE_HEIGHT = 40
_CAMERA = ((WIDTH - 4 * GAP) // 3, 352)
BEV_SIDE = (WIDTH - 3 * GAP) // 2
NEAR_REACH = 25.0
"""Half side in m of the close-up that stands where a picture has no map."""


@dataclass(frozen=True)
class DrawnMap:
    """A predicted map, and the true one where there is one."""

    prediction: Ground
    truth: NDArray[np.integer | np.floating] | None
    """(K, X, Y) 0/1 of the same cells and classes."""


def draw_sample(
    title: str,
    views: Mapping[str, View],
    points: NDArray[np.floating],
    predictions: DrawnBoxes,
    truth: DrawnBoxes,
    *,
    reach: float = 54.0,
    bev_map: DrawnMap | None = None,
) -> Image.Image:
    """The whole picture, 1920 pixels wide.

    `views` by camera name (a missing one is left grey), `points` (P, ≥ 3) in the LiDAR frame, `reach` half the side of
    the view from above in m. Without `bev_map` a close-up takes the map's place. Nothing passed in is changed.
    """
    map_names = bev_map.prediction.names if bev_map else ()
    top = TITLE_HEIGHT + 2 * (_CAMERA[1] + GAP)
    picture = Image.new("RGB", (WIDTH, top + BEV_SIDE + 2 * GAP + _legend_height(map_names)), PAPER)
    picture.paste(title_bar(title), (0, 0))
    for row, cameras in enumerate(GRID):
        for column, camera in enumerate(cameras):
            label = camera.removeprefix("CAM_").replace("_", " ").lower()
            tile = draw_camera(views.get(camera), label, predictions, truth, *_CAMERA)
            picture.paste(tile, (GAP + column * (_CAMERA[0] + GAP), TITLE_HEIGHT + row * (_CAMERA[1] + GAP)))
    picture.paste(draw_bev(points, predictions, truth, BEV_SIDE, reach, f"±{reach:g} m"), (GAP, top))
    picture.paste(_right_panel(points, predictions, truth, bev_map), (2 * GAP + BEV_SIDE, top))
    picture.paste(_legend(predictions.names + truth.names, map_names), (0, top + BEV_SIDE + GAP))
    return picture


def title_bar(title: str) -> Image.Image:
    bar = new_panel(WIDTH, TITLE_HEIGHT)
    ImageDraw.Draw(bar).text(
        (GAP * SUPERSAMPLE, bar.height / 2), title, fill=INK, font=font(18 * SUPERSAMPLE), anchor="lm"
    )
    return finish(bar)


def _right_panel(
    points: NDArray[np.floating], predictions: DrawnBoxes, truth: DrawnBoxes, bev_map: DrawnMap | None
) -> Image.Image:
    if bev_map is None:
        return draw_bev(points, predictions, truth, BEV_SIDE, NEAR_REACH, f"close-up, ±{NEAR_REACH:g} m")
    panel = Image.new("RGB", (BEV_SIDE, BEV_SIDE), PAPER)
    side = (BEV_SIDE - GAP) // 2
    panel.paste(draw_map(bev_map.prediction, side, "map, predicted"), (0, 0))
    if bev_map.truth is not None:
        truth_map = dataclasses.replace(bev_map.prediction, layers=bev_map.truth)
        panel.paste(draw_map(truth_map, side, "map, ground truth"), (side + GAP, 0))
        errors = draw_map_errors(bev_map.prediction, bev_map.truth, side, "map, errors")
        panel.paste(errors, (side + GAP, side + GAP))
    near = draw_bev(points, predictions, truth, side, NEAR_REACH, f"close-up, ±{NEAR_REACH:g} m")
    panel.paste(near, (0, side + GAP))
    return panel


def _legend_height(map_names: Sequence[str]) -> int:
    return 94 if map_names else 64


def _legend(names: Sequence[str], map_names: Sequence[str]) -> Image.Image:
    """Line styles and the height scale above, then the classes that occur, then the map."""
    bar = new_panel(WIDTH, _legend_height(map_names))
    styles = LegendRow(bar, 16)
    styles.line("prediction", class_color("car"), 1.8, None)
    styles.line("ground truth (white in the images)", TRUTH, 1.0, (3, 2))
    styles.text("filled face, tick: front", FAINT)
    styles.text("numbers: scores", FAINT)
    styles.scale("height of points")
    classes = LegendRow(bar, 46)
    for name in [name for name in CLASS_COLORS if name in names]:
        classes.swatch(name, class_color(name))
    maps = LegendRow(bar, 76)
    for name in [name for name in MAP_COLORS if name in map_names]:
        maps.swatch(name, MAP_COLORS[name])
    for name, color in ERROR_COLORS.items() if map_names else ():
        maps.swatch(name, color)
    return finish(bar)
