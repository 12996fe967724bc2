"""A picture of one sample as the model gets it: augmented images and point cloud, the boxes and the map to learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bevctl.config.schema import Config
from bevctl.data.sample import Sample
from bevctl.evaluate.canvas import CLASS_COLORS, FAINT, PAPER, class_color, finish, new_panel
from bevctl.evaluate.draw import BEV_SIDE, GAP, GRID, NEAR_REACH, TITLE_HEIGHT, WIDTH, title_bar
from bevctl.evaluate.draw_bev import HEIGHTS, MAP_COLORS, Ground, draw_bev, height_colors
from bevctl.evaluate.draw_camera import NEAR, DrawnBoxes, View, draw_camera
from bevctl.evaluate.legend import LegendRow
from bevctl.geometry import invert_rigid, project_points

_TILE = (WIDTH - 4 * GAP) // 3
_NOTHING = DrawnBoxes(np.zeros((0, 9)), ())
_ENLARGED = 2
"""Images are small: so much larger, points and boxes cover less of them."""
_DOT = 3
"""Side of a point in the enlarged image, pixels."""
_FAR = 50.0
"""Distance in m at which the colours of points in images end."""


def draw_input(title: str, sample: Sample, cameras: Sequence[str], config: Config) -> Image.Image:
    """1920 pixels wide: the images of `cameras` with boxes and the points of the keyframe, those of an earlier moment
    where the sample has them, then the scene from above twice, over the map: the whole range and a close-up.

    Everything is where the sample's matrices say. In earlier images, boxes are moved back by their velocity, points are
    not: those on what stood still fit, and show that the motion of the car is right.
    """
    names = tuple(config.data.classes[label] for label in sample.labels)
    boxes = DrawnBoxes(sample.boxes, names)
    top = TITLE_HEIGHT
    firsts = range(0, len(sample.images or ()), max(1, len(cameras)))
    tiles = _stacked([_moment(sample, cameras, first, boxes) for first in firsts])
    ground = _ground(sample, config)
    legend = _legend(names, ground.names if ground else (), _about_images(sample, len(firsts)))
    picture = Image.new("RGB", (WIDTH, top + tiles.height + BEV_SIDE + 2 * GAP + legend.height), PAPER)
    picture.paste(title_bar(title), (0, 0))
    picture.paste(tiles, (0, top))
    points = np.zeros((0, 5), np.float32) if sample.points is None else sample.points
    limits = config.model.point_cloud_range
    whole = max(abs(bound) for bound in (*limits[:2], *limits[3:5]))
    for column, reach in enumerate((whole, NEAR_REACH)):
        panel = draw_bev(points, boxes, _NOTHING, BEV_SIDE, reach, f"±{reach:g} m", ground=ground, motion=True)
        picture.paste(panel, (GAP + column * (BEV_SIDE + GAP), top + tiles.height))
    picture.paste(legend, (0, picture.height - legend.height))
    return picture


def _moment(sample: Sample, cameras: Sequence[str], first: int, boxes: DrawnBoxes) -> Image.Image:
    """The views of one moment, from number `first` on."""
    views = {name: _view(sample, first + place) for place, name in enumerate(cameras)}
    if first == 0:
        return _camera_rows(views, dict.fromkeys(cameras, boxes), {})
    ages = dict(zip(cameras, sample.times[first:], strict=False))
    moved = {name: dataclasses.replace(boxes, boxes=_back(boxes.boxes, age)) for name, age in ages.items()}
    return _camera_rows(views, moved, {name: f", {age:.2f} s earlier" for name, age in ages.items()})


def _back(boxes: NDArray[np.floating], age: float) -> NDArray[np.floating]:
    """(n, 9) boxes where they were `age` s before, as far as their velocity is known."""
    earlier = boxes.copy()
    earlier[:, :2] -= age * np.nan_to_num(boxes[:, 7:9])
    return earlier


def _stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Below each other."""
    whole = Image.new("RGB", (WIDTH, sum(picture.height for picture in pictures)), PAPER)
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    return whole


