"""Overlap of rotated boxes, exact and without branches."""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT_CORNERS = ((0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5), (0.5, -0.5))


def rotated_iou_3d(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Volume IoU of boxes (..., ≥ 7): x, y, z (centre), l, w, h (m), yaw (rad about z); leading axes broadcast.

    For all pairs of (n, 7) and (m, 7) pass `a[:, None]` and `b`. Returns values in 0..1, 0 where both boxes are empty.
    """
    height = (
        torch.minimum(boxes_a[..., 2] + boxes_a[..., 5] / 2, boxes_b[..., 2] + boxes_b[..., 5] / 2)
        - torch.maximum(boxes_a[..., 2] - boxes_a[..., 5] / 2, boxes_b[..., 2] - boxes_b[..., 5] / 2)
    ).clamp(min=0)
    intersection = rotated_overlap_bev(_rectangles(boxes_a), _rectangles(boxes_b)) * height
    union = boxes_a[..., 3:6].prod(-1) + boxes_b[..., 3:6].prod(-1) - intersection
    return (intersection / union.clamp(min=1e-8)).clamp(max=1)


def rotated_overlap_bev(rectangles_a: Tensor, rectangles_b: Tensor) -> Tensor:
    """Common area (m²) of rectangles (..., 5): x, y, l, w, yaw; leading axes broadcast.

    The boundary of A, in the frame of B, is clamped into B coordinate by coordinate. Clamping moves only what lies
    outside B, and moves it onto B's border, so that the closed curve still winds once around each point of A ∩ B and
    around nothing else: its shoelace area is the overlap. Unlike clipping with case distinctions it is continuous in
    its inputs, also where edges coincide.
    """
    corners = _corners_in_frame(rectangles_a, rectangles_b)
    half = rectangles_b[..., None, None, 2:4] / 2
    start = corners[..., :, None, :]
    step = corners.roll(-1, dims=-2)[..., :, None, :] - start
    curve = torch.minimum(torch.maximum(start + _breakpoints(start, step, half) * step, -half), half)
    curve = curve.flatten(-3, -2)
    following = curve.roll(-1, dims=-2)
    twice_area = curve[..., 0] * following[..., 1] - curve[..., 1] * following[..., 0]
    return (twice_area.sum(-1) / 2).clamp(min=0)


def _rectangles(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[..., 0:2], boxes[..., 3:5], boxes[..., 6:7]], dim=-1)


def _corners_in_frame(rectangles: Tensor, frame: Tensor) -> Tensor:
    """(..., 4, 2) corners of `rectangles`, counter-clockwise, with the centre of `frame` as origin and its yaw as x."""
    x, y, length, width, yaw = rectangles.unbind(-1)
    frame_x, frame_y, _, _, frame_yaw = frame.unbind(-1)
    cos, sin = frame_yaw.cos(), frame_yaw.sin()
    centre_x = cos * (x - frame_x) + sin * (y - frame_y)
    centre_y = cos * (y - frame_y) - sin * (x - frame_x)
    cos, sin = (yaw - frame_yaw).cos(), (yaw - frame_yaw).sin()
    corners = [
        torch.stack(
            [
                centre_x + cos * along * length - sin * across * width,
                centre_y + sin * along * length + cos * across * width,
            ],
            dim=-1,
        )
        for along, across in _UNIT_CORNERS
    ]
    return torch.stack(corners, dim=-2)


def _breakpoints(start: Tensor, step: Tensor, half: Tensor) -> Tensor:
    """(..., 4, 5, 1) ascending positions 0..1 on each edge where the clamped edge may bend, with its start.

    `start` and `step` are (..., 4, 1, 2), `half` (..., 1, 1, 2). A position that is no crossing (an edge parallel to
    the side, or one that ends before it) adds a point on a straight piece, which changes nothing.
    """
    safe = torch.where(step.abs() < 1e-12, torch.ones_like(step), step)
    crossings = torch.cat([(half - start) / safe, (-half - start) / safe], dim=-1).clamp(0, 1)
    ordered = crossings.sort(dim=-1).values
    return torch.cat([torch.zeros_like(ordered[..., :1]), ordered], dim=-1).transpose(-1, -2)
