"""Cameras and LiDAR see the same world."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from bevctl.data.synth.camera import render, trace
from bevctl.data.synth.ground import ASPHALT, WHITE_PAINT
from bevctl.data.synth.lidar import MAX_RANGE, scan
from bevctl.data.synth.raycast import GROUND, cast
from bevctl.data.synth.rig import CAMERAS, LIDAR2EGO, RINGS, Camera, image_size
from bevctl.data.synth.scene import Scene
from bevctl.geometry import invert_rigid, points_in_boxes, project_points, rigid, transform_points, yaw_of

Array = NDArray[np.float64]
TIME = 0.5
SCALE = 0.5


@pytest.fixture(scope="module", params=[0, 1])
def scene(request: pytest.FixtureRequest, scenes: dict[str, Scene]) -> Scene:
    return list(scenes.values())[request.param]


@pytest.fixture(scope="module")
def points(scene: Scene) -> NDArray[np.float32]:
    return scan(scene, TIME, 1084, np.random.default_rng(0))


def lidar_boxes(scene: Scene) -> Array:
    """(n, 7) boxes of the solids in the LiDAR frame."""
    lidar2global = scene.ego2global(TIME) @ LIDAR2EGO
    boxes = scene.boxes(scene.poses(TIME))
    boxes[:, :3] = transform_points(invert_rigid(lidar2global), boxes[:, :3])
    boxes[:, 6] -= yaw_of(lidar2global)
    return boxes


def object_hits(scene: Scene, points: NDArray[np.float32]) -> NDArray[np.bool_]:
    """(n, P) points on each annotated object: inside its box and above the ground below it."""
    boxes = lidar_boxes(scene)
    boxes[:, 2] += 0.05
    boxes[:, 5] -= 0.1
    inside = points_in_boxes(points, boxes)
    inside[[not solid.is_annotated for solid in scene.solids]] = False
    return inside


def silhouettes(scene: Scene, camera: Camera, indices: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Each of the objects with the (H, W) pixels that show it when nothing else is there."""
    time = TIME + camera.delay
    _, rays = trace(scene, camera, time, SCALE)
    origin = (scene.ego2global(time) @ camera.camera2ego)[:3, 3]
    poses, everywhere = scene.poses(time), (slice(None), slice(None))
    for index in map(int, indices):
        hits = cast(origin, rays, [scene.solids[index]], poses[[index]], [everywhere], scene.ground, 1)
        yield index, hits.surface >= 0


def grown(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask and all pixels beside it."""
    padded = np.pad(mask, 1)
    height, width = mask.shape
    return np.any([padded[y : y + height, x : x + width] for y in range(3) for x in range(3)], axis=0)


def pixels(scene: Scene, camera: Camera, points: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(P, 2) column and row of LiDAR points in the image, through both ego poses; (P,) whether they are in it."""
    lidar2global = scene.ego2global(TIME) @ LIDAR2EGO
    camera2global = scene.ego2global(TIME + camera.delay) @ camera.camera2ego
    camera2image = rigid(camera.intrinsics(SCALE), np.zeros(3))
    lidar2image = camera2image @ invert_rigid(camera2global) @ lidar2global
    uv, depth = project_points(lidar2image, points[:, :3])
    inside = (depth > 0.5) & (uv >= 0).all(axis=1) & (uv < image_size(SCALE)).all(axis=1)
    return np.floor(np.where(inside[:, None], uv, 0)).astype(np.int64), inside


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: camera.channel)
def test_hits_fall_into_the_rendered_silhouette(scene: Scene, points: NDArray[np.float32], camera: Camera) -> None:
    """An object's LiDAR hits land on the object as this camera draws it.

    All hits together strictly; each object's own to within a pixel, as range noise moves hits on edges off thin things.
    """
    on_object = object_hits(scene, points)
    uv, inside = pixels(scene, camera, points)
    strict = total = 0
    for index, mask in silhouettes(scene, camera, np.flatnonzero((on_object & inside).sum(axis=1) >= 8)):
        column, row = uv[on_object[index] & inside].T
        assert grown(mask)[row, column].mean() >= 0.95, scene.solids[index].kind
        strict, total = strict + int(mask[row, column].sum()), total + len(row)
    assert total >= 30
    assert strict / total >= 0.97


def test_hits_fall_on_the_object_in_the_full_picture(scene: Scene, points: NDArray[np.float32]) -> None:
    """With everything drawn, nearly all hits still land on their object: little is hidden from one sensor only."""
    on_object = object_hits(scene, points)
    right = total = 0
    for camera in CAMERAS:
        hits, _ = trace(scene, camera, TIME + camera.delay, SCALE)
        uv, inside = pixels(scene, camera, points)
        for index in np.flatnonzero((on_object & inside).any(axis=1)):
            column, row = uv[on_object[index] & inside].T
            right += int((hits.solid[row, column] == index).sum())
            total += len(row)
    assert total > 1000
    assert right / total >= 0.95


