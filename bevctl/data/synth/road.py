"""The road of a scene: a curve of constant curvature with strips along it, described in road coordinates.

Road coordinates are (s, t): s metres along the reference line (the ego lane's centre), t metres to its left.
A rectangle in (s, t) is an outline in the map, paint in the images and a surface for the LiDAR: one geometry for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LANE_WIDTH = 3.5
SHOULDER_WIDTH = 3.0
WALKWAY_WIDTH = 3.5
CROSSING_LENGTH = 4.0
STOP_LINE_LENGTH = 1.0
REACH = 110.0
"""How far the road goes on before the first and after the last ego position, m."""
CHORD = 2.5
"""Length of the chords that approximate the curve, m; they stay within 6 mm of it."""


@dataclass(frozen=True)
class Road:
    """The reference line: starts at (x, y) with `heading` (rad) and turns left by `curvature` (1/m)."""

    x: float
    y: float
    heading: float
    curvature: float

    def heading_at(self, s: ArrayLike) -> Array:
        """Direction of the reference line at s, rad."""
        return self.heading + self.curvature * np.asarray(s, dtype=np.float64)

    def point(self, s: ArrayLike, t: ArrayLike) -> Array:
        """(..., 2) global x, y of road coordinates; s and t broadcast."""
        s, t = np.broadcast_arrays(np.asarray(s, dtype=np.float64), np.asarray(t, dtype=np.float64))
        # The chord of an arc of length s: stable for a straight road too.
        chord = s * np.sinc(self.curvature * s / (2 * np.pi))
        chord_heading = self.heading + self.curvature * s / 2
        heading = self.heading_at(s)
        x = self.x + chord * np.cos(chord_heading) - t * np.sin(heading)
        y = self.y + chord * np.sin(chord_heading) + t * np.cos(heading)
        return np.stack([x, y], axis=-1)


@dataclass(frozen=True)
class Area:
    """A rectangle in road coordinates that belongs to one layer of the map."""

    layer: str
    s: tuple[float, float]
    t: tuple[float, float]

    def outline(self, road: Road) -> Array:
        """(n, 2) global x, y, counter-clockwise, not closed."""
        along = _stations(self.s)
        right = road.point(along, self.t[0])
        left = road.point(along[::-1], self.t[1])
        return np.concatenate([right, left])


@dataclass(frozen=True)
class Divider:
    """A marking along the road at constant t; `layer` is road_divider (between directions) or lane_divider."""

    layer: str
    s: tuple[float, float]
    t: float

    def chords(self, road: Road) -> Array:
        """(n, 2, 2) straight pieces.

        Pieces, because the devkit's mask of a bent line fails with shapely 2 when the patch cuts it in two.
        """
        points = road.point(_stations(self.s), self.t)
        return np.stack([points[:-1], points[1:]], axis=1)


@dataclass(frozen=True)
class Lane:
    """A lane with centre t; `direction` is +1 along s or -1 against it."""

    t: float
    direction: int


@dataclass(frozen=True)
class Layout:
    """Everything on the ground of one scene."""

    road: Road
    travel: float
    """How far the ego vehicle drives, from s = 0, m."""
    lanes: tuple[Lane, ...]
    shoulders: tuple[Lane, ...]
    walkways: tuple[tuple[float, float], ...]
    """t range of each walkway, right one first."""
    areas: tuple[Area, ...]
    dividers: tuple[Divider, ...]

    def layer(self, name: str) -> list[Area]:
        """The areas of one map layer."""
        return [area for area in self.areas if area.layer == name]

    @property
    def ends(self) -> tuple[float, float]:
        """First and last s of the road."""
        return -REACH, self.travel + REACH


def _stations(s: tuple[float, float]) -> Array:
    return np.linspace(s[0], s[1], max(2, int(np.ceil((s[1] - s[0]) / CHORD)) + 1))


def make_layout(road: Road, travel: float, rng: np.random.Generator) -> Layout:
    """Lanes, shoulders, walkways, crossings with stop lines, a car park and dividers, drawn from `rng`."""
    same, opposite = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    right = -LANE_WIDTH * (same - 0.5)
    left = LANE_WIDTH * (opposite + 0.5)
    lanes = tuple(Lane(LANE_WIDTH * i, 1 if i <= 0 else -1) for i in range(1 - same, opposite + 1))
    edges = (right - SHOULDER_WIDTH, left + SHOULDER_WIDTH)
    shoulders = (Lane(edges[0] + SHOULDER_WIDTH / 2, 1), Lane(edges[1] - SHOULDER_WIDTH / 2, -1))
    walkways = ((edges[0] - WALKWAY_WIDTH, edges[0]), (edges[1], edges[1] + WALKWAY_WIDTH))
    ends = (-REACH, travel + REACH)
    crossings = _crossings(travel, ends, edges, rng)
    lane_areas = [Area("lane", ends, (lane.t - LANE_WIDTH / 2, lane.t + LANE_WIDTH / 2)) for lane in lanes]
    areas = [
        Area("drivable_area", ends, edges),
        *lane_areas,
        *(Area("walkway", ends, t) for t in walkways),
        *_car_parks(travel, walkways, rng),
        *crossings,
        *_stop_lines(crossings, (right, left)),
    ]
    return Layout(road, travel, lanes, shoulders, walkways, tuple(areas), _dividers(lanes, crossings, ends))


def _crossings(
    travel: float, ends: tuple[float, float], edges: tuple[float, float], rng: np.random.Generator
) -> list[Area]:
    """One about every 45 m, so that each sample sees one."""
    first = float(rng.uniform(0.3, 0.7)) * min(travel, 30.0)
    before = np.arange(first, ends[0] + 10, -45.0)[::-1]
    after = np.arange(first + 45.0, ends[1] - 10, 45.0)
    starts = np.concatenate([before, after]) + rng.uniform(-3, 3, len(before) + len(after))
    return [Area("ped_crossing", (float(s), float(s) + CROSSING_LENGTH), edges) for s in starts]


def _stop_lines(crossings: list[Area], lanes: tuple[float, float]) -> list[Area]:
    """One before each crossing for each direction, a metre away from it."""
    right, left, middle = lanes[0], lanes[1], LANE_WIDTH / 2
    lines = []
    for crossing in crossings:
        first, last = crossing.s
        lines.append(Area("stop_line", (first - 1 - STOP_LINE_LENGTH, first - 1), (right, middle)))
        lines.append(Area("stop_line", (last + 1, last + 1 + STOP_LINE_LENGTH), (middle, left)))
    return lines


def _car_parks(travel: float, walkways: tuple[tuple[float, float], ...], rng: np.random.Generator) -> list[Area]:
    """One on each side of the road, beyond the walkway, repeated along a long drive."""
    parks = []
    for side, walkway in zip((-1, 1), walkways, strict=True):
        start = float(rng.uniform(-20, -5))
        while start < travel + 15:
            depth = float(rng.uniform(14, 17))
            t = (walkway[0] - depth, walkway[0]) if side < 0 else (walkway[1], walkway[1] + depth)
            end = start + float(rng.uniform(26, 34))
            parks.append(Area("carpark_area", (start, end), t))
            start = end + float(rng.uniform(30, 40))
    return parks


def _dividers(lanes: tuple[Lane, ...], crossings: list[Area], ends: tuple[float, float]) -> tuple[Divider, ...]:
    """Between neighbouring lanes, left out on the crossings."""
    gaps = [ends[0], *(edge for crossing in crossings for edge in crossing.s), ends[1]]
    dividers = []
    for right, left in pairwise(lanes):
        layer = "road_divider" if right.direction != left.direction else "lane_divider"
        for start, end in zip(gaps[::2], gaps[1::2], strict=True):
            dividers.append(Divider(layer, (start, end), (right.t + left.t) / 2))
    return tuple(dividers)
