"""BEV map segmentation head of BEVFusion (Liu et al., ICRA 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig
from bevctl.models.box_coder import BevGrid
from bevctl.models.map_loss import map_losses
from bevctl.ops.resample import linear_weights, resample


class MapHead(nn.Module):
    """Resamples the map to the annotation's grid and classifies each cell, one logit a class.

    `grid` gives the cells of the input map, `config.xbound` and `config.ybound` those of the output.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, config: MapHeadConfig, channels: int, classes: Sequence[str], grid: BevGrid) -> None:
        super().__init__()
        self.config, self.classes = config, tuple(classes)
        rows, columns = (
            _resampling(*axis)
            for axis in zip((config.xbound, config.ybound), grid.lower, grid.cell, grid.shape, strict=True)
        )
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
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
        logits: Tensor = self.classifier(resample(bev, self.rows, self.columns))
        return logits.float()

    def loss(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Weighted mean pixel loss of each class, in float32; samples without a map weigh nothing."""
        means = map_losses(logits, batch, self.config)
        return {f"loss/map/{name}/{self.config.loss}": mean for name, mean in zip(self.classes, means, strict=True)}

    def predict(self, logits: Tensor) -> Tensor:
        """(B, K, X', Y') probabilities."""
        return logits.sigmoid()


def _resampling(bound: tuple[float, float, float], lower: float, cell: float, cells: int) -> Tensor:
    """(n, cells) weights that read the input map along one axis at the n cell centres of the output."""
    low, high, step = bound
    centres = low + step * (torch.arange(round((high - low) / step)) + 0.5)
    return linear_weights((centres - lower) / cell - 0.5, cells)
