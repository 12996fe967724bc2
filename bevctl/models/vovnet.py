"""VoVNet with squeeze-excitation in every block (Lee & Park, CVPR 2020), as PETR trains it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import VoVNetConfig
from bevctl.models.layers import ConvBlock, autocast_dtype, channels_last, is_plain, keep_statistics, recompute
from bevctl.ops.aggregation import gated, one_shot_aggregation, shifted_relu_conv
from bevctl.ops.max_pool import max_pool
from bevctl.ops.norm_fold import FixedNorm, fold_norm


class VoVNetConv(ConvBlock):
    """Convolution, BatchNorm, ReLU; a norm that does not follow the batches is computed as part of the convolution."""

    conv: nn.Conv2d
    bn: nn.BatchNorm2d

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels_in, channels, kernel, stride=stride)

    @property
    def is_affine(self) -> bool:
        """Whether the norm's statistics stand still, and nothing is wrapped around or hooked into the parts."""
        return not self.bn.training and (torch.compiler.is_compiling() or is_plain(self, self.conv, self.bn))

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weight (C, C_in, k, k) of `dtype` and shift (C,): the block computes relu(conv(x, weight) + shift)."""
        norm = self.bn
        assert norm.running_mean is not None, "made with statistics"
        assert norm.running_var is not None, "made with statistics"
        fixed = FixedNorm(norm.eps, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return fold_norm(self.conv.weight, fixed, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) → (B, C, H', W')."""
        if not self.is_affine:
            return super().forward(x)
        dtype = autocast_dtype(x)
        return shifted_relu_conv(x.to(dtype), *self.folded(dtype), self.conv.stride[0])


class EffectiveSqueezeExcitation(nn.Module):
    """A factor from 0 to 1 for each channel, from the means of all; in float32 at least. Entry `fc`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, means: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        assert self.fc.bias is not None, "made with one"
        with torch.autocast(means.device.type, enabled=False):
            return F.relu6(F.linear(means, self.fc.weight.flatten(1), self.fc.bias) + 3) / 6


class OsaBlock(nn.Module):
    """One-shot aggregation: `layers` 3 × 3 convolutions in a row, all results concatenated, convolved 1 × 1 and gated.

    A block that `halves` takes the largest value of each window of the map first. An `identity` block adds its input,
    which has as many channels as its output.
    """

    def __init__(self, channels_in: int, inner: int, channels: int, layers: int, halves: bool, identity: bool) -> None:
        super().__init__()
        self.halves, self.identity = halves, identity
        sources = [channels_in] + [inner] * (layers - 1)
        self.layers = nn.ModuleList([VoVNetConv(source, inner, 3) for source in sources])
        self.concat = VoVNetConv(channels_in + layers * inner, channels, 1)
        self.ese = EffectiveSqueezeExcitation(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) → (B, C, H, W), or (B, C, ⌊H / 2⌋, ⌊W / 2⌋) where it halves."""
        if self.halves:
            x = max_pool(x)
        out, means = self._aggregated(x)
        return gated(out, self.ese(means), x.to(out.dtype) if self.identity else None)

    def _aggregated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        convolutions = cast("list[VoVNetConv]", [*self.layers, self.concat])
        if all(conv.is_affine for conv in convolutions):
            dtype = autocast_dtype(x)
            weights, shifts = zip(*(conv.folded(dtype) for conv in convolutions), strict=True)
            return one_shot_aggregation(x.to(dtype), weights, shifts)
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts[-1]))
        out: Tensor = self.concat(torch.cat(parts, dim=1))
        return out, out.to(torch.promote_types(out.dtype, torch.float32)).mean((2, 3))


class VoVNet(nn.Module):
    """Image backbone; returns the last `levels` of its four stages, at strides 4, 8, 16 and 32.

    `checkpointing` recomputes the stem and each block in the backward pass. With `norm_eval` BatchNorms keep their
    statistics in training, as PETR trains; their factors and shifts are learned all the same.
    """

    def __init__(
        self, config: VoVNetConfig, levels: int = 3, checkpointing: bool = False, norm_eval: bool = False
    ) -> None:
        super().__init__()
        self.channels = tuple(config.channels[-levels:])
        self.checkpointing = checkpointing
        self.norm_eval = norm_eval
        self.stem = nn.Sequential(
            *(
                VoVNetConv(source, channels, 3, stride)
                for source, channels, stride in zip((3, *config.stem[:2]), config.stem, (2, 1, 2), strict=True)
            )
        )
        self.stages = nn.ModuleList()
        source = config.stem[-1]
        for place, blocks in enumerate(config.blocks):
            inner, channels = config.inner[place], config.channels[place]
            stage = []
            for block in range(blocks):
                halves = place > 0 and block == 0
                stage.append(OsaBlock(source, inner, channels, config.layers, halves, identity=block > 0))
                source = channels
            self.stages.append(nn.Sequential(*stage))

    def train(self, mode: bool = True) -> VoVNet:
        """As of any module, except that with `norm_eval` the norms stay in evaluation mode."""
        super().train(mode)
        if self.norm_eval:
            keep_statistics(self)
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised → `levels` maps (B, C_i, h, w), finest first.

        The stem rounds sizes up, stages round them down.
        """
        x = recompute(self.stem, channels_last(images), enabled=self.checkpointing, random=False)
        maps = []
        for stage in self.stages:
            for block in cast("Iterable[OsaBlock]", stage):
                x = recompute(block, x, enabled=self.checkpointing, random=False)
            maps.append(x)
        return maps[-len(self.channels) :]
