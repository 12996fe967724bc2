"""The LiDAR: beams that turn about the roof, cast against the scene."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bevctl.data.synth.ground import REFLECTIVITY
from bevctl.data.synth.raycast import GROUND, Hits, Window, cast
from bevctl.data.synth.rig import ELEVATIONS, LIDAR2EGO, RINGS
from bevctl.data.synth.scene import Scene
from bevctl.geometry import box_corners

Array = NDArray[np.float64]

MAX_RANGE = 70.0
RANGE_NOISE = 0.01
"""Standard deviation of the range, m; cut off at three of them."""
GROUND_ITERATIONS = 4


def scan(
    scene: Scene, time: float, azimuth_steps: int, rng: np.random.Generator, beams: int = RINGS
) -> NDArray[np.float32]:
    """(P, 5) returns of one revolution at `time`: x, y, z (m, LiDAR frame), intensity 0..255, ring (0 is the lowest).

    The whole revolution is taken at one instant. Its first azimuth is random, so that successive sweeps fill each
    other's gaps.
    """
    phase = float(rng.uniform())
    rays = directions(azimuth_steps, phase, beams)
    lidar2global = scene.ego2global(time) @ LIDAR2EGO
    origin = lidar2global[:3, 3]
    # einsum does not go through BLAS, whose rounding may depend on its number of threads.
    cast_rays = np.einsum("ij,jrc->irc", lidar2global[:3, :3], rays)
    poses = scene.poses(time)
    windows = _windows(scene.boxes(poses), lidar2global, azimuth_steps, phase)
    hits = cast(origin, cast_rays, scene.solids, poses, windows, scene.ground, GROUND_ITERATIONS)
    seen = hits.distance < MAX_RANGE
    noise = np.clip(rng.standard_normal(seen.shape), -3, 3) * RANGE_NOISE
    points = (rays * np.where(seen, hits.distance + noise, 0.0))[:, seen]
    intensity = _reflectivity(scene, hits, cast_rays, origin)[seen] + 3.0 * rng.standard_normal(len(points[0]))
    rings = np.broadcast_to(np.arange(beams)[:, None], seen.shape)[seen]
    return np.stack([*points, np.clip(intensity, 0, 255).round(), rings], axis=1).astype(np.float32)


def directions(azimuth_steps: int, phase: float, beams: int) -> Array:
    """(3, beams, azimuth_steps) unit rays in the LiDAR frame, from its x axis counter-clockwise; `phase` in steps."""
    elevation = np.deg2rad(np.linspace(*ELEVATIONS, beams))[:, None]
    azimuth = (np.arange(azimuth_steps) + phase) * (2 * np.pi / azimuth_steps)
    flat = np.cos(elevation)
    up = np.broadcast_to(np.sin(elevation), (beams, azimuth_steps))
    return np.stack([flat * np.cos(azimuth), flat * np.sin(azimuth), up])


def _windows(boxes: Array, lidar2global: Array, steps: int, phase: float) -> list[Window | None]:
    """The columns in which each of the boxes (n, 7, global frame) lies; None beyond the range."""
    heading = np.arctan2(lidar2global[1, 0], lidar2global[0, 0])
    corners = box_corners(boxes)[:, :4, :2] - lidar2global[:2, 3]
    middle = boxes[:, :2] - lidar2global[:2, 3]
    bearing = np.arctan2(middle[:, 1], middle[:, 0])
    offsets = np.arctan2(corners[..., 1], corners[..., 0]) - bearing[:, None]
    offsets = (offsets + np.pi) % (2 * np.pi) - np.pi
    step = 2 * np.pi / steps
    first = np.floor((bearing - heading + offsets.min(axis=1)) / step - phase).astype(int)
    last = np.ceil((bearing - heading + offsets.max(axis=1)) / step - phase).astype(int)
    reachable = np.hypot(corners[..., 0], corners[..., 1]).min(axis=1) < MAX_RANGE + boxes[:, 3]
    return [
        (slice(None), np.arange(a, b + 1) % steps) if near else None
        for a, b, near in zip(first, last, reachable, strict=True)
    ]


def _reflectivity(scene: Scene, hits: Hits, rays: Array, origin: Array) -> Array:
    """(rows, columns) mean intensity of what was hit; 0 where nothing was."""
    solids = np.array([solid.reflectivity for solid in scene.solids])
    on_solid = hits.surface >= 0
    intensity = np.where(on_solid, solids[np.where(on_solid, hits.solid, 0)], 0.0)
    on_ground = hits.surface == GROUND
    x, y = origin[:2, None] + hits.distance[on_ground] * rays[:2, on_ground]
    intensity[on_ground] = REFLECTIVITY[scene.ground.material_at(x, y)]
    return intensity
