"""Image feature pyramids: of BEVFusion and of PETR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.models.layers import ConvBlock, channels_last
from bevctl.ops.bias import BiasedConv2d
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


class CPFPN(nn.Module):
    """Feature pyramid that makes one map: each level is projected, coarser ones are added to the next finer one, top
    down, and a 3 × 3 convolution follows on the finest.

    `channels_in` are those of the maps, finest first. From PETR (Liu et al., ECCV 2022).
    """

    def __init__(self, channels_in: Sequence[int], channels: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList([BiasedConv2d(source, channels, 1) for source in channels_in])
        self.fpn_convs = nn.ModuleList([BiasedConv2d(channels, channels, 3, padding=1)])
        for conv in (*self.lateral_convs, *self.fpn_convs):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, C_i, h_i, w_i), finest first → (B, channels, h_0, w_0)."""
        laterals = [conv(channels_last(x)) for conv, x in zip(self.lateral_convs, maps, strict=True)]
        merged = laterals[-1]
        for finer in reversed(laterals[:-1]):
            merged = finer + F.interpolate(merged, size=finer.shape[2:], mode="nearest")
        out: Tensor = self.fpn_convs[0](merged)
        return out
