"""Pictures: that things are drawn where they are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bevctl.evaluate.canvas import INK, SUPERSAMPLE, Labels, class_color, clip_polygon, clip_segment, new_panel
from bevctl.evaluate.draw import WIDTH, DrawnMap, draw_sample
from bevctl.evaluate.draw_bev import (
    ERROR_COLORS,
    MAP_COLORS,
    Ground,
    Plane,
    draw_bev,
    draw_map,
    draw_map_errors,
    height_colors,
)
from bevctl.evaluate.draw_camera import DrawnBoxes, View, draw_camera

NOTHING = DrawnBoxes(np.zeros((0, 9)), (), np.zeros(0))
NO_POINTS = np.zeros((0, 5), np.float32)
# LiDAR x right, y forward, z up to a camera that looks along y: x right, y down, z forward.
FORWARD = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
INTRINSICS = np.array([[400.0, 0, 320], [0, 400, 180], [0, 0, 1]])
GREY = (90, 90, 90)
TENS = (-50.0, 50.0, 10.0)


def view() -> View:
    return View(Image.new("RGB", (640, 360), GREY), INTRINSICS, FORWARD)


def one(x: float, y: float, z: float = 0.0, name: str = "car", yaw: float = 0.0) -> DrawnBoxes:
    """A box of 4 × 2 × 2 m."""
    return DrawnBoxes(np.array([[x, y, z, 4.0, 2.0, 2.0, yaw, 0.0, 0.0]]), (name,), np.array([0.8]))


def is_near(pixel: object, color: tuple[int, ...], tolerance: int = 60) -> bool:
    return bool(np.abs(np.asarray(pixel, dtype=int) - color).max() <= tolerance)


def test_an_edge_is_coloured_where_it_projects() -> None:
    picture = draw_camera(view(), "", one(0, 12), NOTHING, 640, 360)
    # The near face lies 11 m ahead; its lower left corner is at x = -2, z = -1.
    left, bottom, top = 320 - 400 * 2 / 11, 180 + 400 / 11, 180 - 400 / 11
    assert is_near(picture.getpixel((round(left), 180)), class_color("car"))
    assert is_near(picture.getpixel((300, round(bottom))), class_color("car"))
    assert is_near(picture.getpixel((300, round(top))), class_color("car"))
    assert picture.getpixel((round(left) - 12, 180)) == GREY
    assert picture.getpixel((300, round(bottom) + 6)) == GREY


def test_the_front_face_is_tinted_and_the_back_is_not() -> None:
    # Heading to the camera's left: the front face is the left one, seen at a slant from the right of it.
    picture = draw_camera(view(), "", one(6, 12, yaw=np.pi), NOTHING, 640, 360)
    slant = (320 + 400 * 4 / 12, 180)
    right = (320 + 400 * 7.5 / 11, 180)
    tinted, clear = picture.getpixel((round(slant[0]), slant[1])), picture.getpixel((round(right[0]), right[1]))
    assert not is_near(tinted, GREY, 10)
    assert is_near(clear, GREY, 5)


@pytest.mark.parametrize("place", [(0, -12, 0), (0, -2.5, 0), (60, 12, 0), (0, 12, 40)])
def test_nothing_is_drawn_for_a_box_out_of_sight(place: tuple[float, float, float]) -> None:
    empty = np.asarray(draw_camera(view(), "", NOTHING, NOTHING, 640, 360))
    boxes = one(*place)
    np.testing.assert_array_equal(np.asarray(draw_camera(view(), "", boxes, boxes, 640, 360)), empty)


def test_a_box_around_the_camera_is_cut_at_the_near_plane() -> None:
    picture = np.asarray(draw_camera(view(), "", one(1.8, 0, yaw=np.pi / 2), NOTHING, 640, 360))
    changed = (picture != GREY).any(axis=2)[40:]  # below the title
    assert changed.any()
    # The box reaches from x = 0.8 m to the right: nothing of it can be left of the middle.
    assert not changed[:, :318].any()


def test_ground_truth_is_dashed_white() -> None:
    picture = np.asarray(draw_camera(view(), "", NOTHING, one(0, 12), 640, 360)).astype(int)
    left = round(320 - 400 * 2 / 11)
    edge = picture[150:210, left - 1 : left + 2].max(axis=(1, 2))
    assert (edge > 200).any()
    assert (edge < 130).any()


def test_a_missing_camera_says_so() -> None:
    picture = np.asarray(draw_camera(None, "", one(0, 12), NOTHING, 640, 360))
    assert (picture[170:190, 280:360] < 200).any()


def test_bev_draws_x_right_and_forward_up() -> None:
    picture = draw_bev(NO_POINTS, one(20, 30), NOTHING, 400, 50, "")
    # 4 px a metre: the box spans x 18..22 and y 29..31, so its right edge is at (288, 80).
    assert is_near(picture.getpixel((288, 80)), class_color("car"))
    assert is_near(picture.getpixel((280, 76)), class_color("car"))
    assert picture.getpixel((280, 330)) == (255, 255, 255)


def test_bev_tick_points_along_the_heading() -> None:
    ahead = draw_bev(NO_POINTS, one(0, -30), NOTHING, 400, 50, "")
    # Heading along +x: the tick leaves the front edge at x = +2 m, the back at -2 m stays clear.
    assert is_near(ahead.getpixel((212, 320)), class_color("car"), 90)
    assert ahead.getpixel((186, 320)) == (255, 255, 255)


def test_bev_ground_truth_is_dashed_and_hollow() -> None:
    picture = np.asarray(draw_bev(NO_POINTS, NOTHING, one(20, 30), 400, 50, "")).astype(int)
    top_edge = picture[75:78, 272:289].min(axis=(0, 2))
    assert (top_edge < 110).any()
    assert (top_edge > 180).any()
    assert (picture[79:82, 278:283] >= 250).all()


def test_points_are_coloured_by_height_and_high_ones_on_top() -> None:
    points = np.array([[-20.0, 20, 3, 0, 0], [-20, 20, -2.5, 0, 0]], dtype=np.float32)
    picture = draw_bev(points, NOTHING, NOTHING, 400, 50, "")
    high = height_colors(np.array([3.0]))[0]
    block = np.asarray(picture)[118:123, 118:123].reshape(-1, 3).astype(int)
    assert min(np.abs(block - high).max(axis=1)) < 60
    assert points[0, 2] == 3  # the caller's points are not reordered


def test_map_is_painted_with_thin_classes_on_top() -> None:
    layers = np.zeros((2, 10, 10))
    layers[0, 5:] = 1  # x > 0
    layers[1, 7, :] = 0.6
    picture = draw_map(Ground(layers, ("drivable_area", "divider"), TENS, TENS), 100, "")
    assert is_near(picture.getpixel((95, 50)), MAP_COLORS["drivable_area"], 6)
    assert is_near(picture.getpixel((75, 30)), MAP_COLORS["divider"], 6)
    assert picture.getpixel((20, 50)) == (255, 255, 255)


def test_map_errors_tell_missed_from_wrong() -> None:
    truth, prediction = np.zeros((1, 10, 10)), np.zeros((1, 10, 10))
    truth[0, :5] = 1
    prediction[0, 3:8] = 1
    picture = draw_map_errors(Ground(prediction, ("walkway",), TENS, TENS), truth, 100, "")
    assert is_near(picture.getpixel((15, 80)), ERROR_COLORS["map missed"], 6)
    assert is_near(picture.getpixel((40, 80)), ERROR_COLORS["map right"], 6)
    assert is_near(picture.getpixel((65, 80)), ERROR_COLORS["map wrong"], 6)
    assert picture.getpixel((90, 80)) == (255, 255, 255)


def test_a_map_that_reaches_further_to_one_side_keeps_its_shape_and_the_car_its_place() -> None:
    """x from -20 to 80 m, y from -10 to 10 m: the panel shows ± 80 m."""
    layers = np.zeros((1, 10, 2))
    layers[0, 5:] = 1  # x > 30
    ground = Ground(layers, ("drivable_area",), (-20.0, 80.0, 10.0), (-10.0, 10.0, 10.0))
    for picture in (draw_map(ground, 160, ""), draw_map_errors(ground, np.zeros_like(layers), 160, "")):
        painted = np.asarray(picture).astype(int)
        assert is_near(painted[80, 80], INK, 60)
        inside, above, left = painted[85, 130], painted[65, 130], painted[85, 100]
        assert not is_near(inside, (255, 255, 255), 10)
        assert is_near(above, (255, 255, 255), 2)
        assert is_near(left, (255, 255, 255), 2)


def test_the_whole_picture_has_its_panels_and_takes_an_empty_scene() -> None:
    ground = Ground(np.ones((1, 20, 20)), ("drivable_area",), (-50.0, 50.0, 5.0), (-50.0, 50.0, 5.0))
    views = {"CAM_FRONT": view()}
    for bev_map in (None, DrawnMap(ground, None), DrawnMap(ground, ground.layers)):
        picture = draw_sample("a sample", views, NO_POINTS, NOTHING, NOTHING, bev_map=bev_map)
        assert picture.mode == "RGB"
        assert picture.width == WIDTH
    front = np.asarray(picture)[60:380, 660:1250]
    assert (front == GREY).all(axis=2).mean() > 0.9


def test_inputs_are_not_changed() -> None:
    boxes, camera = one(5, 20), view()
    before = boxes.boxes.copy()
    draw_sample("", {"CAM_FRONT": camera}, np.ones((3, 5), np.float32), boxes, boxes)
    np.testing.assert_array_equal(boxes.boxes, before)
    assert camera.image.getcolors() == [(640 * 360, GREY)]


def test_labels_never_overlap() -> None:
    labels = Labels(new_panel(120, 60), 12)
    placed = [labels.place("0.50", [(x, 20.0)], (0, 0, 0)) for x in np.linspace(0, 150, 40)]
    assert 1 < sum(placed) < 40
    for i, a in enumerate(labels.taken):
        for b in labels.taken[:i]:
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]
    assert not labels.place("0.50", [(-4.0, 20.0), (119.0 * SUPERSAMPLE, 20.0)], (0, 0, 0))


coordinate = st.floats(-10, 10, allow_nan=False, width=32)
point = st.tuples(coordinate, coordinate)


@settings(max_examples=200, deadline=None)
@given(point, point)
def test_a_clipped_segment_is_what_lies_inside(a: tuple[float, float], b: tuple[float, float]) -> None:
    start, stop = np.array(a), np.array(b)
    clipped = clip_segment(start, stop, (-3.0, -2.0), (3.0, 2.0))
    walk = start + np.linspace(0, 1, 201)[:, None] * (stop - start)
    inside = (np.abs(walk) <= (3.0, 2.0)).all(axis=1)
    if clipped is None:
        assert not inside.any()
        return
    ends = np.stack(clipped)
    assert (np.abs(ends) <= np.array([3.0, 2.0]) + 1e-6).all()
    for corner in walk[inside]:  # every inner point lies between the two ends
        gap = np.linalg.norm(ends - corner, axis=1).sum() - np.linalg.norm(ends[1] - ends[0])
        assert gap < 1e-6


def test_a_clipped_polygon_loses_what_is_behind_the_plane() -> None:
    square = np.array([[0.0, 0], [2, 0], [2, 2], [0, 2]])
    right = clip_polygon(square, (1, 0), 1.5)
    assert sorted(map(tuple, right.tolist())) == [(1.5, 0.0), (1.5, 2.0), (2.0, 0.0), (2.0, 2.0)]
    assert len(clip_polygon(square, (1, 0), 3.0)) == 0
    np.testing.assert_array_equal(clip_polygon(square, (1, 0), -1.0), square)


def test_the_plane_maps_corners_to_corners() -> None:
    plane = Plane(100, 50.0)
    np.testing.assert_allclose(plane.pixels(np.array([[-50.0, 50.0], [50.0, -50.0]])), [[0, 0], [200, 200]])
