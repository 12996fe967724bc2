"""From a config to a model: the one place that knows which sizes must agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevctl.config.rules import LIDAR_STRIDE
from bevctl.config.rules import PARTS as CHECKPOINTED_PARTS
from bevctl.config.schema import CameraConfig, Config, ModelConfig, ViewTransformConfig
from bevctl.models.bev_decoder import BevDecoder, ConvFuser, TaskDecoders
from bevctl.models.bevfusion import BEVFusion, CameraEncoder
from bevctl.models.box_coder import BevGrid
from bevctl.models.build_petrv2 import build_petrv2
from bevctl.models.image_backbone import OWN, build_image_backbone
from bevctl.models.image_input import ImageInput
from bevctl.models.lidar import VoxelLidarEncoder
from bevctl.models.map_head import MapHead
from bevctl.models.mmdet3d import build_mmdet3d
from bevctl.models.neck import GeneralizedLSSFPN
from bevctl.models.network import Network
from bevctl.models.transfusion import TransFusionHead
from bevctl.models.view_transform import build_view_transform

SINGLE_CELL_CLASSES = ("pedestrian", "traffic_cone")
"""Objects as small as a cell: two in neighbouring cells are both kept."""
PARTS = (
    "encoders.camera.backbone",
    "encoders.camera.neck",
    "encoders.camera.vtransform",
    "encoders.camera.position",
    "encoders.lidar",
    "fuser",
    "decoder",
    "heads.object",
    "heads.map",
)
"""Parts that models have, in the order in which a step runs through them; none has all."""
_STATIC_PARTS = {
    "bevfusion": {
        "encoders.camera.backbone": "",
        "encoders.camera.neck": "",
        "encoders.camera.vtransform.dtransform": "camera",
        "encoders.camera.vtransform.depthnet": "camera",
        "encoders.camera.vtransform.downsample": "camera",
        "encoders.lidar.backbone": "lidar",
        "fuser": "",
        "decoder": "",
        "heads.object": "",
        "heads.map": "",
    },
    "petrv2": {
        "encoders.camera.backbone": "",
        "encoders.camera.neck": "",
        "encoders.camera.position": "",
        "heads.object": "decoder",
        "heads.map": "decoder",
    },
    "mmdet3d": {},
}
"""Of each family the modules whose tensors have the same shapes in every step, and the checkpointing that recomputes
them from outside, or what is random inside them: no recording can hold the random states that are put back."""
_ALL_KERNELS = ("encoders.lidar.backbone",)
_RECOMPUTES_INSIDE = {"encoders.camera.backbone": "camera", "decoder": "decoder"}
_POINT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def static_parts(model: ModelConfig, for_compiler: bool = False) -> list[str]:
    """Names of modules that can be replaced as a whole: shapes never change, and nothing around them runs them twice.

    What a compiler has no use for is left out if asked: modules that recompute their own activations, and those that
    are kernels of our own throughout.
    """
    recomputing_inside = set(_RECOMPUTES_INSIDE) if for_compiler else set()
    if model.camera is not None and model.camera.backbone not in OWN:  # a timm model may be random
        recomputing_inside.add("encoders.camera.backbone")
    names = [
        name
        for name, outside in _STATIC_PARTS[model.type].items()
        if outside not in model.checkpointing
        and not (for_compiler and name in _ALL_KERNELS)
        and not (name in recomputing_inside and _RECOMPUTES_INSIDE[name] in model.checkpointing)
    ]
    decoders = [f"decoder.{task}" for task in decoder_tasks(model)]
    return [part for name in names for part in (decoders if name == "decoder" and decoders else [name])]


def decoder_tasks(model: ModelConfig) -> tuple[str, ...]:
    """The tasks that have a BEV decoder of their own; none where one serves all."""
    both = model.object is not None and model.map is not None
    return ("object", "map") if both and not model.shared_decoder else ()


def build_model(config: Config) -> Network:
    """The model that `config.model` describes, randomly initialised, on the CPU.

    A config that `config.load` accepts fits together. Raises BevctlError for an image backbone that does not exist.
    """
    return MODELS[config.model.type](config)


def build_bevfusion(config: Config) -> BEVFusion:
    """BEVFusion with the sensors and heads that are not null."""
    model = config.model
    recomputed = {part: part in model.checkpointing for part in CHECKPOINTED_PARTS}
    grid = bev_grid(model)
    encoders: dict[str, CameraEncoder | VoxelLidarEncoder] = {}
    channels = []
    if model.camera is not None:
        view = _view_of(model.camera)
        encoders["camera"] = _camera_encoder(model.camera, view, recomputed["camera"])
        channels.append(view.channels)
    if model.lidar is not None:
        encoders["lidar"] = lidar = VoxelLidarEncoder(model.lidar, model.point_cloud_range)
        channels.append(lidar.out_channels)
    fuser = ConvFuser(channels, model.decoder.fused_channels) if len(channels) > 1 else None
    fused_channels = channels[0] if fuser is None else model.decoder.fused_channels
    decoder = _decoder(model, fused_channels, recomputed["decoder"])
    for part in (encoders.get("lidar"), decoder):
        _set_norm_momentum(part, model.norm_momentum)
    heads = _heads(config, 2 * model.decoder.neck_channels, grid)
    network = BEVFusion(encoders, fuser, decoder, heads, recomputed["lidar"], _POINT_DTYPES[model.point_dtype])
    network.freeze(model.freeze)
    return network


MODELS: dict[str, Callable[[Config], Network]] = {
    "bevfusion": build_bevfusion,
    "petrv2": build_petrv2,
    "mmdet3d": build_mmdet3d,
}


def parts_of(model: nn.Module) -> list[str]:
    """Names of the parts of a model: ours, or the children with parameters of a model that came from elsewhere."""
    present = dict(model.named_modules())
    children = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return [part for part in PARTS if part in present] or children


def trainable_parameters(model: nn.Module) -> dict[str, int]:
    """Number of trainable parameters of each part that the model has, by the prefix of its names."""
    counts = dict.fromkeys(parts_of(model), 0)
    for name, parameter in model.named_parameters():
        part = next((part for part in counts if name.startswith(part + ".")), name)
        counts[part] = counts.get(part, 0) + (parameter.numel() if parameter.requires_grad else 0)
    return {part: count for part, count in counts.items() if count}


def _view_of(camera: CameraConfig) -> ViewTransformConfig:
    """The view transform that BEVFusion's camera branch has."""
    assert camera.view is not None, "BEVFusion's camera branch has a view transform"
    return camera.view


