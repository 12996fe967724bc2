"""One scene: where the ego vehicle drives and where everything is at any time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bevctl.data.synth.crowd import footprints
from bevctl.data.synth.ground import Ground
from bevctl.data.synth.objects import Solid
from bevctl.data.synth.placement import populate
from bevctl.data.synth.road import REACH, Layout, Road, make_layout
from bevctl.geometry import rigid, rotation_z

Array = NDArray[np.float64]

KEYFRAME_PERIOD = 0.5
"""s; nuScenes annotates at 2 Hz."""
EGO_SPEEDS = (4.5, 7.5)
CURVATURES = (1 / 900, 1 / 220)
"""Smallest and largest bend, 1/m, to either side."""
TILES_PER_ROW = 5


@dataclass(frozen=True)
class Scene:
    """A piece of road with its traffic; time 0 is the first keyframe."""

    name: str
    location: str
    layout: Layout
    ground: Ground
    solids: tuple[Solid, ...]
    ego_speed: float
    """m/s along the reference line."""

    def ego2global(self, time: float) -> Array:
        """(4, 4) pose of the ego vehicle; it stays level at height 0."""
        s = self.ego_speed * time
        x, y = self.layout.road.point(s, 0.0)
        return rigid(rotation_z(float(self.layout.road.heading_at(s))), (x, y, 0.0))

    def poses(self, time: float) -> Array:
        """(n, 4) x, y, z of each solid's foot (m, global) and its yaw (rad)."""
        rows = footprints(list(self.solids), self.layout.road, np.array([time]))[:, 0]
        z = self.ground.height_at(rows[:, 0], rows[:, 1])
        return np.stack([rows[:, 0], rows[:, 1], z, rows[:, 2]], axis=1)

    def boxes(self, poses: Array) -> Array:
        """(n, 7) x, y, z of the gravity centre, length, width, height, yaw of each solid standing at `poses`."""
        sizes = np.array([solid.size for solid in self.solids])
        return np.column_stack([poses[:, :2], poses[:, 2] + sizes[:, 2] / 2, sizes, poses[:, 3]])


@dataclass(frozen=True)
class ScenePlan:
    """Which scene to make: `number` counts the scenes of the set, `tile` those of the same location."""

    name: str
    number: int
    location: str
    tile: int


def tile_size(keyframes: int) -> float:
    """Side of the square of map that one scene takes, m; holds the fastest drive of `keyframes` keyframes."""
    return 2 * (REACH + 20.0) + EGO_SPEEDS[1] * duration(keyframes)


def duration(keyframes: int) -> float:
    """Time from the first to the last keyframe, s."""
    return (keyframes - 1) * KEYFRAME_PERIOD


def make_scene(plan: ScenePlan, seed: int, keyframes: int) -> Scene:
    """The scene of a plan; depends on nothing but the arguments."""
    rng = np.random.default_rng([seed, plan.number])
    speed = float(rng.uniform(*EGO_SPEEDS))
    travel = speed * duration(keyframes)
    curvature = float(rng.uniform(*CURVATURES)) * (int(rng.integers(2)) * 2 - 1)
    heading = float(rng.uniform(-np.pi, np.pi))
    side = tile_size(keyframes)
    centred = Road(0.0, 0.0, heading, curvature)
    row, column = divmod(plan.tile, TILES_PER_ROW)
    start = np.array([side * (column + 0.5), side * (row + 0.5)]) - centred.point(travel / 2, 0.0)
    road = Road(float(start[0]), float(start[1]), heading, curvature)
    layout = make_layout(road, travel, rng)
    solids = populate(layout, speed, duration(keyframes), rng)
    return Scene(plan.name, plan.location, layout, Ground(layout, rng), tuple(solids), speed)
