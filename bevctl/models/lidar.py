"""LiDAR branch: points → voxels → sparse encoder → bird's-eye view."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevctl.config.schema import LidarConfig
from bevctl.errors import BevctlError
from bevctl.ops.rulebook import Triple, output_shape
from bevctl.ops.site_norm import SiteNorm
from bevctl.ops.sites import Room, Window, fit_rows, plan_sites
from bevctl.ops.sparse_conv import Sparse, SparseConv3d, SparseTensor, SubMConv3d, product_dtype
from bevctl.ops.spconv_bridge import SpconvTensor, use_spconv
from bevctl.ops.voxelize import grid_shape, padded_voxels

WINDOWS = (
    Window((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Window((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Window((3, 3, 3), (2, 2, 2), (1, 1, 0)),
    Window((1, 1, 3), (1, 1, 2), (0, 0, 0)),
)
"""The strided convolutions that end the first three stages and the encoder."""


class ConvNormAct(nn.Sequential):
    """A sparse convolution, norm and ReLU."""

    def __init__(self, conv: SubMConv3d | SparseConv3d) -> None:
        super().__init__(conv, SiteNorm(conv.weight.shape[4]))

    def forward(self, x: Sparse) -> Sparse:
        conv, norm = self
        y: Sparse = conv(x)
        return y.with_features(norm(y.features, relu=True, count=y.count))


class ResidualBlock(nn.Module):
    """Two submanifold convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = SubMConv3d(channels, channels)
        self.bn1 = SiteNorm(channels)
        self.conv2 = SubMConv3d(channels, channels)
        self.bn2 = SiteNorm(channels)

    def forward(self, x: Sparse) -> Sparse:
        y = self.conv1(x)
        y = self.conv2(y.with_features(self.bn1(y.features, relu=True, count=x.count)))
        return x.with_features(self.bn2(y.features, x.features, relu=True, count=x.count))


class SparseEncoder(nn.Module):
    """Four stages of sparse convolution, stride 8 in x and y; z slices become channels of the result.

    After Yan et al., SECOND (Sensors 2018), with the residual stages that BEVFusion uses.

    Args:
        in_channels: features of a voxel.
        channels: width of the four stages.
        blocks: residual blocks a stage.
        out_channels: channels of each z slice of the output.
        shape: cells along x, y, z of the input, one more in z than the voxel grid has.

    Raises:
        BevctlError: a grid too small for the strides.
    """

    def __init__(
        self, in_channels: int, channels: tuple[int, int, int, int], blocks: int, out_channels: int, shape: Triple
    ) -> None:
        super().__init__()
        self.in_shape = shape
        self.conv_input = ConvNormAct(SubMConv3d(in_channels, channels[0]))
        self.encoder_layers = nn.Sequential()
        for stage, width in enumerate(channels):
            layers: list[nn.Module] = [ResidualBlock(width) for _ in range(blocks)]
            if stage + 1 < len(channels):
                layers.append(ConvNormAct(SparseConv3d(width, channels[stage + 1], *WINDOWS[stage])))
                shape = output_shape(shape, *WINDOWS[stage])
            self.encoder_layers.add_module(f"encoder_layer{stage + 1}", nn.Sequential(*layers))
        self.conv_out = ConvNormAct(SparseConv3d(channels[3], out_channels, *WINDOWS[3]))
        self.out_shape = output_shape(shape, *WINDOWS[3])
        if min(self.out_shape) < 1:
            raise BevctlError(
                f"a grid of {self.in_shape} cells is too small for the sparse encoder: it ends as {self.out_shape}",
                "Use smaller voxels or a larger point_cloud_range.",
            )
        self.out_channels = out_channels * self.out_shape[2]

    def forward(self, x: SparseTensor) -> Tensor:
        """Voxel features at their cells → (B, out_channels · Z, X, Y), channel c · Z + z, in channels-last memory."""
        # A recording that found rules of earlier sites would leave out how they are made.
        return self.encode(SparseTensor(x.features, x.sites.without_rules()))

    def encode(self, x: Sparse) -> Tensor:
        """`forward`, whatever library runs the convolutions."""
        x = self.conv_out(self.encoder_layers(self.conv_input(x)))
        return x.dense().permute(0, 1, 4, 2, 3).flatten(1, 2)


class VoxelLidarEncoder(nn.Module):
    """Hard voxelisation and the sparse encoder; `backbone` holds the weights."""

    def __init__(self, config: LidarConfig, point_cloud_range: Sequence[float]) -> None:
        super().__init__()
        self.config = config
        self.point_cloud_range = tuple(point_cloud_range)
        x, y, z = grid_shape(config.voxel_size, point_cloud_range)
        self.backbone = SparseEncoder(
            config.features, config.channels, config.blocks, config.out_channels, (x, y, z + 1)
        )
        self._room = Room()

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.backbone.out_channels

    @torch.no_grad()
    def prepare(self, points: list[Tensor]) -> Sparse:
        """Voxels of B × (P_i, F) points in the LiDAR frame, m, and all sites: the only part that waits for a GPU."""
        c, shape = self.config, self.backbone.in_shape
        limit = c.max_voxels[0 if self.training else 1]
        voxels = padded_voxels(points, c.voxel_size, self.point_cloud_range, c.max_points, limit)
        features, coords = voxels.features, voxels.coords
        if use_spconv(features.device, product_dtype(features, next(self.parameters()))):
            size = int((voxels.counts > 0).sum())
            return SpconvTensor.build(features[:size], coords[:size], shape, len(points))
        # Shapes that stay the same let a training step be recorded.
        sites = plan_sites(coords, shape, len(points), WINDOWS, self._room if self.training else None)
        return SparseTensor(fit_rows(features, len(sites), 0), sites)

    def forward(self, points: list[Tensor] | Sparse) -> Tensor:
        """B × (P_i, F) points in the LiDAR frame, m, or what `prepare` makes of them → (B, out_channels, X, Y)."""
        x = self.prepare(points) if isinstance(points, list) else points
        encoded: Tensor = self.backbone(x) if isinstance(x, SparseTensor) else self.backbone.encode(x)
        return encoded