def _view(sample: Sample, index: int) -> View:
    """An image with the keyframe's points, and the camera that would have taken it of the augmented scene."""
    assert sample.images is not None
    turned = np.eye(3)
    turned[:2, :2], turned[:2, 2] = sample.image_aug[index, :2, :2], sample.image_aug[index, :2, 3]
    lidar2camera = invert_rigid(sample.camera2lidar[index]) @ np.linalg.inv(sample.lidar_aug)
    intrinsics = np.diag([_ENLARGED, _ENLARGED, 1.0]) @ turned @ sample.intrinsics[index, :3, :3]
    image = Image.fromarray(sample.images[index])
    large = image.resize((image.width * _ENLARGED, image.height * _ENLARGED), Image.Resampling.BICUBIC)
    view = View(large, intrinsics, lidar2camera)
    return view if sample.points is None else _with_points(view, sample.points[sample.points[:, 4] == 0])


def _with_points(view: View, points: NDArray[np.float32]) -> View:
    """The view with (P, ≥ 3) points painted into its image, coloured by distance, near ones on top."""
    lidar2image = np.eye(4)
    lidar2image[:3] = view.intrinsics @ view.lidar2camera[:3]
    pixels, depth = project_points(lidar2image, points[:, :3])
    order = np.argsort(-depth, kind="stable")
    order = order[depth[order] > NEAR]
    colors = height_colors(np.interp(depth[order], (0.0, _FAR), HEIGHTS[::-1]))
    corner = np.floor(pixels[order] - (_DOT - 1) / 2).astype(np.int64)
    canvas = np.array(view.image)
    for shift in np.ndindex(_DOT, _DOT):
        columns, rows = (corner + shift).T
        seen = (columns >= 0) & (columns < view.image.width) & (rows >= 0) & (rows < view.image.height)
        canvas[rows[seen], columns[seen]] = colors[seen]
    return dataclasses.replace(view, image=Image.fromarray(canvas))


def _camera_rows(views: Mapping[str, View], boxes: Mapping[str, DrawnBoxes], told: Mapping[str, str]) -> Image.Image:
    """Two rows of three tiles that keep the images' shape; `told` goes behind the name of each camera."""
    first = next(iter(views.values())).image
    height = round(_TILE * first.height / first.width)
    panel = Image.new("RGB", (WIDTH, 2 * (height + GAP)), PAPER)
    for row, names in enumerate(GRID):
        for column, name in enumerate(names):
            label = name.removeprefix("CAM_").replace("_", " ").lower() + told.get(name, "")
            tile = draw_camera(views.get(name), label, boxes.get(name, _NOTHING), _NOTHING, _TILE, height)
            panel.paste(tile, (GAP + column * (_TILE + GAP), row * (height + GAP)))
    return panel


def _ground(sample: Sample, config: Config) -> Ground | None:
    head = config.model.map
    if head is None or sample.bev_map is None:
        return None
    return Ground(sample.bev_map, config.data.map_classes, head.xbound, head.ybound)


def _about_images(sample: Sample, moments: int) -> Iterator[str]:
    if moments and sample.points is not None:
        yield "in images: points of the keyframe, near yellow, far violet"
    if moments > 1:
        yield "earlier images: boxes moved back by their velocity"


def _legend(names: Sequence[str], map_names: Sequence[str], about_images: Iterable[str]) -> Image.Image:
    bar = new_panel(WIDTH, 94 if map_names else 64)
    styles = LegendRow(bar, 16)
    styles.line("annotated box; filled face, tick: front", class_color("car"), 1.8, None)
    styles.text("line: way of one second", FAINT)
    styles.scale("height of points")
    for text in about_images:
        styles.text(text, FAINT)
    classes = LegendRow(bar, 46)
    for name in [name for name in CLASS_COLORS if name in names]:
        classes.swatch(name, class_color(name))
    maps = LegendRow(bar, 76)
    for name in [name for name in MAP_COLORS if name in map_names]:
        maps.swatch(name, MAP_COLORS[name])
    return finish(bar)
