"""The two ways in which info files store boxes, told apart by the boxes themselves.

"lwh": x, y, z, l, w, h, yaw (mmdet3d since 1.0). "wlh": x, y, z, w, l, h, -yaw - π/2 (mmdet3d before 1.0,
mit-bevfusion, and the early 1.1 files that were converted from those). Nothing in the files names the convention.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bevctl.geometry import Array, wrap_angle

LONGER_THAN_WIDE = frozenset({"car", "truck", "bus", "trailer", "motorcycle", "bicycle"})
WIDER_THAN_LONG = frozenset({"barrier"})


def detect_convention(boxes: Iterable[tuple[Array, tuple[str, ...]]]) -> str | None:
    """ "lwh" or "wlh" by a vote of the objects whose shape is known; None without any such object.

    A box of NaN or infinite size has no vote.

    `boxes` are pairs of (n, ≥ 7) boxes as stored and their n class names.
    """
    first_longer = 0
    for rows, names in boxes:
        if len(rows) == 0:
            continue
        sizes = np.where(np.isfinite(rows[:, 3:5]).all(axis=1, keepdims=True), rows[:, 3:5], 0.0)
        sign = np.sign(sizes[:, 0] - sizes[:, 1])
        known = np.array([(n in LONGER_THAN_WIDE) - (n in WIDER_THAN_LONG) for n in names])
        first_longer += int(np.sum(sign * known))
    if first_longer == 0:
        return None
    return "lwh" if first_longer > 0 else "wlh"


def to_lwh(boxes: Array, convention: str) -> Array:
    """(n, 9) boxes in the project's convention, yaw in [-π, π); the argument is left alone."""
    rows = boxes.copy()
    if convention == "wlh":
        rows[:, 3:5] = boxes[:, [4, 3]]
        rows[:, 6] = -boxes[:, 6] - np.pi / 2
    rows[:, 6] = wrap_angle(rows[:, 6])
    return rows
