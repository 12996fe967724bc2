"""Triton kernels of the detection head's targets and losses; `bevctl.models.detection_loss` has them in plain torch.

Objects of all samples lie behind each other: those of sample b at `starts[b]` to `starts[b + 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch, sized
from bevctl.ops.kernels.matching import match
from bevctl.ops.kernels.rotated_iou import rotated_overlap

_BOX, _CODE = tl.constexpr(9), tl.constexpr(10)
_PAIRS = 128
_CELLS = 1024


@dataclass(frozen=True)
class Numbers:
    """What the kernels need to know besides tensors."""

    lower: tuple[float, float]
    """x, y of the grid's corner, m."""
    cell: tuple[float, float]
    """m"""
    extent: tuple[float, float]
    """m"""
    class_cost: float
    position_cost: float
    iou_cost: float
    min_overlap: float
    min_radius: int


@dataclass(frozen=True)
class Objects:
    """The objects of all samples behind each other."""

    boxes: Tensor
    """(N, 9) float32"""
    labels: Tensor
    """(N,) int64"""
    starts: Tensor
    """(B + 1,) int32 first object of each sample, and N."""
    counts: list[int]
    """Objects of each sample."""
    annotated: Tensor
    """(B,) uint8 0 where a sample weighs nothing."""


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0, tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _focal(signed, weight):
    """Focal loss (gamma 2) of a logit whose sign says what is right."""
    wrong = _sigmoid(-signed)
    return weight * _softplus(-signed) * wrong * wrong


@sized("queries", "classes", "objects")
def _cost_kernel(
    codes, logits, boxes, labels, starts, cost, iou, queries, classes, objects, lower_x, lower_y, cell_x, cell_y,
    extent_x, extent_y, CLASS_COST: tl.constexpr, POSITION_COST: tl.constexpr, IOU_COST: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Cost and IoU of every query with every object of its sample; (B, Q, M), 0 in the padding."""
    sample = tl.program_id(1).to(tl.int64)
    first = tl.load(starts + sample)
    count = tl.load(starts + sample + 1) - first
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    query, number = pair // objects, pair % objects
    inside = query < queries
    real = inside & (number < count)
    code = codes + (sample * queries + query) * _CODE
    box = boxes + (first + number) * _BOX

    x = tl.load(code, mask=real, other=0.0) * cell_x + lower_x
    y = tl.load(code + 1, mask=real, other=0.0) * cell_y + lower_y
    z = tl.load(code + 2, mask=real, other=0.0)
    length = tl.exp(tl.load(code + 3, mask=real, other=0.0))
    width = tl.exp(tl.load(code + 4, mask=real, other=0.0))
    height = tl.exp(tl.load(code + 5, mask=real, other=0.0))
    sin, cos = tl.load(code + 6, mask=real, other=0.0), tl.load(code + 7, mask=real, other=1.0)
    norm = tl.sqrt(sin * sin + cos * cos)
    sin, cos = tl.where(norm == 0, 0.0, sin / norm), tl.where(norm == 0, 1.0, cos / norm)

    object_x, object_y = tl.load(box, mask=real, other=0.0), tl.load(box + 1, mask=real, other=0.0)
    object_z, object_height = tl.load(box + 2, mask=real, other=0.0), tl.load(box + 5, mask=real, other=0.0)
    object_length, object_width = tl.load(box + 3, mask=real, other=0.0), tl.load(box + 4, mask=real, other=0.0)
    yaw = tl.load(box + 6, mask=real, other=0.0)
    area = rotated_overlap(
        x, y, length, width, cos, sin,
        object_x, object_y, object_length, object_width, tl.cos(yaw), tl.sin(yaw),
    )  # fmt: skip
    top = tl.minimum(z + height / 2, object_z + object_height / 2, tl.PropagateNan.ALL)
    bottom = tl.maximum(z - height / 2, object_z - object_height / 2, tl.PropagateNan.ALL)
    common = area * tl.maximum(top - bottom, 0.0, tl.PropagateNan.ALL)
    union = length * width * height + object_length * object_width * object_height - common
    overlap = tl.minimum(common / tl.maximum(union, 1e-8, tl.PropagateNan.ALL), 1.0, tl.PropagateNan.ALL)

    label = tl.load(labels + first + number, mask=real, other=0)
    logit = tl.load(logits + (sample * queries + query) * classes + label, mask=real, other=0.0)
    added = _focal(logit, 0.25) - _focal(-logit, 0.75)
    apart = tl.abs(x - object_x) / extent_x + tl.abs(y - object_y) / extent_y
    total = CLASS_COST * added + POSITION_COST * apart - IOU_COST * overlap
    place = (sample * queries + query) * objects + number
    tl.store(cost + place, tl.where(real, total, 0.0), mask=inside)
    tl.store(iou + place, tl.where(real, overlap, 0.0), mask=inside)


@sized("queries", "classes", "objects")
def _query_loss_kernel(
    codes, logits, boxes, labels, starts, annotated, matched, iou, code_weights, sums, code_grads, logit_grads,
    queries, classes, objects, lower_x, lower_y, cell_x, cell_y,
    QUERIES: tl.constexpr, CLASSES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Class and box loss of one sample, summed, with their gradients; and the sum of the matched pairs' IoU."""
    sample = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + sample)
    weight = tl.load(annotated + sample).to(tl.float32)
    query = tl.arange(0, QUERIES)
    inside = query < queries
    number = tl.load(matched + sample * queries + query, mask=inside, other=-1)
    is_matched = number >= 0
    overlap = tl.load(iou + (sample * queries + query) * objects + number, mask=is_matched, other=0.0)

    kind = tl.arange(0, CLASSES)
    mask = inside[:, None] & (kind < classes)[None, :]
    place = (sample * queries + query)[:, None] * classes + kind[None, :]
    label = tl.load(labels + first + number, mask=is_matched, other=-1)
    logit = tl.load(logits + place, mask=mask, other=0.0)
    is_label = label[:, None] == kind[None, :]
    signed = tl.where(is_label, logit, -logit)
    alpha = tl.where(is_label, 0.25, 0.75)
    wrong = _sigmoid(-signed)
    softplus = _softplus(-signed)
    class_loss = tl.where(mask, alpha * softplus * wrong * wrong * weight, 0.0)
    slope = -alpha * wrong * wrong * (wrong + 2.0 * softplus * (1.0 - wrong)) * weight
    tl.store(logit_grads + place, tl.where(is_label, slope, -slope), mask=mask)

    part = tl.arange(0, CODES)
    mask = inside[:, None] & (part < _CODE)[None, :]
    place = (sample * queries + query)[:, None] * _CODE + part[None, :]
    field = part - (part >= 7).to(tl.int32)  # sine and cosine both come from the yaw
    known = is_matched[:, None] & (part < _CODE)[None, :]
    value = tl.load(boxes + (first + number)[:, None] * _BOX + field[None, :], mask=known, other=0.0)
    is_x, is_y, is_size = (part == 0)[None, :], (part == 1)[None, :], ((part >= 3) & (part < 6))[None, :]
    target = tl.where(is_x, (value - lower_x) / cell_x, value)
    target = tl.where(is_y, (value - lower_y) / cell_y, target)
    target = tl.where(is_size, tl.log(tl.maximum(value, 1e-3, tl.PropagateNan.ALL)), target)
    target = tl.where((part == 6)[None, :], tl.sin(value), target)
    target = tl.where((part == 7)[None, :], tl.cos(value), target)
    known = known & (target == target)
    target = tl.where(known, target, 0.0)
    code = tl.load(codes + place, mask=mask, other=0.0)
    scale = tl.load(code_weights + part, mask=part < _CODE, other=0.0)[None, :] * known.to(tl.float32) * weight
    apart = code - target
    box_loss = tl.where(mask, tl.abs(apart) * scale, 0.0)  # 0 · NaN is NaN: a broken prediction shows in the loss
    direction = tl.where(apart > 0, 1.0, tl.where(apart < 0, -1.0, apart))
    tl.store(code_grads + place, direction * scale, mask=mask)

    pairs = tl.sum(is_matched.to(tl.float32), axis=0)
    tl.store(sums + sample * 3, tl.sum(class_loss))
    tl.store(sums + sample * 3 + 1, tl.sum(box_loss))
    tl.store(sums + sample * 3 + 2, tl.sum(overlap, axis=0) / tl.maximum(pairs, 1.0))


