"""What the detection head should have said: matched boxes and the heatmap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bevctl.models.box_coder import BevGrid, decode, encode
from bevctl.models.losses import sigmoid_focal_loss
from bevctl.ops.matching import match
from bevctl.ops.rotated_iou import rotated_iou_3d

CLASS_COST, POSITION_COST, IOU_COST = 0.15, 0.25, 0.25
MIN_OVERLAP = 0.1
"""IoU that a box moved by the heatmap radius keeps."""
MIN_RADIUS = 2


@dataclass(frozen=True)
class MatchedTargets:
    """Targets of B × Q queries that were matched with objects."""

    classes: Tensor
    """(B, Q, K) 0/1: class of the matched object, all zero for background."""
    codes: Tensor
    """(B, Q, 10) code of the matched object, 0 for background."""
    code_mask: Tensor
    """(B, Q, 10) 1 where `codes` counts: matched, and known (a NaN velocity is not)."""


@dataclass(frozen=True)
class QueryTargets(MatchedTargets):
    """Targets of TransFusion's queries."""

    positives: int
    """Number of matched queries."""
    mean_iou: Tensor
    """() mean over samples of the mean 3D IoU of their matched pairs."""


def query_targets(
    codes: Tensor, logits: Tensor, boxes: Sequence[Tensor], labels: Sequence[Tensor], grid: BevGrid
) -> QueryTargets:
    """Match queries one-to-one to objects and collect their targets; nothing here is differentiated.

    `codes` (B, Q, 10) are predicted boxes, `logits` (B, Q, K) their classes; `boxes` B × (n_i, 9) and `labels`
    B × (n_i,) the objects.
    """
    codes, logits = codes.detach(), logits.detach()
    counts = [len(sample_boxes) for sample_boxes in boxes]
    decoded = decode(codes, grid)
    padded_boxes = padded(boxes).float()
    padded_labels = padded(labels)
    iou = rotated_iou_3d(decoded[:, :, None, :7], padded_boxes[:, None, :, :7])
    cost = (
        CLASS_COST * class_cost(logits, padded_labels)
        + POSITION_COST * position_cost(decoded, padded_boxes, grid)
        - IOU_COST * iou
    )
    matched = match(cost, counts)
    targets = matched_targets(matched, padded_labels, encode(padded_boxes, grid), logits.shape[2])
    is_matched, partner = matched >= 0, matched.clamp(min=0)
    overlap = torch.where(is_matched, iou.gather(2, partner[..., None])[..., 0], 0)
    return QueryTargets(
        targets.classes,
        targets.codes,
        targets.code_mask,
        positives=sum(min(count, codes.shape[1]) for count in counts),
        mean_iou=(overlap.sum(1) / is_matched.sum(1).clamp(min=1)).mean(),
    )


def matched_targets(matched: Tensor, labels: Tensor, objects: Tensor, classes: int) -> MatchedTargets:
    """Targets of queries of which `matched` (B, Q) gives the object of each, or -1.

    `labels` (B, M) and `objects` (B, M, 10) are the objects' classes and codes.
    """
    is_matched, partner = matched >= 0, matched.clamp(min=0)
    codes = objects.gather(1, partner[..., None].expand(-1, -1, objects.shape[2]))
    known = is_matched[..., None] & ~codes.isnan()
    label = labels.gather(1, partner)
    named = label[..., None] == torch.arange(classes, device=label.device)
    return MatchedTargets(
        classes=(named & is_matched[..., None]).float(),
        codes=torch.where(known, codes, 0),
        code_mask=known.float(),
    )


def padded(rows: Sequence[Tensor]) -> Tensor:
    """B × (n_i, …) → (B, max n, …) with zeros behind, at least one row."""
    padded = pad_sequence(list(rows), batch_first=True)
    return padded if padded.shape[1] else padded.new_zeros(padded.shape[0], 1, *padded.shape[2:])


def class_cost(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, Q, M) focal loss that calling query q (logits (B, Q, K)) an object of class labels (B, M) adds."""
    ones = torch.ones_like(logits)
    added = sigmoid_focal_loss(logits, ones) - sigmoid_focal_loss(logits, 0 * ones)
    return added.gather(2, labels[:, None].expand(-1, logits.shape[1], -1))


def position_cost(predicted: Tensor, boxes: Tensor, grid: BevGrid) -> Tensor:
    """(B, Q, M) L1 distance in x and y of (B, Q, ≥ 2) and (B, M, ≥ 2) boxes, in extents of the grid."""
    x, y = (predicted[:, :, None, axis] - boxes[:, None, :, axis] for axis in (0, 1))
    extent_x, extent_y = (grid.upper[axis] - grid.lower[axis] for axis in (0, 1))
    return x.abs() / extent_x + y.abs() / extent_y


def gaussian_radius(length: Tensor, width: Tensor, min_overlap: float) -> Tensor:
    """Largest shift, in cells, of the corners of a box (`length` × `width` cells) that keeps an IoU of `min_overlap`.

    The smallest over the three cases of Law & Deng (ECCV 2018), in the form that CenterPoint and its successors train
    with: the quadratic formula divided by 2 instead of 2a.
    """
    total, area = length + width, length * width
    cases = (
        (1.0, total, area * (1 - min_overlap) / (1 + min_overlap)),
        (4.0, 2 * total, area * (1 - min_overlap)),
        (4 * min_overlap, -2 * min_overlap * total, area * (min_overlap - 1)),
    )
    roots = [(b + (b * b - 4 * a * c).sqrt()) / 2 for a, b, c in cases]
    return torch.stack(roots).amin(0)


def heatmap_targets(boxes: Sequence[Tensor], labels: Sequence[Tensor], classes: int, grid: BevGrid) -> Tensor:
    """(B, K, X, Y) heatmap: a Gaussian around each object's cell in its class, the larger value where two meet.

    `boxes` are B × (n_i, 9), `labels` B × (n_i,). Objects whose centre lies outside the grid leave no mark.
    """
    batch, (cells_x, cells_y) = len(boxes), grid.shape
    flat = torch.cat(list(boxes)).float()
    sample = torch.cat([torch.full_like(sample_labels, i) for i, sample_labels in enumerate(labels)])
    centre = grid.to_cells(flat[:, :2]).floor()
    radius = gaussian_radius(flat[:, 3] / grid.cell[0], flat[:, 4] / grid.cell[1], MIN_OVERLAP)
    radius = radius.floor().clamp(min=MIN_RADIUS)[:, None]
    x = _bump(torch.arange(cells_x, device=flat.device) - centre[:, 0:1], radius)
    y = _bump(torch.arange(cells_y, device=flat.device) - centre[:, 1:2], radius)
    inside = (centre[:, 0] >= 0) & (centre[:, 0] < cells_x) & (centre[:, 1] >= 0) & (centre[:, 1] < cells_y)
    drawn = (x[:, :, None] * y[:, None, :] * inside[:, None, None]).flatten(1)
    plane = (sample * classes + torch.cat(list(labels)))[:, None].expand_as(drawn)
    heatmap = drawn.new_zeros(batch * classes, cells_x * cells_y).scatter_reduce(0, plane, drawn, "amax")
    return heatmap.view(batch, classes, cells_x, cells_y)


def _bump(distance: Tensor, radius: Tensor) -> Tensor:
    """One axis of a Gaussian whose standard deviation is a sixth of the diameter, cut at the radius."""
    sigma = (2 * radius + 1) / 6
    return torch.exp(-(distance**2) / (2 * sigma**2)) * (distance.abs() <= radius)
