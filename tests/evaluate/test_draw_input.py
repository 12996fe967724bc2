"""The picture of a sample as the model gets it: everything where the sample's matrices say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.data.sample import Sample
from bevctl.evaluate.canvas import class_color
from bevctl.evaluate.draw import BEV_SIDE, GAP, TITLE_HEIGHT, WIDTH
from bevctl.evaluate.draw_bev import MAP_COLORS, Ground, draw_bev
from bevctl.evaluate.draw_camera import DrawnBoxes
from bevctl.evaluate.draw_input import draw_input
from bevctl.geometry import invert_rigid, project_points, rigid, rotation_z, transform_boxes, transform_points
from tests.data.samples import FORWARD_CAMERA, intrinsics

SIZE = (256, 704)
TILE = ((WIDTH - 4 * GAP) // 3, round((WIDTH - 4 * GAP) // 3 * SIZE[0] / SIZE[1]))
GREY = 90
NOTHING = DrawnBoxes(np.zeros((0, 9)), ())
NO_POINTS = np.zeros((0, 5), np.float32)


@pytest.fixture(scope="module")
def config() -> Config:
    return load("bevfusion_multitask_fp16").config


def _sample(lidar_aug: np.ndarray, image_aug: np.ndarray) -> Sample:
    """A front camera of 704×256, a pedestrian 12 m ahead and one point on top of it."""
    box = np.array([[0.5, 12.0, -0.5, 0.8, 0.8, 1.8, 0.4, 0.0, 1.0]])
    point = np.array([[0.5, 12.0, 0.4]])
    moved = transform_points(lidar_aug, point)
    return Sample(
        token="a",
        images=(np.full((*SIZE, 3), GREY, np.uint8),),
        points=np.column_stack([moved, [[100.0, 0.0]]]).astype(np.float32),
        intrinsics=intrinsics(SIZE[1], SIZE[0])[None],
        camera2lidar=FORWARD_CAMERA[None],
        times=np.zeros(1),
        image_aug=image_aug[None],
        lidar_aug=lidar_aug,
        boxes=transform_boxes(lidar_aug, box),
        labels=np.array([8]),
        has_boxes=True,
    )


def _front_tile(picture: Image.Image) -> np.ndarray:
    left, top = 2 * GAP + TILE[0], TITLE_HEIGHT
    return np.asarray(picture.crop((left, top, left + TILE[0], top + TILE[1]))).astype(int)


MIRROR = np.array([[-1.0, 0, 0, SIZE[1]], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
SHIFT = np.array([[1.1, 0, 0, 60.0], [0, 1.1, 0, -20.0], [0, 0, 1, 0], [0, 0, 0, 1]])
TURNED = np.diag([1.1, -1.1, 1.1, 1.0]) @ rigid(rotation_z(0.6), [1.0, -2.0, 0.3])


@pytest.mark.parametrize("image_aug", [np.eye(4), MIRROR, SHIFT @ MIRROR])
@pytest.mark.parametrize("lidar_aug", [np.eye(4), TURNED])
def test_points_and_boxes_are_where_the_augmented_image_shows_them(
    config: Config, lidar_aug: np.ndarray, image_aug: np.ndarray
) -> None:
    sample = _sample(lidar_aug, image_aug)
    tile = _front_tile(draw_input("", sample, ("CAM_FRONT",), config))
    lidar2image = sample.intrinsics[0] @ invert_rigid(FORWARD_CAMERA)
    ((u, v),), _ = project_points(lidar2image, np.array([[0.5, 12.0, 0.4]]))
    column, row = (image_aug[:2, :2] @ [u, v] + image_aug[:2, 3]) * TILE[0] / SIZE[1]
    centre = tile[round(row) - 1 : round(row) + 2, round(column) - 1 : round(column) + 2].reshape(-1, 3)
    # a near point is yellow, its box red, and both lie on grey
    assert np.abs(centre - GREY).max() > 60
    red = np.abs(tile - class_color("pedestrian")).max(axis=2) < 50
    rows, columns = np.nonzero(red)
    assert columns.min() - 2 <= column <= columns.max() + 2
    assert rows.min() - 2 <= row <= rows.max() + 2
    assert np.ptp(columns) < 60
    assert np.ptp(rows) < 140


def test_earlier_images_show_boxes_where_they_were(config: Config) -> None:
    """A second earlier the car was two metres further back, and the pedestrian, who runs at 3 m/s, to the left."""
    now = _sample(np.eye(4), np.eye(4))
    assert now.images is not None
    now.boxes[0, 7:] = 3.0, 0.0
    back = rigid(np.eye(3), [0.0, -2.0, 0.0]) @ FORWARD_CAMERA
    both = dataclasses.replace(
        now,
        images=now.images * 2,
        points=None,
        intrinsics=np.repeat(now.intrinsics, 2, axis=0),
        camera2lidar=np.stack([FORWARD_CAMERA, back]),
        times=np.array([0.0, 1.0]),
        image_aug=np.repeat(now.image_aug, 2, axis=0),
    )
    picture = draw_input("", both, ("CAM_FRONT",), config)
    assert picture.height == draw_input("", now, ("CAM_FRONT",), config).height + 2 * (TILE[1] + GAP)
    left, top = 2 * GAP + TILE[0], TITLE_HEIGHT + 2 * (TILE[1] + GAP)
    tile = np.asarray(picture.crop((left, top, left + TILE[0], top + TILE[1]))).astype(int)
    rows, columns = np.nonzero(np.abs(tile - class_color("pedestrian")).max(axis=2) < 50)
    ((u, v),), _ = project_points(now.intrinsics[0] @ invert_rigid(back), np.array([[-2.5, 12.0, -0.5]]))
    assert (columns.min() + columns.max()) / 2 == pytest.approx(u * TILE[0] / SIZE[1], abs=3)
    assert rows.min() < v * TILE[0] / SIZE[1] < rows.max()
    assert np.ptp(columns) < 60


def test_what_a_sample_lacks_is_left_out(config: Config) -> None:
    sample = _sample(np.eye(4), np.eye(4))
    whole = draw_input("", sample, ("CAM_FRONT",), config)
    assert whole.width == WIDTH
    blind = draw_input("", dataclasses.replace(sample, images=None), (), config)
    assert blind.height == whole.height - 2 * (TILE[1] + GAP)
    mapped = dataclasses.replace(sample, points=None, bev_map=np.ones((6, 200, 200), np.uint8))
    assert draw_input("", mapped, ("CAM_FRONT",), config).height == whole.height + 30


def test_the_input_is_left_alone(config: Config) -> None:
    sample = _sample(np.eye(4), np.eye(4))
    assert sample.images is not None
    before = sample.images[0].copy()
    draw_input("", sample, ("CAM_FRONT",), config)
    np.testing.assert_array_equal(sample.images[0], before)


def test_the_map_lies_under_the_scene() -> None:
    """One cell of half a metre from x = 10 and y = -20 on; white where the map ends."""
    layers = np.zeros((1, 200, 200), np.uint8)
    layers[0, 120, 60] = 1
    ground = Ground(layers, ("stop_line",), (-50.0, 50.0, 0.5), (-50.0, 50.0, 0.5))
    side, reach = 1080, 54.0
    picture = np.asarray(draw_bev(NO_POINTS, NOTHING, NOTHING, side, reach, "", ground=ground)).astype(int)
    red = np.abs(picture - MAP_COLORS["stop_line"]).max(axis=2) < 30
    rows, columns = np.nonzero(red)
    assert columns.mean() == pytest.approx((10.25 + reach) * 10 - 0.5, abs=0.6)
    assert rows.mean() == pytest.approx((reach + 19.75) * 10 - 0.5, abs=0.6)
    assert red.sum() == pytest.approx(25, abs=8)


def test_motion_points_along_the_velocity() -> None:
    box = DrawnBoxes(np.array([[10.0, 0.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.0, 8.0]]), ("car",))
    unknown = DrawnBoxes(np.array([[10.0, 0.0, 0.0, 2.0, 1.0, 1.0, 0.0, np.nan, np.nan]]), ("car",))
    still, moving, nothing = (
        np.asarray(draw_bev(NO_POINTS, boxes, NOTHING, 540, 54.0, "", motion=motion)).astype(int)
        for boxes, motion in ((box, False), (box, True), (unknown, True))
    )
    rows, columns = np.nonzero(np.abs(moving - still).max(axis=2) > 40)
    assert columns.mean() == pytest.approx(320, abs=1)
    assert (rows.min(), rows.max()) == (pytest.approx(230, abs=2), pytest.approx(270, abs=6))
    np.testing.assert_array_equal(nothing, still)


def test_both_panels_show_the_box(config: Config) -> None:
    picture = np.asarray(draw_input("", _sample(np.eye(4), np.eye(4)), ("CAM_FRONT",), config)).astype(int)
    top = TITLE_HEIGHT + 2 * (TILE[1] + GAP)
    for column, reach in enumerate((54.0, 25.0)):
        left = GAP + column * (BEV_SIDE + GAP)
        x, y = (np.array([0.5, -12.0]) / (2 * reach) + 0.5) * BEV_SIDE
        area = picture[top + round(y) - 12 : top + round(y) + 12, left + round(x) - 12 : left + round(x) + 12]
        assert (np.abs(area - class_color("pedestrian")).max(axis=2) < 60).sum() > 8
