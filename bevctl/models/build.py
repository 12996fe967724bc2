"""From a config to a model: the one place that knows which sizes must agree."""

from __future__ import annotations

import math

from torch import nn

from bevctl.config.schema import CameraConfig, Config, LidarConfig, ModelConfig
from bevctl.errors import BevctlError, did_you_mean
from bevctl.models.bev_decoder import BevDecoder, ConvFuser
from bevctl.models.bevfusion import BEVFusion, CameraEncoder
from bevctl.models.box_coder import BevGrid
from bevctl.models.image_backbone import build_image_backbone
from bevctl.models.lidar import VoxelLidarEncoder
from bevctl.models.map_head import MapHead
from bevctl.models.neck import GeneralizedLSSFPN
from bevctl.models.transfusion import TransFusionHead
from bevctl.models.view_transform import DepthLSSTransform, LSSTransform

CHECKPOINTED_PARTS = ("camera", "lidar", "decoder")
LIDAR_STRIDE = 8
SINGLE_CELL_CLASSES = ("pedestrian", "traffic_cone")
"""Objects as small as a cell: two in neighbouring cells are both kept."""
VIEW_TRANSFORMS: dict[str, type[DepthLSSTransform] | type[LSSTransform]] = {
    "depth_lss": DepthLSSTransform,
    "lss": LSSTransform,
}
PARTS = (
    "encoders.camera.backbone",
    "encoders.camera.neck",
    "encoders.camera.vtransform",
    "encoders.lidar",
    "fuser",
    "decoder",
    "heads.object",
    "heads.map",
)


def build_model(config: Config) -> nn.Module:
    """The model that `config.model` describes, randomly initialised, on the CPU.

    Raises BevctlError where parts of the config do not fit together.
    """
    return MODELS[config.model.type](config)


def build_bevfusion(config: Config) -> BEVFusion:
    """BEVFusion with the sensors and heads that are not null."""
    model = config.model
    _check_parts(model)
    grid = bev_grid(model)
    encoders: dict[str, CameraEncoder | VoxelLidarEncoder] = {}
    channels = []
    if model.camera is not None:
        encoders["camera"] = _camera_encoder(model.camera, "camera" in model.checkpointing)
        channels.append(model.camera.view.channels)
    if model.lidar is not None:
        encoders["lidar"] = lidar = VoxelLidarEncoder(model.lidar, model.point_cloud_range)
        channels.append(lidar.out_channels)
    fuser = ConvFuser(channels, model.decoder.fused_channels) if len(channels) > 1 else None
    decoder = BevDecoder(
        channels[0] if fuser is None else model.decoder.fused_channels, model.decoder, "decoder" in model.checkpointing
    )
    return BEVFusion(encoders, fuser, decoder, _heads(config, decoder.channels, grid), "lidar" in model.checkpointing)


MODELS = {"bevfusion": build_bevfusion}


def trainable_parameters(model: nn.Module) -> dict[str, int]:
    """Number of trainable parameters of each part that the model has, by the prefix of its names."""
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        part = next(part for part in PARTS if name.startswith(part + "."))
        counts[part] += parameter.numel() if parameter.requires_grad else 0
    return {part: count for part, count in counts.items() if count}


def _camera_encoder(config: CameraConfig, checkpointing: bool) -> CameraEncoder:
    backbone = build_image_backbone(config, checkpointing)
    neck = GeneralizedLSSFPN(backbone.channels, config.neck_channels)
    view = VIEW_TRANSFORMS[config.view.kind](config.view, config.image_size, config.neck_channels)
    return CameraEncoder(backbone, neck, view, checkpointing)


def _heads(config: Config, channels: int, grid: BevGrid) -> dict[str, TransFusionHead | MapHead]:
    model, classes = config.model, config.data.classes
    heads: dict[str, TransFusionHead | MapHead] = {}
    if model.object is not None:
        single_cell = tuple(i for i, name in enumerate(classes) if name in SINGLE_CELL_CLASSES)
        heads["object"] = TransFusionHead(model.object, channels, len(classes), grid, single_cell)
    if model.map is not None:
        heads["map"] = MapHead(model.map, channels, config.data.map_classes, grid)
    return heads


def bev_grid(model: ModelConfig) -> BevGrid:
    """The cells of the bird's-eye view that the sensors share and the heads read.

    Raises BevctlError where the sensors' grids differ or have an odd number of cells.
    """
    grids = {}
    if model.camera is not None:
        grids["camera"] = _camera_grid(model.camera)
    if model.lidar is not None:
        grids["lidar"] = _lidar_grid(model.lidar, model.point_cloud_range)
    camera, lidar = grids.get("camera"), grids.get("lidar")
    if camera is not None and lidar is not None and not _same(camera, lidar):
        raise BevctlError(
            f"The camera's bird's-eye view has {_words(camera)}, the LiDAR's {_words(lidar)}.",
            "Match model.camera.view.xbound and ybound to model.point_cloud_range and model.lidar.voxel_size × 8.",
        )
    grid = camera or lidar
    if grid is None:
        raise BevctlError("The model has no sensor.", "Configure model.camera or model.lidar.")
    if grid.shape[0] % 2 or grid.shape[1] % 2:
        raise BevctlError(
            f"The bird's-eye view has {_words(grid)}, but the decoder needs even numbers.",
            "Change the range or the cell size.",
        )
    return grid


def _camera_grid(config: CameraConfig) -> BevGrid:
    view = config.view
    (x_low, x_high, x_step), (y_low, y_high, y_step) = view.xbound, view.ybound
    cell = (x_step * view.downsample, y_step * view.downsample)
    return BevGrid((x_low, y_low), cell, (round((x_high - x_low) / cell[0]), round((y_high - y_low) / cell[1])))


def _lidar_grid(config: LidarConfig, bounds: tuple[float, ...]) -> BevGrid:
    cell = (config.voxel_size[0] * LIDAR_STRIDE, config.voxel_size[1] * LIDAR_STRIDE)
    shape = (round((bounds[3] - bounds[0]) / cell[0]), round((bounds[4] - bounds[1]) / cell[1]))
    return BevGrid((bounds[0], bounds[1]), cell, shape)


def _same(a: BevGrid, b: BevGrid) -> bool:
    pairs = zip((*a.lower, *a.cell), (*b.lower, *b.cell), strict=True)
    return a.shape == b.shape and all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6) for x, y in pairs)


def _words(grid: BevGrid) -> str:
    (x, y), (cell_x, cell_y) = grid.shape, grid.cell
    return f"{x} × {y} cells of {cell_x:g} × {cell_y:g} m from ({grid.lower[0]:g}, {grid.lower[1]:g})"


def _check_parts(model: ModelConfig) -> None:
    for part in model.checkpointing:
        if part not in CHECKPOINTED_PARTS:
            raise BevctlError(
                f"model.checkpointing names {part!r}, which is no part.", did_you_mean(part, CHECKPOINTED_PARTS)
            )
    if model.object is None and model.map is None:
        raise BevctlError("The model has no head.", "Configure model.object or model.map.")
