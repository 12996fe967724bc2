"""Overlap of rotated rectangles for other Triton kernels; see `bevctl.ops.rotated_iou`, which this follows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clamped(value, half):
    return tl.minimum(tl.maximum(value, -half, tl.PropagateNan.ALL), half, tl.PropagateNan.ALL)


@triton.jit
def _crossing(start, step, side):
    """Where an edge crosses the line at `side`, as a share of the edge, 0..1."""
    safe = tl.where(tl.abs(step) < 1e-12, 1.0, step)
    share = (side - start) / safe
    return tl.minimum(tl.maximum(share, 0.0, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)


@triton.jit
def _to_point(twice_area, x, y, share, start_x, start_y, step_x, step_y, half_x, half_y):
    """Moves the clamped curve on from (x, y) to the point at `share` of an edge; adds to its shoelace sum."""
    next_x = _clamped(start_x + share * step_x, half_x)
    next_y = _clamped(start_y + share * step_y, half_y)
    return twice_area + x * next_y - y * next_x, next_x, next_y


@triton.jit
def _along_edge(twice_area, x, y, start_x, start_y, end_x, end_y, half_x, half_y):
    step_x, step_y = end_x - start_x, end_y - start_y
    a, b = _crossing(start_x, step_x, half_x), _crossing(start_x, step_x, -half_x)
    c, d = _crossing(start_y, step_y, half_y), _crossing(start_y, step_y, -half_y)
    low, high = tl.minimum(a, b), tl.maximum(a, b)
    low_y, high_y = tl.minimum(c, d), tl.maximum(c, d)
    first, third = tl.minimum(low, low_y), tl.maximum(low, low_y)
    second, fourth = tl.minimum(high, high_y), tl.maximum(high, high_y)
    second, third = tl.minimum(second, third), tl.maximum(second, third)
    twice_area, x, y = _to_point(twice_area, x, y, first, start_x, start_y, step_x, step_y, half_x, half_y)
    twice_area, x, y = _to_point(twice_area, x, y, second, start_x, start_y, step_x, step_y, half_x, half_y)
    twice_area, x, y = _to_point(twice_area, x, y, third, start_x, start_y, step_x, step_y, half_x, half_y)
    twice_area, x, y = _to_point(twice_area, x, y, fourth, start_x, start_y, step_x, step_y, half_x, half_y)
    return _to_point(twice_area, x, y, 1.0, start_x, start_y, step_x, step_y, half_x, half_y)


@triton.jit
def rotated_overlap(x, y, length, width, cos, sin, frame_x, frame_y, frame_length, frame_width, frame_cos, frame_sin):
    """Common area of two rectangles given by centre, size and direction; all of one shape, float32."""
    centre_x = frame_cos * (x - frame_x) + frame_sin * (y - frame_y)
    centre_y = frame_cos * (y - frame_y) - frame_sin * (x - frame_x)
    turn_cos, turn_sin = cos * frame_cos + sin * frame_sin, sin * frame_cos - cos * frame_sin
    along_x, along_y = turn_cos * length / 2, turn_sin * length / 2
    across_x, across_y = -turn_sin * width / 2, turn_cos * width / 2
    x0, y0 = centre_x + along_x + across_x, centre_y + along_y + across_y
    x1, y1 = centre_x - along_x + across_x, centre_y - along_y + across_y
    x2, y2 = centre_x - along_x - across_x, centre_y - along_y - across_y
    x3, y3 = centre_x + along_x - across_x, centre_y + along_y - across_y
    half_x, half_y = frame_length / 2, frame_width / 2
    px, py = _clamped(x0, half_x), _clamped(y0, half_y)
    twice_area = px * 0.0
    twice_area, px, py = _along_edge(twice_area, px, py, x0, y0, x1, y1, half_x, half_y)
    twice_area, px, py = _along_edge(twice_area, px, py, x1, y1, x2, y2, half_x, half_y)
    twice_area, px, py = _along_edge(twice_area, px, py, x2, y2, x3, y3, half_x, half_y)
    twice_area, px, py = _along_edge(twice_area, px, py, x3, y3, x0, y0, half_x, half_y)
    return tl.maximum(twice_area / 2, 0.0, tl.PropagateNan.ALL)
