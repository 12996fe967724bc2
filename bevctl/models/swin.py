"""Swin transformer (Liu et al. 2021) in the arrangement of mmdet, whose weights BEVFusion's releases start from.

mmdet pads the feature map with zeros to whole windows and *then* shifts it, merges patches with channels outermost, and
gives each output a norm of its own; names of entries are mmdet's too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import SwinConfig
from bevctl.models.layers import recompute

MASKED = -100.0
"""Added to the attention logits of pixels that only the cyclic shift made neighbours."""
MLP_RATIO = 4
PATCH = 4
OUTPUTS = 3


def relative_position_index(window: int) -> Tensor:
    """(L, L) int64 row of the bias table for each pair of the L = window² positions."""
    row, column = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    row, column = row.flatten(), column.flatten()
    side = 2 * window - 1
    return (row[:, None] - row + window - 1) * side + (column[:, None] - column + window - 1)


def shift_mask(height: int, width: int, window: int, shift: int, device: torch.device | None = None) -> Tensor:
    """(windows, L, L) additive mask of a shifted map whose sides are multiples of the window."""

    def region(size: int) -> Tensor:
        position = torch.arange(size, device=device)
        return (position >= size - window).long() + (position >= size - shift)

    regions = region(height)[:, None] * 3 + region(width)
    windows = to_windows(regions[None, ..., None], window)[0, ..., 0]
    return (windows[:, :, None] != windows[:, None, :]) * MASKED


def to_windows(x: Tensor, window: int) -> Tensor:
    """(B, H, W, C) → (B, windows, window², C); H and W are multiples of the window."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // window, window, width // window, window, channels)
    return x.transpose(2, 3).reshape(batch, -1, window * window, channels)


def from_windows(windows: Tensor, height: int, width: int) -> Tensor:
    """Inverse of `to_windows`."""
    batch, _, area, channels = windows.shape
    side = round(area**0.5)
    x = windows.view(batch, height // side, width // side, side, side, channels)
    return x.transpose(2, 3).reshape(batch, height, width, channels)


class DropPath(nn.Module):
    """Stochastic depth: drops the residual branch of whole samples while training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → the same, some samples zero, the others scaled up by 1 / (1 − rate)."""
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with a learnt bias for each relative position."""

    relative_position_index: Tensor

    def __init__(self, channels: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_position_index(window))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, windows, L, C) → the same; `mask` (windows, L, L) is added to the logits."""
        batch, windows, area, channels = x.shape
        split = self.qkv(x).view(batch, windows, area, 3, self.heads, channels // self.heads)
        query, key, value = split.permute(3, 0, 1, 4, 2, 5).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        # Windows join the batch, or the heads where each has a mask of its own: either way the bias broadcasts.
        merged = (0, 1)
        if mask is not None:
            merged = (1, 2)
            bias = (bias + mask[:, None]).flatten(0, 1)
        query, key, value = (part.flatten(*merged) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(query.dtype))
        out = out.view(batch, windows, self.heads, area, -1).transpose(2, 3).flatten(3)
        projected: Tensor = self.proj(out)
        return projected


class ShiftedWindowAttention(nn.Module):
    """Window attention over a map of any size; entry `w_msa`."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.window = window
        self.shift = window // 2 if shifted else 0
        self.w_msa = WindowAttention(channels, heads, window)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, H, W, C) → the same; `mask` belongs to the padded map and is used where the block is shifted."""
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        padded_height, padded_width = x.shape[1:3]
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        windows = self.w_msa(to_windows(x, self.window), mask if self.shift else None)
        x = from_windows(windows, padded_height, padded_width)
        if self.shift:
            x = x.roll((self.shift, self.shift), dims=(1, 2))
        return x[:, :height, :width]


class FeedForward(nn.Module):
    """Two linear layers with a GELU; entries `layers.0.0` and `layers.1`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = MLP_RATIO * channels
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(channels, hidden), nn.GELU()), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class SwinBlock(nn.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn = ShiftedWindowAttention(channels, heads, window, shifted)
        self.norm2 = nn.LayerNorm(channels)
        self.ffn = FeedForward(channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, H, W, C) → the same."""
        x = x + self.drop_path(self.attn(self.norm1(x), mask))
        return x + self.drop_path(self.ffn(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Pixels to tokens: one linear map of each 4 × 4 patch, then a norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, channels, PATCH, stride=PATCH)
        self.norm = nn.LayerNorm(channels)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, ⌈H/4⌉, ⌈W/4⌉, C), zeros beyond the image."""
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % PATCH, 0, -height % PATCH))
        tokens: Tensor = self.norm(self.projection(padded).permute(0, 2, 3, 1))
        return tokens


class PatchMerging(nn.Module):
    """Halves the map: each 2 × 2 patch becomes one token of twice the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, 2C), zeros beyond the map."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        batch, height, width, channels = x.shape
        patches = x.view(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 5, 2, 4).flatten(3)
        merged: Tensor = self.reduction(self.norm(patches))
        return merged


class SwinStage(nn.Module):
    """Blocks at one resolution, every second one shifted; `downsample` leads to the next stage."""

    def __init__(self, channels: int, heads: int, window: int, drop_paths: Sequence[float], downsample: bool) -> None:
        super().__init__()
        self.window = window
        self.blocks = nn.ModuleList(
            SwinBlock(channels, heads, window, shifted=i % 2 == 1, drop_path=rate) for i, rate in enumerate(drop_paths)
        )
        self.downsample = PatchMerging(channels) if downsample else None

    def forward(self, x: Tensor, checkpointing: bool) -> tuple[Tensor, Tensor]:
        """(B, H, W, C) → the same, and what the next stage reads."""
        height, width = (side + -side % self.window for side in x.shape[1:3])
        mask = shift_mask(height, width, self.window, self.window // 2, x.device)
        for block in self.blocks:
            x = recompute(block, x, mask, enabled=checkpointing)
        return x, x if self.downsample is None else self.downsample(x)


class SwinTransformer(nn.Module):
    """Image backbone with outputs at strides 8, 16 and 32.

    `channels` are those of the outputs; `checkpointing` recomputes each block in the backward pass.
    """

    def __init__(self, config: SwinConfig, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        widths = [config.embed * 2**stage for stage in range(len(config.depths))]
        self.channels = tuple(widths[-OUTPUTS:])
        last = sum(config.depths) - 1
        rates = iter(config.drop_path * block / last for block in range(sum(config.depths)))
        self.patch_embed = PatchEmbed(config.embed)
        self.stages = nn.ModuleList(
            SwinStage(
                widths[stage],
                config.heads[stage],
                config.window,
                [next(rates) for _ in range(depth)],
                downsample=stage < len(config.depths) - 1,
            )
            for stage, depth in enumerate(config.depths)
        )
        for stage in range(1, len(widths)):
            self.add_module(f"norm{stage}", nn.LayerNorm(widths[stage]))
        self.apply(_init_linear)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised → three maps (B, C_i, H / s, W / s), s = 8, 16, 32, rounded up."""
        x = self.patch_embed(images)
        outputs = []
        for index, stage in enumerate(self.stages):
            features, x = stage(x, self.checkpointing)
            if index > 0:
                outputs.append(getattr(self, f"norm{index}")(features).permute(0, 3, 1, 2))
        return outputs


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
