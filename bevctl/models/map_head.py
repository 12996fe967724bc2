"""BEV map segmentation head of BEVFusion (Liu et al., ICRA 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig
from bevctl.models.box_coder import BevGrid
from bevctl.models.losses import sigmoid_focal_loss


class MapHead(nn.Module):
    """Resamples the map to the annotation's grid and classifies each cell, one logit a class.

    `grid` gives the cells of the input map, `config.xbound` and `config.ybound` those of the output.
    """

    sample_points: Tensor

    def __init__(self, config: MapHeadConfig, channels: int, classes: Sequence[str], grid: BevGrid) -> None:
        super().__init__()
        self.config, self.classes = config, tuple(classes)
        self.register_buffer("sample_points", _sample_points(config, grid), persistent=False)
        self.classifier = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(True),
            nn.Conv2d(channels, len(self.classes), 1),
        )

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, X, Y) → (B, K, X', Y') float32 logits."""
        points = self.sample_points.expand(len(bev), -1, -1, -1)
        resampled = F.grid_sample(bev.float(), points, mode="bilinear", padding_mode="zeros", align_corners=False)
        logits: Tensor = self.classifier(resampled.to(bev.dtype))
        return logits.float()

    def loss(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Weighted mean pixel loss of each class, in float32; samples without a map weigh nothing."""
        with torch.autocast(logits.device.type, enabled=False):
            targets = torch.zeros_like(logits) if batch.bev_map is None else batch.bev_map.float()
            if self.config.loss == "focal":
                pixels = sigmoid_focal_loss(logits, targets, alpha=None)
            else:
                pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            known = batch.has_map.float()
            means = (pixels.mean((2, 3)) * known[:, None]).sum(0) / known.sum().clamp(min=1)
            means = means * self.config.loss_weight
        return {f"loss/map/{name}/{self.config.loss}": mean for name, mean in zip(self.classes, means, strict=True)}

    def predict(self, logits: Tensor) -> Tensor:
        """(B, K, X', Y') probabilities."""
        return logits.sigmoid()


def _sample_points(config: MapHeadConfig, grid: BevGrid) -> Tensor:
    """(1, X', Y', 2) centres of the output's cells, (y, x) as grid_sample wants them, −1…1 over the input's extent."""
    axes = []
    for bound, lower, upper in zip((config.xbound, config.ybound), grid.lower, grid.upper, strict=True):
        low, high, step = bound
        centres = low + step * (torch.arange(round((high - low) / step)) + 0.5)
        axes.append((centres - lower) / (upper - lower) * 2 - 1)
    x, y = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([y, x], dim=-1)[None]
