"""The transformer of PETR: queries that look at the features of all images at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import PetrConfig
from bevctl.models.layers import LayerNorm, autocast_dtype, recompute
from bevctl.ops.linear import linear


@dataclass(frozen=True)
class ImageMemory:
    """What queries look at: L features of all views, in the number format that they are multiplied in."""

    keys: Tensor
    """(B, L, C) features with their positions."""
    values: Tensor
    """(B, L, C) features."""
    padding: Tensor | None
    """(B, L) bool, True on features to pass over; None for none."""
    interval: Tensor | None
    """(B,) s between the frames; None for one frame."""


class Attention(nn.Module):
    """Attention of several heads without materialised weights; entries as of torch's MultiheadAttention."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * channels))
        self.out_proj = nn.Linear(channels, channels)
        nn.init.zeros_(self.out_proj.bias)
        xavier_uniform(self)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, Q, C) of (B, L, C) keys and values; keys where `padding` (B, L) is True are passed over."""
        channels = query.shape[-1]
        if key is query:
            placed, plain = self._weights(2 * channels, channels)
            q, k = F.linear(query, *placed).chunk(2, dim=-1)
            v = F.linear(value, *plain)
        else:
            of_query, of_key, of_value = self._weights(channels, channels, channels)
            q, dtype = F.linear(query, *of_query), autocast_dtype(key)
            k, v = linear(key, *of_key, dtype), linear(value, *of_value, dtype)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = None if padding is None else ~padding[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        projected: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _weights(self, *rows: int) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias that project to query, key and value, cut into pieces of so many rows.

        Cut as a whole: each slice of its own would fill a gradient of the whole size.
        """
        return list(zip(self.in_proj_weight.split(rows), self.in_proj_bias.split(rows), strict=True))


class PetrDecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward; each added to its input, in float32 at least, then normalised.

    Positions enter queries and keys, not values.
    """

    def __init__(self, config: PetrConfig) -> None:
        super().__init__()
        channels = config.hidden
        self.self_attn = Attention(channels, config.attention_heads, config.dropout)
        self.cross_attn = Attention(channels, config.attention_heads, config.dropout)
        self.linear1 = nn.Linear(channels, config.ffn)
        self.linear2 = nn.Linear(config.ffn, channels)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(channels, wide=True) for _ in range(3))
        self.dropout = nn.Dropout(config.dropout)
        xavier_uniform(self)

    def forward(self, query: Tensor, position: Tensor, memory: ImageMemory) -> Tensor:
        """(B, Q, C) queries, updated; `position` (Q, C) is theirs."""
        placed = query + position
        query = self.norm1(query + self.dropout(self.self_attn(placed, placed, query)))
        seen = self.cross_attn(query + position, memory.keys, memory.values, memory.padding)
        query = self.norm2(query + self.dropout(seen))
        hidden = self.dropout(F.relu(self.linear1(query)))
        updated: Tensor = self.norm3(query + self.dropout(self.linear2(hidden)))
        return updated


class PetrTransformer(nn.Module):
    """Decoder layers one after the other; `checkpointing` recomputes each in the backward pass."""

    def __init__(self, config: PetrConfig, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.layers = nn.ModuleList([PetrDecoderLayer(config) for _ in range(config.layers)])
        self.post_norm = LayerNorm(config.hidden, wide=True)

    def forward(self, position: Tensor, memory: ImageMemory) -> list[Tensor]:
        """What the queries at `position` (Q, C) are after each layer, (B, Q, C), normalised; they start as zeros."""
        query = torch.zeros_like(position).expand(len(memory.keys), -1, -1)
        outputs = []
        for layer in cast("Iterable[PetrDecoderLayer]", self.layers):
            query = recompute(layer, query, position, memory, enabled=self.checkpointing)
            outputs.append(self.post_norm(query))
        return outputs


def xavier_uniform(module: nn.Module) -> None:
    """Xavier-uniform values in all matrices of `module`."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
