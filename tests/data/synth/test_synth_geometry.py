"""The road, its map outlines, and what keeps objects apart, against independent geometry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely import LineString, Polygon
from shapely.affinity import rotate, translate
from shapely.geometry import box

from bevctl.data.synth.crowd import blocks_view, footprints, overlaps
from bevctl.data.synth.ground import CAR_PARK, WALKWAY, WHITE_PAINT
from bevctl.data.synth.objects import CLASSES, MARGIN, MAX_PARTS, make_object
from bevctl.data.synth.road import Area, Road, make_layout
from bevctl.data.synth.scene import Scene
from bevctl.geometry import yaw_of


def rectangle(row: np.ndarray) -> Polygon:
    x, y, yaw, length, width = row
    flat = box(-length / 2, -width / 2, length / 2, width / 2)
    return translate(rotate(flat, yaw, origin=(0, 0), use_radians=True), x, y)


def test_a_straight_and_a_quarter_turn() -> None:
    assert Road(1.0, 2.0, 0.0, 0.0).point(10.0, 3.0).tolist() == [11.0, 5.0]
    circle = Road(0.0, 0.0, 0.0, 0.1)
    np.testing.assert_allclose(circle.point(10 * np.pi / 2, 0.0), [10.0, 10.0], atol=1e-9)
    np.testing.assert_allclose(circle.point(10 * np.pi / 2, 4.0), [6.0, 10.0], atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(s=st.floats(-100, 100), t=st.floats(-20, 20), curvature=st.floats(-0.01, 0.01), heading=st.floats(-3, 3))
def test_road_points_equal_an_integral(s: float, t: float, curvature: float, heading: float) -> None:
    road = Road(5.0, -3.0, heading, curvature)
    middles = (np.arange(4000) + 0.5) / 4000 * s
    step = s / 4000
    x = 5.0 + np.sum(np.cos(road.heading_at(middles))) * step - t * np.sin(road.heading_at(s))
    y = -3.0 + np.sum(np.sin(road.heading_at(middles))) * step + t * np.cos(road.heading_at(s))
    np.testing.assert_allclose(road.point(s, t), [x, y], atol=1e-4)


def test_outlines_are_valid_and_have_the_area_of_the_strip() -> None:
    road = Road(0.0, 0.0, 0.4, 1 / 220)
    polygon = Polygon(Area("walkway", (-60.0, 60.0), (8.0, 11.5)).outline(road))
    assert polygon.is_valid
    assert polygon.exterior.is_ccw
    mean_radius = 220 - (8.0 + 11.5) / 2
    assert polygon.area == pytest.approx(120 / 220 * mean_radius * 3.5, rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), travel=st.floats(2, 140))
def test_every_layout_has_every_layer_near_every_position(seed: int, travel: float) -> None:
    layout = make_layout(Road(0.0, 0.0, 0.0, 0.003), travel, np.random.default_rng(seed))
    for s in np.arange(0, travel, 5.0):
        for layer in ("drivable_area", "walkway", "ped_crossing", "stop_line", "carpark_area", "lane"):
            assert any(area.s[0] < s + 40 and area.s[1] > s - 40 for area in layout.layer(layer)), layer
    assert any(divider.layer == "road_divider" for divider in layout.dividers)
    crossings = layout.layer("ped_crossing")
    assert not any(d.s[0] < c.s[1] and c.s[0] < d.s[1] for d in layout.dividers for c in crossings)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_overlap_agrees_with_shapely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = np.column_stack([rng.uniform(-4, 4, (6, 2)), rng.uniform(-4, 4, 6), rng.uniform(0.3, 5, (6, 2))])
    found = overlaps(boxes[:1], boxes[1:, None], 0.0)
    expected = [rectangle(boxes[0]).intersects(rectangle(other)) for other in boxes[1:]]
    assert found.tolist() == expected
    kept_apart = ~overlaps(boxes[:1], boxes[1:, None], 0.5)
    distances = np.array([rectangle(boxes[0]).distance(rectangle(other)) for other in boxes[1:]])
    assert (distances[kept_apart] >= 0.5).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_blocked_view_agrees_with_shapely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.column_stack([rng.uniform(-6, 6, (7, 2)), rng.uniform(-4, 4, 7), rng.uniform(0.3, 5, (7, 2))])[:, None]
    eye, target, screens = rng.uniform(-6, 6, (1, 2)), rows[:1], rows[1:]
    line = LineString([eye[0], target[0, 0, :2]])
    expected = [line.intersects(rectangle(row[0])) for row in screens]
    assert blocks_view(eye, target, screens)[:, 0].tolist() == expected


def test_nothing_touches_anything_at_any_time(scenes: dict[str, Scene]) -> None:
    for scene in scenes.values():
        for time in np.linspace(0, 1.0, 6):
            rows = footprints(list(scene.solids), scene.layout.road, np.array([time]))[:, 0]
            shapes = [rectangle(row) for row in rows]
            pose = scene.ego2global(time)
            ego = rectangle(np.array([*(pose[:2, :2] @ [1.4, 0.0] + pose[:2, 3]), yaw_of(pose), 4.6, 1.9]))
            assert not any(ego.intersects(shape) for shape in shapes)
            for i, one in enumerate(shapes):
                assert not any(one.intersects(other) for other in shapes[i + 1 :])


def test_movers_keep_their_speed_along_their_heading(scenes: dict[str, Scene]) -> None:
    for scene in scenes.values():
        before, now, after = (scene.poses(time) for time in (0.499, 0.5, 0.501))
        velocity = (after - before)[:, :2] / 0.002
        speeds = np.array([solid.speed for solid in scene.solids])
        heading = np.stack([np.cos(now[:, 3]), np.sin(now[:, 3])], axis=1)
        np.testing.assert_allclose(velocity, speeds[:, None] * heading, atol=1e-5)
        moving = {solid.kind for solid in scene.solids if solid.speed > 0}
        assert {"car", "pedestrian"} <= moving


@pytest.mark.parametrize("name", CLASSES)
def test_parts_fill_the_box_but_for_the_margin(name: str) -> None:
    attribute = "cycle.with_rider" if name in ("bicycle", "motorcycle") else ""
    solid = make_object(name, np.random.default_rng(1), s=0.0, t=0.0, turn=0.0, speed=0.0, attribute=attribute)
    assert len(solid.parts) <= MAX_PARTS
    low, high = solid.parts[:, :3].min(axis=0), solid.parts[:, 3:].max(axis=0)
    half = np.array([solid.size[0] / 2, solid.size[1] / 2, solid.size[2] / 2])
    middle = np.array([0.0, 0.0, solid.size[2] / 2])
    assert (low >= middle - half + MARGIN - 1e-9).all()
    assert (high <= middle + half - MARGIN + 1e-9).all()
    np.testing.assert_allclose(high - low, 2 * (half - MARGIN), atol=0.12)


def test_paint_lies_where_the_map_says(scenes: dict[str, Scene]) -> None:
    """Materials at the middle of map areas, found through the road's own coordinates."""
    scene = next(iter(scenes.values()))
    road = scene.layout.road
    for layer, material in (("stop_line", WHITE_PAINT), ("carpark_area", CAR_PARK), ("walkway", WALKWAY)):
        for area in scene.layout.layer(layer):
            x, y = road.point(sum(area.s) / 2, sum(area.t) / 2)
            assert scene.ground.material_at(np.array([x]), np.array([y]))[0] == material
