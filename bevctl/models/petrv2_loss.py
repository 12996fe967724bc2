"""Losses of PETR's detection head: targets, matching and all, for every decoder layer at once."""

from __future__ import annotations

from torch import Tensor

from bevctl.batch import Batch
from bevctl.models.losses import mean_over_ranks, sigmoid_focal_loss
from bevctl.models.petrv2_coder import encode
from bevctl.models.targets import class_cost, matched_targets, padded
from bevctl.ops.matching import match

CLASS_COST, BOX_COST = 2.0, 0.25
COST_CODES = 8
"""Codes that the matching looks at: all but the velocity."""


def detection_losses(logits: Tensor, codes: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Focal loss of the classes and L1 of the boxes, of each layer, over the number of matched queries.

    That number is the mean over all ranks. Each layer's queries are matched for themselves; samples without annotations
    weigh nothing. Nothing here waits for the device where the matching does not.

    Args:
        logits: (N, B, Q, K) float32, classes after N layers.
        codes: (N, B, Q, 10) float32, boxes.
        batch: of B samples.

    Returns:
        (N,) and (N,) float32.
    """
    layers, _, queries, classes = logits.shape
    boxes = padded(batch.boxes).to(codes.dtype).repeat(layers, 1, 1)
    labels = padded(batch.labels).repeat(layers, 1)
    objects = encode(boxes)
    counts = [len(sample) for sample in batch.boxes]
    cost = _cost(logits.detach().flatten(0, 1), codes.detach().flatten(0, 1), labels, objects)
    targets = matched_targets(match(cost, counts * layers), labels, objects, classes)
    annotated = batch.has_boxes.to(codes.dtype)[:, None, None]
    class_loss = sigmoid_focal_loss(logits, targets.classes.view_as(logits)) * annotated
    distance = (codes - targets.codes.view_as(codes)).abs() * targets.code_mask.view_as(codes) * annotated
    positives = mean_over_ranks(sum(min(count, queries) for count in counts), logits.device)
    return class_loss.sum((1, 2, 3)) / positives, distance.sum((1, 2, 3)) / positives


def _cost(logits: Tensor, codes: Tensor, labels: Tensor, objects: Tensor) -> Tensor:
    """(B, Q, M) cost of calling query q, (B, Q, K) and (B, Q, 10), the object m, (B, M) and (B, M, 10)."""
    distance = (codes[:, :, None, :COST_CODES] - objects[:, None, :, :COST_CODES]).abs().sum(-1)
    return CLASS_COST * class_cost(logits, labels) + BOX_COST * distance
