"""Image feature pyramid of BEVFusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevctl.models.layers import ConvBlock
from bevctl.ops.resample import resize


class GeneralizedLSSFPN(nn.Module):
    """Two top-down merges: the coarser map is resized, concatenated behind the finer one, and convolved 1 × 1, 3 × 3.

    `channels_in` are those of three maps, finest first. From mit-bevfusion (Liu et al., ICRA 2023).
    """

    def __init__(self, channels_in: Sequence[int], channels: int) -> None:
        super().__init__()
        fine, middle, coarse = channels_in
        self.lateral_convs = nn.ModuleList(
            [ConvBlock(fine + channels, channels, 1), ConvBlock(middle + coarse, channels, 1)]
        )
        self.fpn_convs = nn.ModuleList([ConvBlock(channels, channels, 3) for _ in range(2)])

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Three maps (B, C_i, h_i, w_i), finest first → two of `channels`, at the sizes of the first two."""
        fine, middle, coarse = maps
        middle = self._merge(1, middle, coarse)
        return self._merge(0, fine, middle), middle

    def _merge(self, level: int, fine: Tensor, coarse: Tensor) -> Tensor:
        stretched = resize(coarse, (fine.shape[2], fine.shape[3]))
        merged: Tensor = self.fpn_convs[level](self.lateral_convs[level](torch.cat([fine, stretched], dim=1)))
        return merged
