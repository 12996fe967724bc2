"""Map head of PETRv2: queries on a grid, each of which becomes eight by eight cells of the map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig, PetrConfig
from bevctl.models.layers import recompute
from bevctl.models.map_loss import map_losses
from bevctl.models.petrv2_head import query_mlp
from bevctl.models.petrv2_position import sine_embedding
from bevctl.models.petrv2_transformer import ImageMemory, PetrTransformer
from bevctl.ops.resample import resize_samples

STAGES = ((1, 2), (1, 2), (2, 4))
"""Of each doubling what the width is divided by for its result, and for the map in between."""


class Doubling(nn.Module):
    """Twice the cells along each axis, beside a projection of the map that all stages start from."""

    def __init__(self, channels_in: int, channels: int, between: int, start: int) -> None:
        super().__init__()
        # The doubling itself holds the place 0.
        self.conv = nn.Sequential(
            nn.Identity(),
            nn.Conv2d(channels_in, between, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(between, channels, 1, bias=False),
        )
        self.up = nn.Conv2d(start, channels, 1)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        """(B, C_in, X, Y) and (B, C_start, …) → (B, C, 2 X, 2 Y)."""
        size = (2 * x.shape[2], 2 * x.shape[3])
        beside = F.interpolate(self.up(start), size, mode="nearest")
        return F.relu(self.conv(resize_samples(x, size)) + beside)


class LaneDecoder(nn.Module):
    """Logits of one map class from a map of queries."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        source = channels
        for result, between in STAGES:
            self.layers.append(Doubling(source, channels // result, channels // between, channels))
            source = channels // result
        self.to_logits = nn.Sequential(
            nn.Conv2d(source, source, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(source, 1, 1)
        )

    def forward(self, start: Tensor) -> Tensor:
        """(B, C, X, Y) → (B, 8 X, 8 Y) float32."""
        x = start
        for layer in self.layers:
            x = layer(x, start)
        logits: Tensor = self.to_logits(x)
        return logits[:, 0].float()


class PetrMapHead(nn.Module):
    """Queries at the centres of a coarse grid; a decoder for each class, the same after every layer.

    Queries, decoders and thus weights see the map turned by half a circle, as PETR's data are: its first cell is the
    last of ours along both axes.
    """

    places: Tensor

    def __init__(
        self, config: MapHeadConfig, petr: PetrConfig, classes: Sequence[str], checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config, self.petr, self.classes = config, petr, tuple(classes)
        self.checkpointing = checkpointing
        self.query_embedding = query_mlp(petr.hidden, petr.hidden)
        self.transformer = PetrTransformer(petr, checkpointing)
        self.lane_branches = nn.ModuleDict({name: LaneDecoder(petr.hidden) for name in classes})
        x, y = ((torch.arange(count) + 0.5) / count for count in petr.map_queries)
        grid = torch.stack(torch.meshgrid(x, y, indexing="ij"), dim=-1).flatten(0, 1)
        self.register_buffer("places", grid, persistent=False)

    def forward(self, memory: ImageMemory) -> Tensor:
        """(N, B, K, X, Y) float32 logits after each of N layers."""
        x, y = (sine_embedding(self.places[:, axis] * (2 * math.pi), self.petr.hidden // 2) for axis in range(2))
        queries = torch.stack(self.transformer(self.query_embedding(torch.cat([y, x], dim=-1)), memory))
        layers, batch = queries.shape[:2]
        start = queries.view(layers * batch, *self.petr.map_queries, -1).permute(0, 3, 1, 2)
        decoders = cast("Sequence[LaneDecoder]", list(self.lane_branches.values()))
        logits = [recompute(decoder, start, enabled=self.checkpointing, random=False) for decoder in decoders]
        return torch.stack(logits, dim=1).unflatten(0, (layers, batch)).flip(-2, -1)

    def loss(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Weighted pixel losses, in float32: of each earlier layer over all classes, of the last one by class.

        Samples without a map weigh nothing.
        """
        *earlier, last = map_losses(logits, batch, self.config).unbind()
        kind = self.config.loss
        losses = {f"loss/map/layer_{number}/{kind}": layer.sum() for number, layer in enumerate(earlier)}
        return losses | {
            f"loss/map/{name}/{kind}": value for name, value in zip(self.classes, last.unbind(), strict=True)
        }

    def predict(self, logits: Tensor) -> Tensor:
        """(B, K, X, Y) probabilities of the last layer."""
        return logits[-1].sigmoid()