def test_points_lie_on_surfaces(scene: Scene, points: NDArray[np.float32]) -> None:
    """Every return is on the ground or on a solid, to within the range noise."""
    lidar2global = scene.ego2global(TIME) @ LIDAR2EGO
    world = transform_points(lidar2global, points[:, :3])
    above = world[:, 2] - scene.ground.height_at(world[:, 0], world[:, 1])
    on_ground = np.abs(above) < 0.04
    on_solid = points_in_boxes(points, lidar_boxes(scene), margin=0.6).any(axis=0)
    assert (on_ground | on_solid).all()
    assert 0.2 < on_ground.mean() < 0.95
    assert np.linalg.norm(points[:, :3], axis=1).max() < MAX_RANGE + 0.05


def test_objects_hits_lie_within_their_boxes(scene: Scene, points: NDArray[np.float32]) -> None:
    """Growing the boxes by a few centimetres adds no hit above the ground: noise does not leave the box."""
    boxes = lidar_boxes(scene)[[solid.is_annotated for solid in scene.solids]]
    boxes[:, 2] += 0.3
    boxes[:, 5] -= 0.6
    assert points_in_boxes(points, boxes).sum() > 500
    np.testing.assert_array_equal(
        points_in_boxes(points, boxes).sum(axis=1),
        points_in_boxes(points, boxes + np.array([0, 0, 0, 0.06, 0.06, 0, 0])).sum(axis=1),
    )


def test_ranges_are_those_of_rays_cast_everywhere_plus_noise(scene: Scene) -> None:
    first = scan(scene, TIME, 400, np.random.default_rng(1))
    clean = _noiseless(scene, 1)
    ranges, expected = np.linalg.norm(first[:, :3], axis=1), clean
    assert len(ranges) == len(expected)
    assert 0.009 < np.std(ranges - expected) < 0.011
    assert np.abs(ranges - expected).max() < 0.031


def test_fewer_beams_span_the_same_angles(scene: Scene) -> None:
    points = scan(scene, TIME, 400, np.random.default_rng(1), beams=5)
    elevation = np.rad2deg(np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1])))
    for ring, expected in enumerate(np.linspace(-30.67, 10.67, 5)):
        np.testing.assert_allclose(elevation[points[:, 4] == ring], expected, atol=0.1)
    assert set(points[:, 4]) >= {0, 1, 2}, "beams that meet the ground"


def _noiseless(scene: Scene, seed: int) -> Array:
    """Ranges of the returns before noise, for the scan with this seed."""
    from bevctl.data.synth.lidar import GROUND_ITERATIONS, directions

    beams = directions(400, float(np.random.default_rng(seed).uniform()), RINGS)
    lidar2global = scene.ego2global(TIME) @ LIDAR2EGO
    rays = np.einsum("ij,jrc->irc", lidar2global[:3, :3], beams)
    windows = [(slice(None), slice(None))] * len(scene.solids)
    hits = cast(lidar2global[:3, 3], rays, scene.solids, scene.poses(TIME), windows, scene.ground, GROUND_ITERATIONS)
    return hits.distance[hits.distance < MAX_RANGE]


def test_markings_are_drawn_where_the_map_has_them(scene: Scene) -> None:
    """Paint is bright and asphalt dark where the front camera sees them; shadows leave the brightest fifth alone."""
    camera = CAMERAS[0]
    picture = render(scene, camera, TIME, 0.25)
    _, rays = trace(scene, camera, TIME, 0.25)
    origin = (scene.ego2global(TIME) @ camera.camera2ego)[:3, 3]
    near = (picture.hits.surface == GROUND) & (picture.hits.distance < 30)
    place = origin[:2, None] + picture.hits.distance[near] * rays[:2, near].astype(np.float64)
    material = scene.ground.material_at(place[0], place[1])
    brightness = picture.pixels[near].mean(axis=1)
    assert np.percentile(brightness[material == WHITE_PAINT], 80) > 170
    assert np.percentile(brightness[material == ASPHALT], 80) < 110


def test_rays_of_the_image_centre_look_along_the_camera(scene: Scene) -> None:
    for camera in CAMERAS:
        forward = scene.ego2global(TIME)[:3, :3] @ camera.camera2ego[:3, 2]
        assert yaw_of(np.column_stack([forward, forward, forward])) == pytest.approx(
            float(
                np.angle(np.exp(1j * (scene.layout.road.heading_at(scene.ego_speed * TIME) + np.deg2rad(camera.yaw))))
            )
        )
