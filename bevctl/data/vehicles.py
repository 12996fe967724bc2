"""The map class that comes from the boxes of a sample: where vehicles stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bevctl.data.info import SampleInfo
from bevctl.geometry import Array, invert_rigid, transform_boxes

VEHICLES = frozenset({"car", "truck", "construction_vehicle", "bus", "trailer", "motorcycle", "bicycle"})

Bound = tuple[float, float, float]
"""Lower end, upper end and cell, m."""


def vehicle_mask(info: SampleInfo, frame: Array, xbound: Bound, ybound: Bound) -> NDArray[np.uint8] | None:
    """(X, Y) 0/1: cells whose centre lies on an annotated vehicle, one that no LiDAR point fell on too.

    `frame` (4, 4) maps the LiDAR frame to that of the mask. None where the sample is not annotated.
    """
    if info.boxes is None:
        return None
    rows = [box for box, name in zip(info.boxes, info.names, strict=True) if name in VEHICLES]
    return fill_boxes(transform_boxes(frame, np.reshape(rows, (-1, 9))), xbound, ybound)


def around_ego(info: SampleInfo) -> Array:
    """(4, 4) LiDAR frame → the same axes around the ego vehicle's origin, which lies below its rear axle."""
    shift = np.eye(4)
    shift[:2, 3] = -invert_rigid(info.lidar2ego)[:2, 3]
    return shift


def fill_boxes(boxes: ArrayLike, xbound: Bound, ybound: Bound) -> NDArray[np.uint8]:
    """(X, Y) 0/1 of the cells whose centre lies in one of (n, ≥ 7) boxes as seen from above."""
    x, y = _centres(xbound), _centres(ybound)
    mask = np.zeros((len(x), len(y)), dtype=np.uint8)
    for box in np.asarray(boxes, dtype=np.float64):
        centre, (length, width), yaw = box[:2], box[3:5], box[6]
        reach = np.hypot(length, width) / 2
        columns = slice(*np.searchsorted(x, (centre[0] - reach, centre[0] + reach)))
        rows = slice(*np.searchsorted(y, (centre[1] - reach, centre[1] + reach)))
        dx, dy = x[columns, None] - centre[0], y[None, rows] - centre[1]
        c, s = np.cos(yaw), np.sin(yaw)
        inside = (np.abs(c * dx + s * dy) <= length / 2) & (np.abs(c * dy - s * dx) <= width / 2)
        mask[columns, rows] |= inside.astype(np.uint8)
    return mask


def _centres(bound: Bound) -> Array:
    low, high, cell = bound
    return low + (np.arange(round((high - low) / cell)) + 0.5) * cell
