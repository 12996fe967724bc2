"""The transformer layer that turns heatmap peaks into object features."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PositionEmbedding(nn.Module):
    """Learnt embedding of a position in the bird's-eye view."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(2, channels, 1), nn.BatchNorm1d(channels), nn.ReLU(True), nn.Conv1d(channels, channels, 1)
        )

    def forward(self, positions: Tensor) -> Tensor:
        """(B, Q, 2) positions in cells → (B, Q, C)."""
        embedded: Tensor = self.position_embedding_head(positions.transpose(1, 2))
        return embedded.transpose(1, 2)


class QueryDecoderLayer(nn.Module):
    """Self-attention among queries, cross-attention to the map, feed-forward; each added to its input, then normalised.

    The layer of TransFusion (Bai et al., CVPR 2022): position embeddings enter queries, keys *and* values.
    """

    def __init__(self, channels: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(channels, heads, dropout, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(channels, heads, dropout, batch_first=True)
        self.linear1 = nn.Linear(channels, ffn)
        self.linear2 = nn.Linear(ffn, channels)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)
        self.self_posembed = PositionEmbedding(channels)
        self.cross_posembed = PositionEmbedding(channels)
        for attention in (self.self_attn, self.multihead_attn):
            nn.init.xavier_uniform_(attention.out_proj.weight)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, query: Tensor, query_position: Tensor, cells: Tensor, cell_position: Tensor) -> Tensor:
        """Update (B, Q, C) queries at (B, Q, 2) from (B, L, C) cells at (1, L, 2); positions in cells."""
        position = self.self_posembed(query_position)
        placed = query + position
        query = self.norm1(query + self.dropout(self._attend(self.self_attn, placed, placed)))
        memory = cells + self.cross_posembed(cell_position)
        query = self.norm2(query + self.dropout(self._attend(self.multihead_attn, query + position, memory)))
        hidden = self.dropout(F.relu(self.linear1(query)))
        updated: Tensor = self.norm3(query + self.dropout(self.linear2(hidden)))
        return updated

    @staticmethod
    def _attend(attention: nn.MultiheadAttention, query: Tensor, memory: Tensor) -> Tensor:
        attended: Tensor = attention(query, memory, memory, need_weights=False)[0]
        return attended
