"""Lift-splat view transforms: image features → bird's-eye view.

After Philion and Fidler, Lift, Splat, Shoot (ECCV 2020), and Liu et al., BEVFusion (ICRA 2023).
Geometry, depth raster, cell indices, depth softmax and the sums over a cell are float32 under autocast; the
convolutions run in the autocast dtype, with channels last in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bevctl.batch import Calibration
from bevctl.config.schema import ViewTransformConfig
from bevctl.errors import BevctlError
from bevctl.models.depth_transform import DepthTransform, conv_norm_act
from bevctl.models.layers import autocast_dtype, channels_last
from bevctl.models.view_geometry import frustum_grid, frustum_rays, rasterize_depth
from bevctl.ops.bev_pool import SplatIndex, frustum_cells, index_points, lift_splat
from bevctl.ops.linear import linear

STRIDE = 8
"""Pixels of the network's image to a feature cell."""
_DEPTH_CHANNELS = 64


class LiftSplat(nn.Module):
    """What both view transforms share: the frustum, the splat, the downsampling.

    Args:
        config: bounds, bins and channels.
        image_size: H, W of the network's image, multiples of 8.

    Raises:
        BevctlError: an image size or bounds that do not divide.
    """

    dx: Tensor
    bx: Tensor
    nx: Tensor
    frustum: Tensor

    def __init__(self, config: ViewTransformConfig, image_size: tuple[int, int]) -> None:
        super().__init__()
        if image_size[0] % STRIDE or image_size[1] % STRIDE:
            raise BevctlError(f"image_size {tuple(image_size)} is not a multiple of {STRIDE}", "Change image_size.")
        self.image_size = image_size
        self.feature_size = (image_size[0] // STRIDE, image_size[1] // STRIDE)
        self.channels = config.channels
        depths = torch.arange(*config.dbound, dtype=torch.float64)
        self.bins = len(depths)

        bounds = (config.xbound, config.ybound, config.zbound)
        counts = [round((high - low) / cell) for low, high, cell in bounds]  # plain numbers: also on the meta device
        if min(counts) < 1 or counts[2] != 1:
            raise BevctlError(
                f"xbound, ybound and zbound give {counts} cells; the view transform needs one in z",
                "Let zbound span one cell, as in (-10, 10, 20).",
            )
        self.register_buffer("dx", torch.tensor([cell for _, _, cell in bounds]))
        self.register_buffer("bx", torch.tensor([low + cell / 2 for low, _, cell in bounds]))
        self.register_buffer("nx", torch.tensor(counts))
        self.register_buffer("frustum", frustum_grid(image_size, self.feature_size, depths))
        self.grid = (counts[0], counts[1])
        self.truncate = config.truncate
        self.downsample = _downsample(config.channels) if config.downsample == 2 else nn.Identity()
        self._indices = _IndexCache()

    def index(self, calibration: Calibration) -> SplatIndex:
        """Which cell of the splat grid each bin of each feature cell lies in; made once a calibration."""
        return self._indices.get(calibration, lambda: self._index(calibration))

    @torch.no_grad()
    def _index(self, calibration: Calibration) -> SplatIndex:
        rays, origins = frustum_rays(self.frustum[0, ..., :2], calibration)
        bounds = (self.bx - self.dx / 2, self.dx, self.nx)
        cells = frustum_cells(rays, origins, self.frustum[:, 0, 0, 2].contiguous(), bounds, self.truncate)
        return index_points(cells, self.grid)

    def splat(self, logits: Tensor, calibration: Calibration) -> Tensor:
        """(B, N, D + C, h, w) depth logits and context → (B, C, X, Y)."""
        down: Tensor = self.downsample(lift_splat(logits, self.index(calibration)))
        return down

    def check_features(self, features: Tensor) -> None:
        """Raise ValueError unless `features` are (B, N, C, h, w) of the frustum's size."""
        if features.dim() != 5 or tuple(features.shape[3:]) != self.feature_size:
            raise ValueError(
                f"features must be (B, N, C, {self.feature_size[0]}, {self.feature_size[1]}), "
                f"got {tuple(features.shape)}"
            )


class _IndexCache:
    """The last index and the calibration that it belongs to.

    On a GPU the same tensors must come again, as in a recomputed forward pass: to compare values would wait for the
    device, which takes longer than to make the index.
    """

    def __init__(self) -> None:
        self._calibration: list[Tensor] = []
        self._versions: list[int] = []
        self._index: SplatIndex | None = None

    def get(self, calibration: Calibration, make: Callable[[], SplatIndex]) -> SplatIndex:
        """The index of `calibration`, from `make` unless it is the last one."""
        tensors = [getattr(calibration, field.name) for field in dataclasses.fields(calibration)]
        if any(tensor.is_inference() for tensor in tensors):
            return make()  # changes in place leave no trace in these
        if self._index is None or not self._holds(tensors):
            self._index = make()
            self._calibration, self._versions = tensors, [tensor._version for tensor in tensors]
        return self._index

    def _holds(self, tensors: list[Tensor]) -> bool:
        unchanged = [tensor._version for tensor in self._calibration] == self._versions
        pairs = zip(tensors, self._calibration, strict=True)
        return unchanged and all(a is b or (a.is_cpu and b.is_cpu and torch.equal(a, b)) for a, b in pairs)


class LSSTransform(LiftSplat):
    """Depth and context from image features alone."""

    def __init__(self, config: ViewTransformConfig, image_size: tuple[int, int], in_channels: int) -> None:
        super().__init__(config, image_size)
        self.depthnet = PointwiseConv(in_channels, self.bins + self.channels)

    def forward(
        self,
        features: Tensor,
        points: list[Tensor] | None,  # noqa: ARG002 - the call of both transforms is the same
        calibration: Calibration,
    ) -> Tensor:
        """(B, N, C, h, w) features → (B, C', X, Y); `points` are not used."""
        self.check_features(features)
        logits: Tensor = self.depthnet(channels_last(features.flatten(0, 1)))
        return self.splat(logits.unflatten(0, features.shape[:2]), calibration)


class DepthLSSTransform(LiftSplat):
    """Depth and context from image features and the LiDAR depth seen in the image."""

    def __init__(self, config: ViewTransformConfig, image_size: tuple[int, int], in_channels: int) -> None:
        super().__init__(config, image_size)
        self.dtransform = DepthTransform(_DEPTH_CHANNELS)
        self.depthnet = nn.Sequential(
            *conv_norm_act(_DEPTH_CHANNELS + in_channels, in_channels, 3),
            *conv_norm_act(in_channels, in_channels, 3),
            PointwiseConv(in_channels, self.bins + self.channels),
        )

    def forward(
        self,
        features: Tensor,
        points: list[Tensor] | None,
        calibration: Calibration,
        depth_raster: Tensor | None = None,
    ) -> Tensor:
        """(B, N, C, h, w) features and B × (P_i, F) points in the augmented LiDAR frame → (B, C', X, Y).

        `depth_raster` (B, N, H, W), m, takes the place of the depth image that is made of the points.

        Raises:
            BevctlError: neither points nor a raster.
        """
        self.check_features(features)
        if depth_raster is None:
            if points is None:
                raise BevctlError(
                    "the depth_lss view transform got no LiDAR points",
                    "Load points, or set model.camera.view.kind to lss.",
                )
            depth_raster = rasterize_depth(points, calibration, self.image_size)
        depth = self.dtransform(depth_raster.flatten(0, 1)[:, None])
        joined = torch.cat([depth, channels_last(features.flatten(0, 1))], dim=1)
        logits: Tensor = self.depthnet(joined)
        return self.splat(logits.unflatten(0, features.shape[:2]), calibration)


class PointwiseConv(nn.Conv2d):
    """1 × 1 convolution as one matrix product over the channels of a map."""

    bias: nn.Parameter

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) → (B, C, H, W), channels-last in memory."""
        pixels = linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias, autocast_dtype(x))
        return pixels.permute(0, 3, 1, 2)


def _downsample(channels: int) -> nn.Sequential:
    """Three 3×3 convolutions, the middle one with stride 2."""
    layers: list[nn.Module] = []
    for stride in (1, 2, 1):
        conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


VIEW_TRANSFORMS: dict[str, type[DepthLSSTransform] | type[LSSTransform]] = {
    "depth_lss": DepthLSSTransform,
    "lss": LSSTransform,
}


def build_view_transform(
    config: ViewTransformConfig, in_channels: int, image_size: tuple[int, int]
) -> DepthLSSTransform | LSSTransform:
    """The view transform that `config.kind` names."""
    return VIEW_TRANSFORMS[config.kind](config, image_size, in_channels)
