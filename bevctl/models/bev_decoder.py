"""What happens on the bird's-eye view between the sensors and the heads: fuser, backbone and feature pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevctl.config.schema import DecoderConfig
from bevctl.models.layers import channels_last, init_convolutions, recompute


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class ConvFuser(nn.Sequential):
    """One convolution over the sensors' maps, concatenated."""

    def __init__(self, channels_in: Sequence[int], channels: int) -> None:
        super().__init__(
            nn.Conv2d(sum(channels_in), channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True)
        )
        init_convolutions(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, C_i, X, Y) in the order of `channels_in` → (B, channels, X, Y)."""
        fused: Tensor = super().forward(torch.cat([channels_last(x) for x in maps], dim=1))
        return fused


class Second(nn.Module):
    """Two stages of 3 × 3 convolutions, the second at half the resolution (Yan et al., Sensors 2018)."""

    def __init__(self, channels_in: int, channels: Sequence[int], layers: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList()
        for width, stride in zip(channels, (1, 2), strict=True):
            stage: list[nn.Module] = []
            for layer in range(layers + 1):
                source, step = (channels_in, stride) if layer == 0 else (width, 1)
                stage += [nn.Conv2d(source, width, 3, step, padding=1, bias=False), _norm(width), nn.ReLU(True)]
            self.blocks.append(nn.Sequential(*stage))
            channels_in = width
        init_convolutions(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, C_in, X, Y) → (B, C_0, X, Y) and (B, C_1, ⌈X/2⌉, ⌈Y/2⌉)."""
        outputs = []
        for block in self.blocks:
            x = recompute(block, x, enabled=self.checkpointing, random=False)
            outputs.append(x)
        return outputs


class SecondFPN(nn.Module):
    """Both stages brought to full resolution and concatenated."""

    def __init__(self, channels_in: Sequence[int], channels: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        fine, coarse = channels_in
        self.deblocks = nn.ModuleList(
            nn.Sequential(conv, _norm(channels), nn.ReLU(True))
            for conv in (
                nn.Conv2d(fine, channels, 1, bias=False),
                nn.ConvTranspose2d(coarse, channels, 2, stride=2, bias=False),
            )
        )
        init_convolutions(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """The maps of `Second` → (B, 2 · channels, X, Y)."""
        upsampled = [
            recompute(block, x, enabled=self.checkpointing, random=False)
            for block, x in zip(self.deblocks, maps, strict=True)
        ]
        return torch.cat(upsampled, dim=1)


class BevDecoder(nn.Module):
    """Backbone and feature pyramid on the fused map; `channels` are those of the result."""

    def __init__(self, channels_in: int, config: DecoderConfig, checkpointing: bool = False) -> None:
        super().__init__()
        self.channels = 2 * config.neck_channels
        self.backbone = Second(channels_in, config.channels, config.layers, checkpointing)
        self.neck = SecondFPN(config.channels, config.neck_channels, checkpointing)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, X, Y), X and Y even → (B, channels, X, Y)."""
        decoded: Tensor = self.neck(self.backbone(channels_last(x)))
        return decoded


class TaskDecoders(nn.ModuleDict):
    """A decoder for each task, by its name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, C_in, X, Y), X and Y even → task: (B, channels, X, Y)."""
        return {task: decoder(x) for task, decoder in self.items()}