@triton.jit
def _radius(length, width, MIN_OVERLAP: tl.constexpr):
    """See `bevctl.models.targets.gaussian_radius`."""
    total, area = length + width, length * width
    first = (total + tl.sqrt(total * total - 4.0 * (area * (1 - MIN_OVERLAP) / (1 + MIN_OVERLAP)))) / 2
    second = (2 * total + tl.sqrt(4 * total * total - 16.0 * (area * (1 - MIN_OVERLAP)))) / 2
    b = -2 * MIN_OVERLAP * total
    third = (b + tl.sqrt(b * b - 16.0 * MIN_OVERLAP * (area * (MIN_OVERLAP - 1)))) / 2
    return tl.minimum(tl.minimum(first, second), third)


@sized("classes", "cells_x", "cells_y")
def _heatmap_loss_kernel(
    heatmap, boxes, labels, starts, annotated, sums, grads, classes, cells_x, cells_y,
    lower_x, lower_y, cell_x, cell_y, MIN_OVERLAP: tl.constexpr, MIN_RADIUS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Loss of a block of cells of one plane against targets made on the fly: sum, positives, and gradients."""
    plane = tl.program_id(0).to(tl.int64)
    sample, kind = plane // classes, plane % classes
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    inside = cell < cells_x * cells_y
    at_x, at_y = (cell // cells_y).to(tl.float32), (cell % cells_y).to(tl.float32)
    target = tl.zeros([CELLS], tl.float32)
    width, height = cells_x.to(tl.float32), cells_y.to(tl.float32)
    for number in range(tl.load(starts + sample), tl.load(starts + sample + 1)):
        if tl.load(labels + number) == kind:
            box = boxes + number * _BOX
            x, y = tl.floor((tl.load(box) - lower_x) / cell_x), tl.floor((tl.load(box + 1) - lower_y) / cell_y)
            radius = _radius(tl.load(box + 3) / cell_x, tl.load(box + 4) / cell_y, MIN_OVERLAP)
            radius = tl.maximum(tl.floor(radius), MIN_RADIUS)
            sigma = (2 * radius + 1) / 6
            apart_x, apart_y = at_x - x, at_y - y
            bump = tl.exp(-(apart_x * apart_x) / (2 * sigma * sigma)) * tl.exp(
                -(apart_y * apart_y) / (2 * sigma * sigma)
            )
            near = (tl.abs(apart_x) <= radius) & (tl.abs(apart_y) <= radius)
            in_grid = ((x >= 0.0) & (x < width) & (y >= 0.0) & (y < height)).to(tl.float32)
            target = tl.maximum(target, tl.where(near, bump, 0.0) * in_grid)

    weight = tl.load(annotated + sample).to(tl.float32)
    logit = tl.load(heatmap + plane * cells_x * cells_y + cell, mask=inside, other=0.0).to(tl.float32)
    raw = _sigmoid(logit)
    p = tl.minimum(tl.maximum(raw, 1e-4, tl.PropagateNan.ALL), 1 - 1e-4, tl.PropagateNan.ALL)
    log_p, log_q, q = tl.log(p), tl.log(1 - p), 1 - p
    is_peak = target == 1.0
    forgiven = (1 - target) * (1 - target)
    forgiven *= forgiven
    loss = tl.where(is_peak, -log_p * q * q, -log_q * p * p * forgiven) * weight
    slope = tl.where(is_peak, 2 * log_p * q - q * q / p, forgiven * (p * p / q - 2 * p * log_q))
    slope *= tl.where((raw >= 1e-4) & (raw <= 1 - 1e-4), raw * (1 - raw), 0.0 * raw) * weight
    tl.store(grads + plane * cells_x * cells_y + cell, slope, mask=inside)
    block = plane * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + block * 2, tl.sum(tl.where(inside, loss, 0.0), axis=0))
    tl.store(sums + block * 2 + 1, tl.sum(tl.where(inside & is_peak, weight, 0.0), axis=0))


def query_loss(
    codes: Tensor, logits: Tensor, objects: Objects, code_weights: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Matches queries to objects; sums of class loss, box loss and mean IoU (B, 3), and gradients of codes and logits.

    `codes` (B, Q, 10) and `logits` (B, Q, K) contiguous float32.
    """
    (batch, queries, _), classes = codes.shape, logits.shape[2]
    most = max(1, *objects.counts)
    cost, iou = (codes.new_empty(batch, queries, most) for _ in range(2))
    boxes, labels, starts = objects.boxes, objects.labels, objects.starts
    grid = (*numbers.lower, *numbers.cell)
    launch(
        _cost_kernel, (triton.cdiv(queries * most, _PAIRS), batch),
        codes, logits, boxes, labels, starts, cost, iou, queries, classes, most, *grid, *numbers.extent,
        CLASS_COST=numbers.class_cost, POSITION_COST=numbers.position_cost, IOU_COST=numbers.iou_cost, PAIRS=_PAIRS,
    )  # fmt: skip
    matched = match(cost, starts.diff())
    sums = codes.new_empty(batch, 3)
    code_grads, logit_grads = torch.empty_like(codes), torch.empty_like(logits)
    launch(
        _query_loss_kernel, (batch,),
        codes, logits, boxes, labels, starts, objects.annotated, matched, iou, code_weights, sums,
        code_grads, logit_grads, queries, classes, most, *grid,
        QUERIES=triton.next_power_of_2(queries), CLASSES=triton.next_power_of_2(classes), CODES=16, num_warps=8,
    )  # fmt: skip
    return sums, code_grads, logit_grads


def heatmap_loss(heatmap: Tensor, objects: Objects, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """(2,) sum of the loss and number of peaks of annotated samples, and the gradients of that sum.

    `heatmap` (B, K, X, Y) contiguous.
    """
    batch, classes, cells_x, cells_y = heatmap.shape
    blocks = triton.cdiv(cells_x * cells_y, _CELLS)
    sums = torch.empty(batch * classes * blocks, 2, device=heatmap.device)
    grads = torch.empty_like(heatmap, dtype=torch.float32)
    launch(
        _heatmap_loss_kernel, (batch * classes, blocks),
        heatmap, objects.boxes, objects.labels, objects.starts, objects.annotated, sums, grads, classes,
        cells_x, cells_y, *numbers.lower, *numbers.cell,
        MIN_OVERLAP=numbers.min_overlap, MIN_RADIUS=numbers.min_radius, CELLS=_CELLS,
    )  # fmt: skip
    return sums.sum(0), grads
