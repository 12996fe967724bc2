"""Rigid transforms, projection and boxes as pure NumPy functions; float64 in, float64 out.

A transform is a 4×4 matrix that acts on column vectors; `a2b` maps frame a to frame b.
Box rows are as in `bevctl.batch`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def rigid(rotation: ArrayLike, translation: ArrayLike) -> Array:
    """(..., 4, 4) transforms from (..., 3, 3) rotations and (..., 3) translations."""
    matrix = np.zeros((*np.shape(translation)[:-1], 4, 4))
    matrix[..., :3, :3] = rotation
    matrix[..., :3, 3] = translation
    matrix[..., 3, 3] = 1.0
    return matrix


def invert_rigid(matrix: ArrayLike) -> Array:
    """Inverse of a (..., 4, 4) rigid transform, from the transpose of its rotation: exact, unlike a general inverse."""
    m = np.asarray(matrix, dtype=np.float64)
    inverse = np.zeros_like(m)
    rotation_t = np.swapaxes(m[..., :3, :3], -1, -2)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3] = -np.einsum("...ij,...j->...i", rotation_t, m[..., :3, 3])
    inverse[..., 3, 3] = 1.0
    return inverse


def quaternion_to_rotation(quaternion: ArrayLike) -> Array:
    """(..., 3, 3) rotations of quaternions (..., 4) w, x, y, z, which are normalised first.

    Raises ValueError for a zero or non-finite quaternion.
    """
    q = np.asarray(quaternion, dtype=np.float64)
    norm = np.linalg.norm(q, axis=-1, keepdims=True)
    if q.shape[-1:] != (4,) or not np.isfinite(norm).all() or (norm < 1e-9).any():
        raise ValueError(f"not a rotation quaternion: {q.tolist()!s:.200}")
    w, x, y, z = np.moveaxis(q / norm, -1, 0)
    entries = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in entries], axis=-2)


def yaw_to_quaternion(yaw: float) -> Array:
    """Quaternion (w, x, y, z) of a rotation by `yaw` rad about z."""
    return np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])


def rotation_z(angle: float) -> Array:
    """(3, 3) rotation by `angle` rad about z, counter-clockwise seen from above."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def yaw_of(rotation: ArrayLike) -> float:
    """Heading in rad of the x axis of a (3, 3) or 4×4 rotation, in the xy plane."""
    r = np.asarray(rotation, dtype=np.float64)
    return float(np.arctan2(r[1, 0], r[0, 0]))


def wrap_angle(angle: ArrayLike) -> Array:
    """Angles (rad) moved to [-π, π)."""
    a = np.asarray(angle, dtype=np.float64)
    return (a + np.pi) % (2 * np.pi) - np.pi


def transform_points(matrix: ArrayLike, points: ArrayLike) -> Array:
    """(P, 3) points moved by a 4×4 transform."""
    m = np.asarray(matrix, dtype=np.float64)
    moved: Array = np.asarray(points, dtype=np.float64) @ m[:3, :3].T
    moved += m[:3, 3]
    return moved


def project_points(camera2image: ArrayLike, points: ArrayLike) -> tuple[Array, Array]:
    """Pixels (P, 2) and depths (P,) of (P, 3) points under a 4×4 projection; a pixel is meaningless where depth ≤ 0."""
    homogeneous = transform_points(camera2image, points)
    depth = homogeneous[:, 2]
    safe = np.where(np.abs(depth) < 1e-9, 1e-9, depth)
    return homogeneous[:, :2] / safe[:, None], depth


def box_corners(boxes: ArrayLike) -> Array:
    """(n, 8, 3) corners of (n, ≥ 7) boxes: bottom face 0-3 from front-left counter-clockwise, top face 4-7 above."""
    b = np.asarray(boxes, dtype=np.float64).reshape(-1, np.shape(boxes)[-1])
    unit = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) / 2.0
    flat = unit[None] * b[:, None, 3:5]
    c, s = np.cos(b[:, 6])[:, None], np.sin(b[:, 6])[:, None]
    xy = np.stack([c * flat[..., 0] - s * flat[..., 1], s * flat[..., 0] + c * flat[..., 1]], axis=-1)
    xy = xy + b[:, None, :2]
    half = b[:, None, 5:6] / 2
    bottom = np.concatenate([xy, np.broadcast_to(b[:, None, 2:3] - half, (len(b), 4, 1))], axis=-1)
    top = np.concatenate([xy, np.broadcast_to(b[:, None, 2:3] + half, (len(b), 4, 1))], axis=-1)
    return np.concatenate([bottom, top], axis=1)


def transform_boxes(matrix: ArrayLike, boxes: ArrayLike) -> Array:
    """(n, 7 or 9) boxes moved by a 4×4 map made of rotation about z, uniform scale, mirrored x or y, and translation.

    Sizes and velocities scale along; yaw comes back in [-π, π].
    """
    m = np.asarray(matrix, dtype=np.float64)
    rows = np.array(boxes, dtype=np.float64)
    plane = m[:2, :2].T
    heading = np.stack([np.cos(rows[:, 6]), np.sin(rows[:, 6])], axis=1) @ plane
    rows[:, :3] = transform_points(m, rows[:, :3])
    rows[:, 3:6] *= np.sqrt(abs(np.linalg.det(plane)))
    rows[:, 6] = np.arctan2(heading[:, 1], heading[:, 0])
    rows[:, 7:9] = rows[:, 7:9] @ plane if rows.shape[1] == 9 else rows[:, 7:9]
    return rows


def points_in_boxes(points: ArrayLike, boxes: ArrayLike, margin: float = 0.0) -> NDArray[np.bool_]:
    """(n, P) membership of (P, ≥ 3) points in (n, ≥ 7) boxes grown by `margin` metres on each side."""
    px, py, pz = np.asarray(points)[:, :3].T.astype(np.float64)
    b = np.asarray(boxes, dtype=np.float64).reshape(-1, np.shape(boxes)[-1])
    inside = np.zeros((len(b), len(px)), dtype=bool)
    for i, (x, y, z, length, width, height, yaw) in enumerate(b[:, :7]):
        reach = 1.001 * np.hypot(length / 2 + margin, width / 2 + margin)
        near = np.flatnonzero((np.abs(px - x) <= reach) & (np.abs(py - y) <= reach))
        dx, dy, dz = px[near] - x, py[near] - y, pz[near] - z
        c, s = np.cos(yaw), np.sin(yaw)
        along, across = c * dx + s * dy, -s * dx + c * dy
        inside[i, near] = (
            (np.abs(along) <= length / 2 + margin)
            & (np.abs(across) <= width / 2 + margin)
            & (np.abs(dz) <= height / 2 + margin)
        )
    return inside
