"""Losses of the detection head's outputs against the objects of a batch: targets, matching and all."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevctl.batch import Batch
from bevctl.models.box_coder import BevGrid
from bevctl.models.losses import gaussian_focal_loss, sigmoid_focal_loss
from bevctl.models.targets import (
    CLASS_COST,
    IOU_COST,
    MIN_OVERLAP,
    MIN_RADIUS,
    POSITION_COST,
    heatmap_targets,
    query_targets,
)
from bevctl.ops.backend import use_triton
from bevctl.ops.transfer import to_device

if TYPE_CHECKING:
    from bevctl.ops.kernels.detection_loss import Numbers, Objects


@dataclass(frozen=True)
class DetectionLosses:
    """Scalars of a batch, float32; samples without annotations weigh nothing."""

    heatmap: Tensor
    """Gaussian focal loss of all cells over the number of peaks."""
    classes: Tensor
    """Focal loss of all queries over the number of matched ones."""
    boxes: Tensor
    """Weighted L1 of the matched queries' codes over their number."""
    mean_iou: Tensor
    """Mean over samples of the mean 3D IoU of their matched pairs; not differentiable."""


def detection_losses(
    heatmap: Tensor, logits: Tensor, codes: Tensor, batch: Batch, grid: BevGrid, code_weights: Tensor
) -> DetectionLosses:
    """Losses of `heatmap` (B, K, X, Y) and `logits` (B, Q, K) before the sigmoid, and of `codes` (B, Q, 10).

    All float32; `code_weights` (10,). In Triton it is a handful of kernels that the host never waits for; the torch
    path is the specification.
    """
    compute = _fused if use_triton(codes) else _plain
    return compute(heatmap, logits, codes, batch, grid, code_weights)


def _plain(
    heatmap: Tensor, logits: Tensor, codes: Tensor, batch: Batch, grid: BevGrid, code_weights: Tensor
) -> DetectionLosses:
    annotated = batch.has_boxes.float()[:, None, None]
    targets = query_targets(codes, logits, batch.boxes, batch.labels, grid)
    average = max(targets.positives, 1)
    peaks = heatmap_targets(batch.boxes, batch.labels, logits.shape[2], grid)
    heat = (gaussian_focal_loss(heatmap, peaks) * annotated[..., None]).sum()
    weight = targets.code_mask * annotated * code_weights
    return DetectionLosses(
        heatmap=heat / ((peaks == 1) * annotated[..., None]).sum().clamp(min=1),
        classes=(sigmoid_focal_loss(logits, targets.classes) * annotated).sum() / average,
        boxes=((codes - targets.codes).abs() * weight).sum() / average,
        mean_iou=targets.mean_iou,
    )


def _fused(
    heatmap: Tensor, logits: Tensor, codes: Tensor, batch: Batch, grid: BevGrid, code_weights: Tensor
) -> DetectionLosses:
    from bevctl.ops.kernels.detection_loss import Objects

    counts = [len(boxes) for boxes in batch.boxes]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    objects = Objects(
        boxes=torch.cat(batch.boxes).float(),
        labels=torch.cat(batch.labels),
        starts=to_device(starts, codes.device),
        counts=counts,
        annotated=batch.has_boxes.to(torch.uint8),
    )
    losses = _FusedLosses.apply(heatmap, logits, codes, objects, code_weights, _numbers(grid))
    return DetectionLosses(*losses)


def _numbers(grid: BevGrid) -> Numbers:
    from bevctl.ops.kernels.detection_loss import Numbers

    extent = (grid.upper[0] - grid.lower[0], grid.upper[1] - grid.lower[1])
    return Numbers(grid.lower, grid.cell, extent, CLASS_COST, POSITION_COST, IOU_COST, MIN_OVERLAP, MIN_RADIUS)


class _FusedLosses(torch.autograd.Function):
    """The gradients are computed along with the losses, and only scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, heatmap: Tensor, logits: Tensor, codes: Tensor, objects: Objects, weights: Tensor, numbers: Numbers
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from bevctl.ops.kernels.detection_loss import heatmap_loss, query_loss

        sums, code_grads, logit_grads = query_loss(codes.contiguous(), logits.contiguous(), objects, weights, numbers)
        heat, heatmap_grads = heatmap_loss(heatmap.contiguous(), objects, numbers)
        pairs = sum(min(count, codes.shape[1]) for count in objects.counts)
        average, peaks = max(pairs, 1), heat[1].clamp(min=1)
        ctx.save_for_backward(heatmap_grads, logit_grads, code_grads, peaks)
        ctx.average = average
        class_loss, box_loss, overlap = sums.sum(0).unbind()
        mean_iou = overlap / len(objects.counts)
        ctx.mark_non_differentiable(mean_iou)
        return heat[0] / peaks, class_loss / average, box_loss / average, mean_iou

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        heatmap_grads, logit_grads, code_grads, peaks = ctx.saved_tensors
        heat, classes, boxes, _ = grads
        return (
            heatmap_grads * (heat / peaks),
            logit_grads * (classes / ctx.average),
            code_grads * (boxes / ctx.average),
            None,
            None,
            None,
        )
