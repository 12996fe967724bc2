"""Where image features lie in space, as numbers that a transformer can compare (PETR and PETRv2, Liu et al.)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import PetrConfig
from bevctl.models.layers import autocast_dtype, recompute
from bevctl.ops.linear import linear

TEMPERATURE = 10000.0
"""Ratio of the longest wavelength of a sine embedding to the shortest."""
EPSILON = 1e-5
"""Nearest that a coordinate comes to 0 or 1 before its logit is taken."""


class Pointwise(nn.Conv2d):
    """A 1 × 1 convolution with a bias, applied to features whose channels are the last axis."""

    bias: nn.Parameter

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(channels_in, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(…, C_in) → (…, C)."""
        return linear(x, self.weight.flatten(1), self.bias, autocast_dtype(x))


def pointwise_mlp(channels_in: int, hidden: int, channels: int) -> nn.Sequential:
    """Two pointwise convolutions with a ReLU between, entries `0` and `2`."""
    return nn.Sequential(Pointwise(channels_in, hidden), nn.ReLU(), Pointwise(hidden, channels))


def depth_bins(count: int, first: float, end: float) -> Tensor:
    """(count,) depths, m: first + (end − first) / (n (n + 1)) · i (i + 1), linearly increasing steps (CaDDN)."""
    index = torch.arange(count, dtype=torch.float32)
    return first + (end - first) / (count * (count + 1)) * index * (index + 1)


def inverse_sigmoid(x: Tensor) -> Tensor:
    """Logit of `x`, which is first clamped to 0..1, and at most that of `EPSILON` or 1 − `EPSILON`.

    Half precision would make it infinite: 1 / `EPSILON` is beyond its range.
    """
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=EPSILON) / (1 - x).clamp(min=EPSILON))


def sine_embedding(positions: Tensor, channels: int) -> Tensor:
    """(…) positions in rad → (…, channels): sine and cosine in turn, of wavelengths from 2π to 2π · `TEMPERATURE`."""
    index = torch.arange(channels, device=positions.device, dtype=torch.float32)
    wavelength = TEMPERATURE ** (2 * (index // 2) / channels)
    angles = positions[..., None] / wavelength
    return torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=-1).flatten(-2)


class FrustumEncoder(nn.Module):
    """Embedding of the points along the ray of each feature.

    `config` gives the depths of the points and the bounds that their coordinates are counted in.
    """

    depths: Tensor
    lower: Tensor
    extent: Tensor

    def __init__(self, config: PetrConfig) -> None:
        super().__init__()
        self.mlp = pointwise_mlp(3 * config.depth_bins, 4 * config.hidden, config.hidden)
        lower, upper = torch.tensor(config.position_range).view(2, 3)
        depths = depth_bins(config.depth_bins, config.depth_start, config.position_range[3])
        for name, values in (("depths", depths), ("lower", lower), ("extent", upper - lower)):
            self.register_buffer(name, values, persistent=False)

    def forward(self, rays: Tensor, origins: Tensor) -> Tensor:
        """(B, V, h, w, 3) rays from (B, V, 3) origins, augmented LiDAR frame, m → (B, V, h, w, C)."""
        embedded: Tensor = self.mlp(self.coordinates(rays, origins))
        return embedded

    def coordinates(self, rays: Tensor, origins: Tensor) -> Tensor:
        """(B, V, h, w, D · 3) logits of x, y, z of each ray's points, one point after the other."""
        start = ((origins - self.lower) / self.extent)[:, :, None, None, None]
        points = start + (rays / self.extent)[..., None, :] * self.depths[:, None]
        return inverse_sigmoid(points).flatten(-2)


class FeatureGuidance(nn.Module):
    """Scales a position embedding by what the feature shows (PETRv2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_reduce = Pointwise(channels, channels)
        self.conv_expand = Pointwise(channels, channels)

    def forward(self, position: Tensor, features: Tensor) -> Tensor:
        """(…, C) embedding and features → (…, C)."""
        return position * self.conv_expand(F.relu(self.conv_reduce(features))).sigmoid()


class ImagePositions(nn.Module):
    """Features of all views as one list, and the same with their positions in space added.

    `checkpointing` recomputes the embeddings of positions in the backward pass.
    """

    def __init__(self, config: PetrConfig, channels_in: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.axis_channels = config.hidden // 2
        self.input_proj = Pointwise(channels_in, config.hidden)
        self.position_encoder = FrustumEncoder(config)
        self.fpe = FeatureGuidance(config.hidden)
        self.adapt_pos3d = pointwise_mlp(3 * self.axis_channels, 4 * config.hidden, config.hidden)

    def forward(self, features: Tensor, rays: Tensor, origins: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values and keys of the cross-attention.

        Args:
            features: (B, V, C_in, h, w).
            rays: (B, V, h, w, 3) per m of depth, augmented LiDAR frame.
            origins: (B, V, 3) of the cameras, m, same frame.
            padding: (B, V, h, w) bool, True where an image has been filled up; None for nowhere.

        Returns:
            (B, L, C) values and keys, L = V · h · w.
        """
        values = self.input_proj(features.permute(0, 1, 3, 4, 2))
        in_space = self._embedded(self.position_encoder, rays, origins)
        in_images = self._embedded(self.adapt_pos3d, self._places(values.shape[:4], padding, values.device))
        position = self.fpe(in_space, values) + in_images
        keys = (values + position).to(values.dtype)
        return values.flatten(1, 3), keys.flatten(1, 3)

    def _embedded(self, encoder: nn.Module, *inputs: Tensor) -> Tensor:
        # Sample by sample: the hidden features, wide and in float32, are the largest tensors after the backbone's.
        samples = zip(*(x.split(1) for x in inputs), strict=True)
        return torch.cat([recompute(encoder, *x, enabled=self.checkpointing, random=False) for x in samples])

    def _places(self, shape: Sequence[int], padding: Tensor | None, device: torch.device) -> Tensor:
        """(B or 1, V, h, w, 3 · C / 2) sine embedding of each feature's view, row and column.

        They are counted from 1 without padding, in shares of the whole count, which is 2π.
        """
        filled = torch.ones((1, *shape[1:]), dtype=torch.bool, device=device) if padding is None else ~padding
        embedded = []
        for axis in (1, 2, 3):
            count = filled.cumsum(axis).float()  # whole numbers: a GPU adds up others in an order that varies
            share = count / (count.narrow(axis, count.shape[axis] - 1, 1) + 1e-6)
            embedded.append(sine_embedding(share * (2 * math.pi), self.axis_channels))
        return torch.cat(embedded, dim=-1)