def _camera_encoder(config: CameraConfig, view: ViewTransformConfig, checkpointing: bool) -> CameraEncoder:
    backbone = build_image_backbone(config, checkpointing)
    neck = GeneralizedLSSFPN(backbone.channels, config.neck_channels)
    transform = build_view_transform(view, config.neck_channels, config.image_size)
    return CameraEncoder(ImageInput(config.normalize), backbone, neck, transform, checkpointing)


def _decoder(model: ModelConfig, channels: int, checkpointing: bool) -> BevDecoder | TaskDecoders:
    tasks = decoder_tasks(model)
    if not tasks:
        return BevDecoder(channels, model.decoder, checkpointing)
    return TaskDecoders({task: BevDecoder(channels, model.decoder, checkpointing) for task in tasks})


def _set_norm_momentum(part: nn.Module | None, momentum: float) -> None:
    for module in part.modules() if part is not None else ():
        if isinstance(module, _BatchNorm):
            module.momentum = momentum


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
    """The cells of the bird's-eye view that the heads read; where there are two sensors, their grids agree."""
    if model.lidar is not None:
        bounds = model.point_cloud_range
        return _grid((bounds[0], bounds[3]), (bounds[1], bounds[4]), model.lidar.voxel_size[:2], LIDAR_STRIDE)
    assert model.camera is not None, "a model has a sensor"
    view = _view_of(model.camera)
    return _grid(view.xbound[:2], view.ybound[:2], (view.xbound[2], view.ybound[2]), view.downsample)


def _grid(x: tuple[float, float], y: tuple[float, float], cell: tuple[float, float], stride: int) -> BevGrid:
    """Grid over two spans whose cells are `stride` times `cell`."""
    cell_x, cell_y = cell[0] * stride, cell[1] * stride
    return BevGrid((x[0], y[0]), (cell_x, cell_y), (round((x[1] - x[0]) / cell_x), round((y[1] - y[0]) / cell_y)))
