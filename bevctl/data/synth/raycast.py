"""Rays against ground and boxes: the one renderer behind the images and the LiDAR.

Rays form a grid: `directions` is (3, rows, columns) in the global frame, all from one origin. The ray parameter is
whatever unit `directions` has: depth where their forward component is 1, range where they have unit length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bevctl.data.synth.ground import Ground
from bevctl.data.synth.objects import MAX_PARTS, Solid

Array = NDArray[np.float64]
Window = tuple[slice, slice | NDArray[np.intp]]
"""Rows and columns of the grid that may see a solid."""

NOTHING, GROUND = -2, -1
CODES = MAX_PARTS * 6
"""Surface codes a solid takes: its parts times six faces (-x, +x, -y, +y, -z, +z)."""


@dataclass
class Hits:
    """The first thing that each ray meets, and how much of each solid there was to see."""

    distance: NDArray[np.floating]
    """(rows, columns) ray parameter, inf where nothing is met."""
    surface: NDArray[np.int32]
    """(rows, columns) NOTHING, GROUND, or solid · CODES + part · 6 + face."""
    silhouettes: NDArray[np.int64]
    """(solids,) rays that meet each solid, whatever stands before it."""

    @property
    def solid(self) -> NDArray[np.int32]:
        """(rows, columns) index of the solid met, NOTHING or GROUND."""
        return np.where(self.surface >= 0, self.surface // CODES, self.surface)


def cast(
    origin: Array,
    directions: NDArray[np.floating],
    solids: Sequence[Solid],
    poses: Array,
    windows: Sequence[Window | None],
    ground: Ground,
    iterations: int,
) -> Hits:
    """First hits of a grid of rays.

    `poses` is (n, 4): x, y, z of each solid's foot and its yaw; `windows` the part of the grid that may see it, None
    where no ray can. `iterations` refines the ground's height.
    """
    shape = directions.shape[1:]
    distance = ground.distance(origin, directions.reshape(3, -1), iterations).reshape(shape)
    surface = np.where(np.isfinite(distance), np.int32(GROUND), np.int32(NOTHING))
    silhouettes = np.zeros(len(solids), dtype=np.int64)
    for index, (solid, pose, window) in enumerate(zip(solids, poses, windows, strict=True)):
        if window is None:
            continue
        near, code = _cast_solid(origin, directions[:, window[0], window[1]], pose, solid.parts)
        silhouettes[index] = np.count_nonzero(np.isfinite(near))
        before = distance[window]
        closer = near < before
        distance[window] = np.where(closer, near, before)
        surface[window] = np.where(closer, code + index * CODES, surface[window])
    return Hits(distance, surface, silhouettes)


def _cast_solid(
    origin: Array, directions: NDArray[np.floating], pose: Array, parts: Array
) -> tuple[NDArray[np.floating], NDArray[np.int32]]:
    """Ray parameter (inf for a miss) and part · 6 + face of the first of a solid's boxes, by the slab method."""
    kind = directions.dtype.type
    c, s = np.cos(pose[3]), np.sin(pose[3])
    dx, dy, dz = origin - pose[:3]
    start = (kind(c * dx + s * dy), kind(c * dy - s * dx), kind(dz))
    x = kind(c) * directions[0] + kind(s) * directions[1]
    y = kind(c) * directions[1] - kind(s) * directions[0]
    inverse = [1 / np.where(np.abs(d) < 1e-9, kind(1e-9), d) for d in (x, y, directions[2])]
    # A ray enters a slab through its low side (face 0, 2, 4) where it runs upwards in that coordinate.
    faces = [np.where(d > 0, np.int32(2 * axis), np.int32(2 * axis + 1)) for axis, d in enumerate(inverse)]
    nearest = np.full(x.shape, np.inf, dtype=x.dtype)
    code = np.zeros(x.shape, dtype=np.int32)
    for part, box in enumerate(parts.astype(x.dtype)):
        low = [(box[axis] - start[axis]) * inverse[axis] for axis in range(3)]
        high = [(box[axis + 3] - start[axis]) * inverse[axis] for axis in range(3)]
        first = [np.minimum(a, b) for a, b in zip(low, high, strict=True)]
        last = [np.maximum(a, b) for a, b in zip(low, high, strict=True)]
        enter = np.maximum(np.maximum(first[0], first[1]), first[2])
        leave = np.minimum(np.minimum(last[0], last[1]), last[2])
        face = np.where(first[0] == enter, faces[0], np.where(first[1] == enter, faces[1], faces[2]))
        hit = (enter <= leave) & (enter > 0) & (enter < nearest)
        nearest = np.where(hit, enter, nearest)
        code = np.where(hit, face + np.int32(part * 6), code)
    return nearest, code
