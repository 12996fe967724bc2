"""Keeps things apart: footprints of moving solids, whether they ever touch, whether they hide each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bevctl.data.synth.objects import Solid
from bevctl.data.synth.road import Layout, Road

Array = NDArray[np.float64]

TIME_STEP = 0.1
"""Between the times at which footprints are compared, s."""
VIEW_STRIDE = 4
"""Time steps between looks at what is in view."""
CLEARANCE = 0.35
"""Least distance kept between two footprints, m."""
LEAST_VIEW = 0.65
"""Share of a scene's time in which the middle of an annotated object should be in view."""
FAR = 35.0
"""Distance from the ego vehicle from which the view doesn't matter, m."""
LOW = 1.3
"""Height up to which nothing is hidden behind an object, m: the LiDAR looks over it."""
EGO_BOX_AHEAD = 1.4
"""Middle of the ego vehicle ahead of its rear axle, m."""


def footprints(solids: list[Solid], road: Road, times: Array) -> Array:
    """(n, T, 5) x, y, yaw, length, width of solids at `times`."""
    if not solids:
        return np.zeros((0, len(times), 5))
    rows = np.array([(a.s, a.t, a.turn, a.speed, a.size[0], a.size[1]) for a in solids])[:, None, :]
    s, t, turn, speed, length, width = np.moveaxis(rows, -1, 0)
    # An object at lateral offset t covers more or less road per metre of its own way.
    s = s + times * speed * np.cos(turn) / (1 - road.curvature * t)
    t = t + times * speed * np.sin(turn)
    yaw = road.heading_at(s) + turn
    position = road.point(s, t)
    length, width = np.broadcast_to(length, yaw.shape), np.broadcast_to(width, yaw.shape)
    return np.concatenate([position, np.stack([yaw, length, width], axis=-1)], axis=-1)


def overlaps(one: Array, others: Array, clearance: float) -> NDArray[np.bool_]:
    """(n,) whether the moving rectangle `one` (T, 5) ever comes closer than `clearance` to each of `others` (n, T, 5).

    Separating axes: two rectangles are apart if the shadow of one on some edge direction is clear of the other's. The
    distance is measured along these axes, which is at most the true one.
    """
    offset = others[..., :2] - one[:, :2]
    radii = np.hypot(others[..., 3], others[..., 4]) / 2 + np.hypot(one[:, 3], one[:, 4]) / 2
    touching = (np.hypot(offset[..., 0], offset[..., 1]) <= radii + clearance).any(axis=1)
    others, offset = others[touching], offset[touching]
    apart = np.zeros(others.shape[:2], dtype=bool)
    for yaw in (one[:, 2], one[:, 2] + np.pi / 2, others[..., 2], others[..., 2] + np.pi / 2):
        distance = np.abs(offset[..., 0] * np.cos(yaw) + offset[..., 1] * np.sin(yaw))
        reach = sum(
            np.abs(np.cos(box[..., 2] - yaw)) * box[..., 3] / 2 + np.abs(np.sin(box[..., 2] - yaw)) * box[..., 4] / 2
            for box in (one, others)
        )
        apart |= distance > reach + clearance
    touching[touching] = ~apart.all(axis=1)
    return touching


def blocks_view(eye: Array, targets: Array, boxes: Array) -> NDArray[np.bool_]:
    """(..., T) whether the line from `eye` (T, 2) to the middle of `targets` (..., T, 5) meets `boxes` (..., T, 5)."""
    yaw = boxes[..., 2]
    c, s = np.cos(yaw), np.sin(yaw)
    start, way = eye - boxes[..., :2], targets[..., :2] - eye
    enter, leave = np.zeros(yaw.shape), np.ones(yaw.shape)
    for axis_x, axis_y, half in ((c, s, boxes[..., 3] / 2), (-s, c, boxes[..., 4] / 2)):
        origin = axis_x * start[..., 0] + axis_y * start[..., 1]
        step = axis_x * way[..., 0] + axis_y * way[..., 1]
        step = np.where(np.abs(step) < 1e-9, 1e-9, step)
        low, high = (-half - origin) / step, (half - origin) / step
        enter = np.maximum(enter, np.minimum(low, high))
        leave = np.minimum(leave, np.maximum(low, high))
    blocked: NDArray[np.bool_] = enter < leave
    return blocked


def _is_far(eye: Array, targets: Array) -> NDArray[np.bool_]:
    """(..., T) whether `targets` (..., T, 5) are too far from `eye` (T, 2) for the view of them to matter."""
    far: NDArray[np.bool_] = np.hypot(targets[..., 0] - eye[:, 0], targets[..., 1] - eye[:, 1]) > FAR
    return far


class Crowd:
    """Solids that keep clear of each other and leave the ego vehicle a view of each annotated one."""

    def __init__(self, layout: Layout, ego_speed: float, duration: float) -> None:
        self.layout = layout
        self.ego_speed = ego_speed
        self.duration = duration
        self.solids: list[Solid] = []
        self._times = np.linspace(-0.2, duration + 0.2, int(np.ceil((duration + 0.4) / TIME_STEP)) + 1)
        nothing = np.zeros((0, 6)), np.zeros((0, 3), dtype=np.uint8)
        ego = Solid("ego", (5.2, 2.2, 1.7), *nothing, 0.0, EGO_BOX_AHEAD, 0.0, 0.0, ego_speed)
        self._taken = footprints([ego], layout.road, self._times)
        self._eye = self._taken[0, ::VIEW_STRIDE, :2]
        self._targets = np.zeros((0, len(self._eye), 5))
        self._in_view = np.zeros((0, len(self._eye)), dtype=bool)
        self._screens = np.zeros((0, len(self._eye), 5))

    def add(self, solid: Solid, *, keep_view: bool = True) -> bool:
        """Add the solid unless it comes too close to another one; says whether it was added.

        With `keep_view`, an annotated solid is turned down too if it is hidden, or hides another one, for too long.
        """
        footprint = footprints([solid], self.layout.road, self._times)
        if overlaps(footprint[0], self._taken, CLEARANCE).any():
            return False
        if solid.is_annotated and not self._look(solid, footprint[:, ::VIEW_STRIDE], keep_view):
            return False
        self.solids.append(solid)
        self._taken = np.concatenate([self._taken, footprint])
        return True

    def _look(self, solid: Solid, footprint: Array, keep_view: bool) -> bool:
        """Note the solid as seen from the ego vehicle, unless the view is to be kept and would suffer."""
        own = ~blocks_view(self._eye, footprint, self._screens).any(axis=0) | _is_far(self._eye, footprint[0])
        others = self._in_view.copy()
        if solid.size[2] > LOW:
            others &= ~blocks_view(self._eye, self._targets, footprint) | _is_far(self._eye, self._targets)
        spoilt = (others.mean(axis=1) < LEAST_VIEW) & (self._in_view.mean(axis=1) >= LEAST_VIEW)
        if keep_view and (spoilt.any() or own.mean() < LEAST_VIEW):
            return False
        self._targets = np.concatenate([self._targets, footprint])
        self._in_view = np.concatenate([others, own[None]])
        if solid.size[2] > LOW:
            self._screens = np.concatenate([self._screens, footprint])
        return True
