"""Losses of the heads, in float32, one value an element: callers weight and average."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from bevctl.ops.transfer import to_device


def sigmoid_focal_loss(logits: Tensor, targets: Tensor, gamma: float = 2.0, alpha: float | None = 0.25) -> Tensor:
    """Focal loss (Lin et al., ICCV 2017) of `logits` against 0/1 `targets` of the same shape.

    `alpha` weights the positives and 1 − `alpha` the negatives; None weights neither.
    """
    logits, targets = logits.float(), targets.float()
    signed = torch.where(targets > 0.5, logits, -logits)
    loss = -F.logsigmoid(signed) * torch.sigmoid(-signed) ** gamma
    if alpha is None:
        return loss
    return loss * torch.where(targets > 0.5, alpha, 1 - alpha)


def gaussian_focal_loss(logits: Tensor, targets: Tensor, alpha: float = 2.0, gamma: float = 4.0) -> Tensor:
    """Heatmap loss (Law & Deng, ECCV 2018) of `logits` against `targets` in 0..1.

    A target of exactly 1 is a positive; the others are negatives, forgiven by (1 − target)^gamma. Probabilities are
    clamped to [1e-4, 1 − 1e-4].
    """
    probability = torch.sigmoid(logits.float()).clamp(1e-4, 1 - 1e-4)
    positive = -probability.log() * (1 - probability) ** alpha
    negative = -(1 - probability).log() * probability**alpha * (1 - targets) ** gamma
    return torch.where(targets == 1, positive, negative)


def mean_over_ranks(count: int, device: torch.device) -> Tensor | float:
    """`count`, of which every rank has its own, averaged over the ranks, at least 1; the host does not wait."""
    if not distributed.is_available() or not distributed.is_initialized():
        return float(max(count, 1))
    total = to_device(torch.tensor(float(count)), device)
    distributed.all_reduce(total)
    return (total / distributed.get_world_size()).clamp(min=1)
