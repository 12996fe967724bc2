"""Our view transforms and sparse encoder under mmdet3d's registry, in the place of those of its BEVFusion project.

A config takes them so; arguments, inputs, outputs and names in checkpoints stay those of `projects/BEVFusion`:

    custom_imports = dict(imports=["projects.BEVFusion.bevfusion", "bevctl.integrations.mmdet3d"])
    view_transform = dict(type="BevctlDepthLSSTransform", ...)      # DepthLSSTransform
    view_transform = dict(type="BevctlLSSTransform", ...)           # LSSTransform
    pts_middle_encoder = dict(type="BevctlSparseEncoder", ...)      # BEVFusionSparseEncoder

Numbers agree to rounding, with one exception: where several LiDAR points fall into one pixel, the original writes
whichever comes last, which a GPU does not define; see `bevctl.models.view_geometry.rasterize_depth` for ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmdet3d.registry import MODELS
from torch import Tensor

from bevctl.batch import Calibration
from bevctl.config.schema import ViewTransformConfig
from bevctl.models.lidar import WINDOWS, SparseEncoder
from bevctl.models.view_transform import STRIDE, DepthLSSTransform, LSSTransform
from bevctl.ops.sites import Room, fit_rows, plan_sites
from bevctl.ops.sparse_conv import SparseTensor

Bound = tuple[float, float, float]
Size = tuple[int, int]
_PADDINGS = ((0, 0, 1), (0, 0, 1), (0, 0, (1, 1, 0)), (0, 0))
"""The only paddings that the encoder has; those of BEVFusion's configs."""


def _config(kind: str, channels: int, bounds: Sequence[Bound], dbound: Bound, downsample: int) -> ViewTransformConfig:
    x, y, z, depth = (_three(bound) for bound in (*bounds, dbound))
    # The original rounds towards zero, so that points just below a lower bound count in its first cell.
    return ViewTransformConfig(kind, x, y, z, depth, channels, downsample, truncate=True)


def _three(bound: Sequence[float]) -> Bound:
    first, end, step = bound
    return float(first), float(end), float(step)


def _checked(image_size: Size, feature_size: Size) -> Size:
    height, width = image_size
    if tuple(feature_size) != (height // STRIDE, width // STRIDE):
        raise ValueError(f"feature_size must be image_size {tuple(image_size)} / {STRIDE}, got {tuple(feature_size)}")
    return height, width


def _calibration(
    intrinsics: Tensor, camera2lidar: Tensor, lidar2image: Tensor, aug: tuple[Tensor, Tensor]
) -> Calibration:
    image_aug, lidar_aug = aug
    return Calibration(
        intrinsics=_square(intrinsics),
        camera2lidar=_square(camera2lidar),
        lidar2image=_square(lidar2image),
        image_aug=_square(image_aug),
        lidar_aug=_square(lidar_aug),
        times=torch.zeros(camera2lidar.shape[:2], device=camera2lidar.device),
    )


def _square(matrix: Tensor) -> Tensor:
    """(…, 3, 3) or (…, 4, 4) → (…, 4, 4) float32."""
    if matrix.shape[-1] == 4:
        return matrix.float()
    whole = torch.eye(4, device=matrix.device).expand(*matrix.shape[:-2], 4, 4).clone()
    whole[..., :3, :3] = matrix
    return whole


class _ViewArguments:
    """Arguments of mmdet3d's view transforms, for ours.

    Args:
        feature_size: h, w of the features, an eighth of image_size.
        xbound: first, end and cell in metres; likewise ybound and zbound, and dbound for the depth bins.
    """

    _kind: str

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        image_size: Size,
        feature_size: Size,
        xbound: Bound,
        ybound: Bound,
        zbound: Bound,
        dbound: Bound,
        downsample: int = 1,
    ) -> None:
        config = _config(self._kind, out_channels, (xbound, ybound, zbound), dbound, downsample)
        super().__init__(config, _checked(image_size, feature_size), in_channels)  # type: ignore[call-arg]


@MODELS.register_module()
class BevctlLSSTransform(_ViewArguments, LSSTransform):
    """LSSTransform of mmdet3d's BEVFusion project, with the fused lift-splat; see `_ViewArguments`."""

    _kind = "lss"

    def forward(  # type: ignore[override]
        self,
        img: Tensor,
        points: list[Tensor],
        lidar2image: Tensor,
        camera_intrinsics: Tensor,
        camera2lidar: Tensor,
        img_aug_matrix: Tensor,
        lidar_aug_matrix: Tensor,
        metas: Any = None,
    ) -> Tensor:
        """(B, N, C, h, w) features and (B, N, 4, 4) matrices → (B, C', X, Y)."""
        del metas
        aug = (img_aug_matrix, lidar_aug_matrix)
        return super().forward(img, points, _calibration(camera_intrinsics, camera2lidar, lidar2image, aug))


