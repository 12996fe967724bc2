"""Swin transformer (Liu et al. 2021) in the arrangement of mmdet, whose weights BEVFusion's releases start from.

mmdet pads the feature map with zeros to whole windows and *then* shifts it, merges patches with channels outermost, and
gives each output a norm of its own; names of entries are mmdet's too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import SwinConfig
from bevctl.models.layers import LayerNorm, Linear, autocast_dtype, is_plain, recompute, recomputed_when_saved
from bevctl.ops.layer_norm import scaled_residual
from bevctl.ops.linear import linear
from bevctl.ops.window_attention import window_attention

MLP_RATIO = 4
PATCH = 4
OUTPUTS = 3


def relative_position_index(window: int) -> Tensor:
    """(L, L) int64 row of the bias table for each pair of the L = window² positions."""
    row, column = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    row, column = row.flatten(), column.flatten()
    side = 2 * window - 1
    return (row[:, None] - row + window - 1) * side + (column[:, None] - column + window - 1)


class DropPath(nn.Module):
    """The sum of a residual block with stochastic depth: training drops the branch of whole samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def draw(self, x: Tensor) -> Tensor | None:
        """(B,) factors of the branch, 0 where it is dropped, 1 / (1 − rate) elsewhere; None where none is dropped."""
        if not self.training or self.rate == 0:
            return None
        keep = 1 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device).flatten() < keep
        return kept / keep

    def forward(self, x: Tensor, branch: Tensor, factors: Tensor | None) -> Tensor:
        """x + factors · branch, (B, …)."""
        return x + branch if factors is None else scaled_residual(x, branch, factors)


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with a learnt bias for each relative position."""

    relative_position_index: Tensor

    def __init__(self, channels: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_position_index(window))
        self.qkv = Linear(channels, 3 * channels)
        self.proj = Linear(channels, channels)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor, shift: int) -> Tensor:
        """(B, H, W, C) → the same; windows lie `shift` cells further to the right and down."""
        area = len(self.relative_position_index)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()].T.view(-1, area, area)
        # Zeros pad the map before the projection, which makes its bias of them.
        attended = window_attention(self.qkv(x), self.qkv.bias, bias, self.window, shift)
        projected: Tensor = self.proj(attended)
        return projected


class ShiftedWindowAttention(nn.Module):
    """Window attention over a map of any size; entry `w_msa`."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.shift = window // 2 if shifted else 0
        self.w_msa = WindowAttention(channels, heads, window)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) → the same."""
        attended: Tensor = self.w_msa(x, self.shift)
        return attended


class FeedForward(nn.Module):
    """Two linear layers with a GELU; entries `layers.0.0` and `layers.1`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = MLP_RATIO * channels
        self.layers = nn.Sequential(nn.Sequential(Linear(channels, hidden), nn.GELU()), Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → the same."""
        expand, project = cast("tuple[nn.Sequential, nn.Linear]", tuple(self.layers))
        if torch.compiler.is_compiling() or not x.is_cuda or not is_plain(self.layers, expand, expand[1]):
            out: Tensor = self.layers(x)
            return out
        hidden = expand[0](x)
        activated = expand[1](hidden)
        with recomputed_when_saved(activated, lambda: F.gelu(hidden)):
            projected: Tensor = project(activated)
        return projected


class SwinBlock(nn.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, channels: int, heads: int, window: int, shifted: bool, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.attn = ShiftedWindowAttention(channels, heads, window, shifted)
        self.norm2 = LayerNorm(channels)
        self.ffn = FeedForward(channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, attention_factors: Tensor | None, feed_factors: Tensor | None) -> Tensor:
        """(B, H, W, C) and two draws of `drop_path` → the same shape; nothing in here is random."""
        x = self.drop_path(x, self.norm1.before(self.attn, x), attention_factors)
        summed: Tensor = self.drop_path(x, self.norm2.before(self.ffn, x), feed_factors)
        return summed


class PatchProjection(nn.Conv2d):
    """The convolution of whole patches as the matrix product that it is."""

    def __init__(self, channels: int) -> None:
        super().__init__(3, channels, PATCH, stride=PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), H and W multiples of 4 → (B, H / 4, W / 4, C)."""
        dtype = autocast_dtype(images)
        rows, columns = images.shape[2] // PATCH, images.shape[3] // PATCH
        patches = images.to(dtype).unflatten(2, (rows, PATCH)).unflatten(4, (columns, PATCH))
        flat = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        assert self.bias is not None
        return linear(flat, self.weight.flatten(1), self.bias, dtype)


class PatchEmbed(nn.Module):
    """Pixels to tokens: one linear map of each 4 × 4 patch, then a norm whose result stays in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.projection = PatchProjection(channels)
        self.norm = LayerNorm(channels, wide=True)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, ⌈H/4⌉, ⌈W/4⌉, C), zeros beyond the image."""
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % PATCH, 0, -height % PATCH))
        tokens: Tensor = self.norm(self.projection(padded))
        return tokens


class PatchMerging(nn.Module):
    """Halves the map: each 2 × 2 patch becomes one token of twice the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, 2C), zeros beyond the map."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        batch, height, width, channels = x.shape
        patches = x.view(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 5, 2, 4).flatten(3)
        return self.norm.before(self.reduction, patches)


class SwinStage(nn.Module):
    """Blocks at one resolution, every second one shifted; `downsample` leads to the next stage."""

    def __init__(self, channels: int, heads: int, window: int, drop_paths: Sequence[float], downsample: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(channels, heads, window, shifted=i % 2 == 1, drop_path=rate) for i, rate in enumerate(drop_paths)
        )
        self.downsample = PatchMerging(channels) if downsample else None

    def forward(self, x: Tensor, checkpointing: bool) -> tuple[Tensor, Tensor]:
        """(B, H, W, C) → the same, and what the next stage reads."""
        for block in cast("Iterable[SwinBlock]", self.blocks):
            factors = block.drop_path.draw(x), block.drop_path.draw(x)
            x = recompute(block, x, *factors, enabled=checkpointing, random=False)
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
            self.add_module(f"norm{stage}", LayerNorm(widths[stage]))
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
