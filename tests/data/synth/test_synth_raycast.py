"""Rays against boxes and ground, checked by hand, by a plain loop and by properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bevctl.data.synth.camera import trace
from bevctl.data.synth.ground import Ground
from bevctl.data.synth.objects import Solid
from bevctl.data.synth.raycast import CODES, GROUND, NOTHING, cast
from bevctl.data.synth.rig import CAMERAS
from bevctl.data.synth.road import Road, make_layout
from bevctl.data.synth.scene import Scene

Array = NDArray[np.float64]
EVERYWHERE = (slice(None), slice(None))


def block(*parts: tuple[float, ...]) -> Solid:
    colours = np.zeros((len(parts), 3), dtype=np.uint8)
    return Solid("car", (2.0, 2.0, 2.0), np.array(parts), colours, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def ground() -> Ground:
    rng = np.random.default_rng(0)
    return Ground(make_layout(Road(100.0, 50.0, 0.3, 0.002), 20.0, rng), rng)


CUBE = block((-1, -1, 0, 1, 1, 2))


def test_a_cube_is_met_on_the_facing_side(ground: Ground) -> None:
    rays = np.array([[1.0, 1.0, 0.0], [0.0, 0.4, 0.0], [0.0, 0.0, 1.0]])[:, None]
    pose = np.array([[4.0, 0.0, 0.0, 0.0]])
    hits = cast(np.array([0.0, 0.0, 1.0]), rays, [CUBE], pose, [EVERYWHERE], ground, 3)
    assert hits.distance[0].tolist() == [3.0, np.inf, np.inf]
    assert hits.surface[0].tolist() == [0, NOTHING, NOTHING]
    assert hits.silhouettes.tolist() == [1]


def test_the_nearer_solid_hides_the_farther_one(ground: Ground) -> None:
    rays = np.array([1.0, 0.0, 0.0]).reshape(3, 1, 1)
    poses = np.array([[9.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, np.pi]])
    hits = cast(np.array([0.0, 0.0, 1.0]), rays, [CUBE, CUBE], poses, [EVERYWHERE] * 2, ground, 3)
    # The second cube stands backwards, so that its front (+x, face 1) is met.
    assert hits.surface[0, 0] == CODES + 1
    assert hits.distance[0, 0] == pytest.approx(3.0)
    assert hits.silhouettes.tolist() == [1, 1]


def test_the_nearer_part_of_a_solid_is_met(ground: Ground) -> None:
    solid = block((0.5, -1, 0, 1, 1, 2), (-1, -1, 0, 0, 1, 2))
    ray, pose = np.array([1.0, 0.0, 0.0]).reshape(3, 1, 1), np.array([[4.0, 0.0, 0.0, 0.0]])
    hits = cast(np.array([0.0, 0.0, 1.0]), ray, [solid], pose, [EVERYWHERE], ground, 3)
    assert hits.surface[0, 0] == 6
    assert hits.distance[0, 0] == pytest.approx(3.0)


def plain_cast(origin: Array, ray: Array, pose: Array, box: Array) -> float:
    """Ray parameter by walking over the six planes of a box."""
    c, s = np.cos(pose[3]), np.sin(pose[3])
    turn = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    start, way = turn @ (origin - pose[:3]), turn @ ray
    found = np.inf
    for axis in range(3):
        for side in (box[axis], box[axis + 3]):
            if abs(way[axis]) < 1e-12:
                continue
            t = (side - start[axis]) / way[axis]
            point = start + t * way
            others = [a for a in range(3) if a != axis]
            if t > 0 and all(box[a] - 1e-9 <= point[a] <= box[a + 3] + 1e-9 for a in others):
                found = min(found, t)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_distances_equal_a_plain_loop(ground: Ground, seed: int) -> None:
    rng = np.random.default_rng(seed)
    solid = block(*(np.concatenate([low, low + rng.uniform(0.2, 2, 3)]) for low in rng.uniform(-2, 1, (3, 3))))
    pose = np.array([*rng.uniform((7, -1, -1), (9, 1, 1)), rng.uniform(-np.pi, np.pi)])
    origin = np.array([0.0, 0.0, rng.uniform(-1, 3)])
    rays = np.concatenate([np.ones((1, 4, 5)), rng.uniform(-0.4, 0.4, (2, 4, 5))])
    rays[2] = np.abs(rays[2])  # upwards, clear of the ground
    hits = cast(origin, rays, [solid], pose[None], [EVERYWHERE], ground, 3)
    expected = [
        [min(plain_cast(origin, rays[:, r, c], pose, b) for b in solid.parts) for c in range(5)] for r in range(4)
    ]
    np.testing.assert_allclose(hits.distance, expected, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(azimuth=st.floats(0, 2 * np.pi), elevation=st.floats(-1.5, -0.03))
def test_ground_hits_lie_on_the_ground(ground: Ground, azimuth: float, elevation: float) -> None:
    origin = np.array([105.0, 52.0, 1.84])
    ray = np.array([np.cos(azimuth) * np.cos(elevation), np.sin(azimuth) * np.cos(elevation), np.sin(elevation)])
    distance = ground.distance(origin, ray[:, None], 4)[0]
    x, y, z = origin + distance * ray
    assert abs(z - ground.height_at(np.array([x]), np.array([y]))[0]) < 0.002


def test_rays_that_rise_meet_no_ground(ground: Ground) -> None:
    rays = np.array([[1.0, 1.0], [0.0, 0.0], [0.1, 0.0]])[..., None]
    hits = cast(np.array([100.0, 50.0, 1.0]), rays, [], np.zeros((0, 4)), [], ground, 2)
    assert hits.surface.ravel().tolist() == [NOTHING, NOTHING]
    assert GROUND not in hits.surface


def test_windows_lose_nothing(scenes: dict[str, Scene]) -> None:
    """Looking only where a solid may be finds what looking everywhere does."""
    scene = next(iter(scenes.values()))
    annotated = [solid.is_annotated for solid in scene.solids]
    for camera in CAMERAS:
        hits, rays = trace(scene, camera, 0.5, 0.08)
        origin = (scene.ego2global(0.5) @ camera.camera2ego)[:3, 3]
        everywhere = cast(
            origin, rays, scene.solids, scene.poses(0.5), [EVERYWHERE] * len(scene.solids), scene.ground, 1
        )
        np.testing.assert_array_equal(hits.surface, everywhere.surface)
        np.testing.assert_array_equal(hits.silhouettes[annotated], everywhere.silhouettes[annotated])