@MODELS.register_module()
class BevctlDepthLSSTransform(_ViewArguments, DepthLSSTransform):
    """DepthLSSTransform of mmdet3d's BEVFusion project, with the fused lift-splat; see `_ViewArguments`."""

    _kind = "depth_lss"

    def forward(  # type: ignore[override]
        self,
        img: Tensor,
        points: list[Tensor],
        lidar2image: Tensor,
        cam_intrinsic: Tensor,
        camera2lidar: Tensor,
        img_aug_matrix: Tensor,
        lidar_aug_matrix: Tensor,
        metas: Any = None,
    ) -> Tensor:
        """(B, N, C, h, w) features, B × (P_i, F) points in the augmented LiDAR frame, which stay as they are,
        and (B, N, 4, 4) matrices → (B, C', X, Y)."""
        del metas
        aug = (img_aug_matrix, lidar_aug_matrix)
        return super().forward(img, points, _calibration(cam_intrinsic, camera2lidar, lidar2image, aug))


@MODELS.register_module()
class BevctlSparseEncoder(SparseEncoder):
    """BEVFusionSparseEncoder of mmdet3d's BEVFusion project: residual blocks, cells in the order x, y, z.

    Args:
        sparse_shape: cells along x, y and z, one more in z than the voxel grid has.
        encoder_channels: of each stage, its blocks and, except in the last, its strided convolution.

    Raises:
        ValueError: an arrangement that our encoder does not have.
    """

    def __init__(
        self,
        in_channels: int,
        sparse_shape: Sequence[int],
        order: Sequence[str] = ("conv", "norm", "act"),
        norm_cfg: Mapping[str, Any] | None = None,
        base_channels: int = 16,
        output_channels: int = 128,
        encoder_channels: Sequence[Sequence[int]] = ((16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128)),
        encoder_paddings: Sequence[Sequence[Any]] = _PADDINGS,
        block_type: str = "basicblock",
        return_middle_feats: bool = False,
    ) -> None:
        widths, blocks = _arrangement(encoder_channels, base_channels)
        plain = tuple(order) == ("conv", "norm", "act") and block_type == "basicblock" and not return_middle_feats
        if not plain or _plain(encoder_paddings) != _PADDINGS or float((norm_cfg or {}).get("eps", 1e-3)) != 1e-3:
            raise ValueError(
                "BevctlSparseEncoder is BEVFusion's encoder: block_type='basicblock', order conv, norm, act, eps 1e-3, "
                f"no middle features, and encoder_paddings {_PADDINGS}"
            )
        x, y, z = sparse_shape
        super().__init__(in_channels, widths, blocks, output_channels, (x, y, z))
        momentum = (norm_cfg or {}).get("momentum", 0.01)
        for module in self.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.momentum = momentum
        self._room = Room()
        self.register_load_state_dict_pre_hook(_kernels_in_our_order)

    def forward(self, voxel_features: Tensor, coors: Tensor, batch_size: int) -> Tensor:  # type: ignore[override]
        """(M, C) features of voxels at (M, 4) cells b, x, y, z, in any order → (B, out_channels · Z, X, Y)."""
        x, y, z = self.in_shape
        cells = coors.long()
        places = ((cells[:, 0] * x + cells[:, 1]) * y + cells[:, 2]) * z + cells[:, 3]
        order = places.argsort()
        sites = plan_sites(cells[order], self.in_shape, int(batch_size), WINDOWS, self._room if self.training else None)
        return super().forward(SparseTensor(fit_rows(voxel_features[order], len(sites), 0), sites))


def _plain(value: Any) -> Any:
    """Nested lists as tuples."""
    return tuple(_plain(item) for item in value) if isinstance(value, list | tuple) else value


def _arrangement(channels: Sequence[Sequence[int]], base: int) -> tuple[tuple[int, int, int, int], int]:
    """Width of the four stages, and residual blocks of each. Raises ValueError for any other arrangement."""
    widths = [stage[0] for stage in channels]
    blocks = len(channels[-1]) if channels else 0
    expected = [[w] * blocks + [following] for w, following in itertools.pairwise(widths)]
    if len(widths) != 4 or base != widths[0] or [list(stage) for stage in channels[:-1]] != expected:
        raise ValueError(f"encoder_channels {channels} are not those of BEVFusion's encoder with base_channels {base}")
    return (widths[0], widths[1], widths[2], widths[3]), blocks


def _kernels_in_our_order(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Kernels of spconv 2, (out, x, y, z, in), as ours and mmcv's are: (x, y, z, in, out)."""
    for name, parameter in module.named_parameters():
        found = state.get(prefix + name)
        if isinstance(found, Tensor) and found.dim() == 5 and found.shape != parameter.shape:
            moved = found.permute(1, 2, 3, 4, 0)
            state[prefix + name] = moved.contiguous() if moved.shape == parameter.shape else found
