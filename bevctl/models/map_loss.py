"""Loss of map segmentation, the same for every map head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig
from bevctl.models.losses import sigmoid_focal_loss


def map_losses(logits: Tensor, batch: Batch, config: MapHeadConfig) -> Tensor:
    """Weighted mean pixel loss of each class, in float32; samples without a map weigh nothing.

    Args:
        logits: (…, B, K, X, Y) float32.
        batch: of B samples.
        config: says which loss, and its weights.

    Returns:
        (…, K).
    """
    with torch.autocast(logits.device.type, enabled=False):
        targets = torch.zeros_like(logits) if batch.bev_map is None else batch.bev_map.float().expand_as(logits)
        if config.loss == "focal":
            pixels = sigmoid_focal_loss(logits, targets, alpha=config.focal_alpha)
        else:
            pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        known = batch.has_map.float()
        means = (pixels.mean((-2, -1)) * known[:, None]).sum(-2) / known.sum().clamp(min=1)
        means = means * config.loss_weight
        if config.class_weights:
            weighted = zip(means.unbind(-1), config.class_weights, strict=True)
            means = torch.stack([mean * weight for mean, weight in weighted], dim=-1)
        return means
