"""Transforms, projection and boxes against hand-made cases and their own laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyquaternion import Quaternion

from bevctl import geometry as g

metres = st.floats(-100, 100)
angles = st.floats(-10, 10)
points = st.lists(st.tuples(metres, metres, metres), min_size=1, max_size=5).map(np.array)
quaternions = st.tuples(*[st.floats(-1, 1)] * 4)
sizes = st.floats(0.1, 20)
boxes = st.tuples(metres, metres, metres, sizes, sizes, sizes, angles).map(lambda row: np.array([row]))


def matrix_of(quaternion: tuple[float, ...], translation: object) -> g.Array:
    assume(np.linalg.norm(quaternion) > 1e-3)
    return g.rigid(g.quaternion_to_rotation(quaternion), translation)  # type: ignore[arg-type]


def test_rigid_by_hand() -> None:
    quarter = g.rigid(g.rotation_z(np.pi / 2), [1, 2, 3])
    np.testing.assert_allclose(g.transform_points(quarter, [[1, 0, 0]]), [[1, 3, 3]], atol=1e-12)


@given(quaternions, st.tuples(metres, metres, metres), points)
def test_the_inverse_undoes(quaternion: tuple[float, ...], translation: tuple[float, ...], cloud: g.Array) -> None:
    matrix = matrix_of(quaternion, translation)
    back = g.transform_points(g.invert_rigid(matrix), g.transform_points(matrix, cloud))
    np.testing.assert_allclose(back, cloud, atol=1e-10)


def test_the_inverse_works_on_stacks_and_leaves_its_input() -> None:
    stack = np.stack([g.rigid(g.rotation_z(a), [a, 0, 1]) for a in (0.1, 0.2)])[None]
    before = stack.copy()
    np.testing.assert_allclose(g.invert_rigid(stack) @ stack, np.broadcast_to(np.eye(4), (1, 2, 4, 4)), atol=1e-12)
    np.testing.assert_array_equal(stack, before)


@given(quaternions)
def test_quaternions_agree_with_pyquaternion(quaternion: tuple[float, ...]) -> None:
    assume(np.linalg.norm(quaternion) > 1e-3)
    np.testing.assert_allclose(g.quaternion_to_rotation(quaternion), Quaternion(quaternion).rotation_matrix, atol=1e-9)


@pytest.mark.parametrize("bad", [(0, 0, 0, 0), (np.nan, 0, 0, 1), (np.inf, 0, 0, 1), (1, 0, 0)])
def test_what_is_no_quaternion_is_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="not a rotation quaternion"):
        g.quaternion_to_rotation(bad)


def test_stacks_of_poses_are_those_of_their_parts() -> None:
    rng = np.random.default_rng(0)
    quaternions, places = rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 5, 3))
    stacked = g.rigid(g.quaternion_to_rotation(quaternions), places)
    assert stacked.shape == (2, 5, 4, 4)
    for row, column in np.ndindex(2, 5):
        single = g.rigid(g.quaternion_to_rotation(quaternions[row, column]), places[row, column])
        np.testing.assert_array_equal(stacked[row, column], single)
    assert g.rigid(g.quaternion_to_rotation(np.zeros((0, 4))), np.zeros((0, 3))).shape == (0, 4, 4)
    quaternions[1, 2] = 0.0
    with pytest.raises(ValueError, match="not a rotation quaternion"):
        g.quaternion_to_rotation(quaternions)


@given(angles)
def test_yaw_goes_through_quaternion_and_matrix(yaw: float) -> None:
    rotation = g.quaternion_to_rotation(g.yaw_to_quaternion(yaw))
    np.testing.assert_allclose(rotation, g.rotation_z(yaw), atol=1e-12)
    assert abs(g.wrap_angle(g.yaw_of(rotation) - yaw)) < 1e-9


@given(angles)
def test_wrapped_angles_are_in_range_and_equivalent(angle: float) -> None:
    wrapped = float(g.wrap_angle(angle))
    assert -np.pi <= wrapped < np.pi
    assert abs(np.exp(1j * wrapped) - np.exp(1j * angle)) < 1e-9


def test_projection_by_hand() -> None:
    camera = np.eye(4)
    camera[:3, :3] = [[100, 0, 50], [0, 100, 40], [0, 0, 1]]
    pixels, depth = g.project_points(camera, [[1, -1, 2], [0, 0, -4], [1, 1, 0]])
    np.testing.assert_allclose(pixels[0], [100, -10])
    np.testing.assert_allclose(depth, [2, -4, 0])
    assert np.isfinite(pixels).all()


def test_corners_by_hand() -> None:
    corners = g.box_corners([[10, 0, 1, 4, 2, 2, np.pi / 2]])[0]
    expected = [[9, 2, 0], [9, -2, 0], [11, -2, 0], [11, 2, 0]]
    np.testing.assert_allclose(corners[:4], expected, atol=1e-12)
    np.testing.assert_allclose(corners[4:], corners[:4] + np.array([0, 0, 2]), atol=1e-12)


def test_no_boxes_have_no_corners() -> None:
    assert g.box_corners(np.zeros((0, 9))).shape == (0, 8, 3)
    assert g.points_in_boxes(np.zeros((4, 3)), np.zeros((0, 9))).shape == (0, 4)


@given(boxes)
def test_corners_surround_the_centre_with_the_given_sides(box: g.Array) -> None:
    corners = g.box_corners(box)[0]
    np.testing.assert_allclose(corners.mean(axis=0), box[0, :3], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(corners[0] - corners[1]), box[0, 3], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(corners[0] - corners[3]), box[0, 4], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(corners[0] - corners[4]), box[0, 5], atol=1e-9)


@given(boxes)
def test_a_box_holds_what_lies_inside_its_corners(box: g.Array) -> None:
    corners, centre = g.box_corners(box)[0], box[0, :3]
    assert g.points_in_boxes(centre + 0.999 * (corners - centre), box).all()
    outside = centre + 1.01 * (corners - centre)
    assert not g.points_in_boxes(outside, box).any()
    assert g.points_in_boxes(outside, box, margin=0.2).all()


def test_membership_of_several_boxes() -> None:
    cloud = [[0, 0, 0, 7], [5, 0, 0, 7], [50, 0, 0, 7]]
    inside = g.points_in_boxes(cloud, [[0, 0, 0, 2, 2, 2, 0], [5, 0, 0, 2, 2, 2, 0]])
    np.testing.assert_array_equal(inside, [[True, False, False], [False, True, False]])
