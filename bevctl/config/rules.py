"""What must hold between the values of a config, beyond the type and range of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bevctl.config.problem import Problem
from bevctl.config.rules_petr import petr_problems
from bevctl.config.schema import (
    VEHICLE,
    CameraConfig,
    Config,
    DataConfig,
    LidarConfig,
    ModelConfig,
    ObjectHeadConfig,
    SwinConfig,
    ViewTransformConfig,
)
from bevctl.config.span import parse_span

LIDAR_STRIDE = 8
"""Stride of the sparse encoder in x and y."""
IMAGE_STRIDE = 32
"""Stride of the last stage of the image backbone."""
PARTS = ("camera", "lidar", "decoder")
METRICS = ("", "mAP", "NDS", "mIoU")
_SPAN_HINT = "For example 2.5:2.8 or [2.5, 2.8]; one side may be empty. 2.5:2.8@500:9000 names iterations."
_MOST_CELLS = 1e6
_WHOLE = 1e-3
"""How far a count of cells may be from a whole number; covers decimal cell sizes such as 0.075."""


def problems(config: Config) -> Iterator[Problem]:
    """The rules that the config breaks, those first that others build on."""
    yield from _run(config)
    yield from _data(config.data)
    yield from _optim(config)
    if config.model.type == "mmdet3d":
        yield from _mmdet3d(config.model)
        return
    yield from _parts(config.model)
    yield from _spans(config.model)
    if config.model.camera:
        yield from _camera(config.model.camera)
    yield from _map(config)
    yield from petr_problems(config.model) if config.model.type == "petrv2" else _bevfusion(config.model, config.data)


def _run(config: Config) -> Iterator[Problem]:
    if not config.name or "/" in config.name or config.name in (".", ".."):
        yield Problem("name", f"name must be usable as a folder name, not {config.name!r}.", "Use letters and digits.")
    if config.train.best not in METRICS:
        yield Problem("train.best", f"train.best is {config.train.best!r}.", "Use mAP, NDS, mIoU, or leave it empty.")
    for metric, span in config.expect.items():
        if not _is_span(span):
            key = f"expect.{metric}"
            yield Problem(key, f"{key} must be low:high, not {span!r}.", _SPAN_HINT)
    scale = config.precision.loss_scale
    if isinstance(scale, str) and scale != "dynamic":
        message = f"precision.loss_scale must be dynamic or a number above zero, not {scale!r}."
        yield Problem("precision.loss_scale", message, "For example 512.")


def _is_span(text: str) -> bool:
    try:
        parse_span(text)
    except ValueError:
        return False
    return True


def _data(data: DataConfig) -> Iterator[Problem]:
    defaults = DataConfig()
    yield from _names("data.classes", data.classes, defaults.classes)
    yield from _names("data.map_classes", data.map_classes, (*defaults.map_classes, VEHICLE))
    spans: list[tuple[str, tuple[float, float]]] = [
        ("data.image.resize", data.image.resize),
        ("data.image.rotate", data.image.rotate),
        ("data.space.rotate", data.space.rotate),
        ("data.space.scale", data.space.scale),
    ]
    if data.previous:
        spans.append(("data.previous.train", data.previous.train))
    for key, span in spans:
        if span[0] > span[1]:
            yield Problem(key, f"{key} is [{span[0]}, {span[1]}]: the low end comes first.", "Swap the two values.")


def _names(key: str, names: Sequence[str], known: Sequence[str]) -> Iterator[Problem]:
    unknown = [name for name in names if name not in known]
    if unknown:
        yield Problem(key, f"{key} holds {unknown[0]!r}, which is no nuScenes class.", f"Known: {', '.join(known)}.")
    if not names:
        yield Problem(key, f"{key} is empty.", f"Known: {', '.join(known)}.")
    twice = [name for name in known if names.count(name) > 1]
    if twice:
        yield Problem(key, f"{key} holds {twice[0]!r} twice.", "Each class is one output: keep it once.")


def _optim(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.lr_scaling != "none" and (optim.base_batch is None or optim.base_lr is None):
        message = f"optim.lr_scaling is {optim.lr_scaling}, but optim.base_batch or optim.base_lr is not given."
        yield Problem("optim.lr_scaling", message, "Give both, or set optim.lr_scaling to none.")
    for group in optim.groups:
        if not group.match:
            yield Problem("optim.groups", "A group of optim.groups has no match.", "Give a part of a parameter's name.")


def _parts(model: ModelConfig) -> Iterator[Problem]:
    if model.camera is None and model.lidar is None:
        yield Problem(
            "model.camera", "model.camera and model.lidar are both null.", "A model needs at least one sensor."
        )
    if model.object is None and model.map is None:
        yield Problem("model.object", "model.object and model.map are both null.", "A model needs at least one head.")
    for part in model.checkpointing:
        if part not in PARTS:
            message = f"model.checkpointing holds {part!r}."
            yield Problem("model.checkpointing", message, f"Known: {', '.join(PARTS)}.")


def _spans(model: ModelConfig) -> Iterator[Problem]:
    """No range is empty, and every (low, high, step) list counts whole cells."""
    ranges = {"model.point_cloud_range": model.point_cloud_range}
    if model.petr:
        ranges["model.petr.position_range"] = model.petr.position_range
    for key, bounds in ranges.items():
        for axis in range(3):
            if bounds[axis] >= bounds[axis + 3]:
                message = f"{key} is empty in {'xyz'[axis]}: {bounds[axis]} to {bounds[axis + 3]}."
                yield Problem(key, message, "Order: x, y, z lower bounds, then the upper ones.")
    axes: dict[str, tuple[float, float, float]] = {}
    if model.camera and model.camera.view:
        view = model.camera.view
        axes |= {f"model.camera.view.{name}": getattr(view, name) for name in ("xbound", "ybound", "zbound", "dbound")}
    if model.map:
        axes |= {"model.map.xbound": model.map.xbound, "model.map.ybound": model.map.ybound}
    for key, (low, high, step) in axes.items():
        if step <= 0 or low >= high:
            yield Problem(key, f"{key} is [{low}, {high}, {step}].", "Order: low, high, a step above zero.")
        elif _cells(low, high, step) is None:
            message = f"{key}: {low} to {high} is no whole number of steps of {step}."
            yield Problem(key, message, "Change the step or an end.")
    if model.camera and model.camera.view and model.camera.view.dbound[0] <= 0:
        yield Problem("model.camera.view.dbound", "model.camera.view.dbound starts at no depth.", "Start above 0 m.")


def _cells(low: float, high: float, step: float) -> int | None:
    """Whole cells from low to high, None where there is a rest, no cell or an absurd number of them."""
    count = (high - low) / step if step > 0 else 0.0
    if not 0.5 <= count < _MOST_CELLS:
        return None
    return round(count) if abs(count - round(count)) < _WHOLE else None


def _voxels(lidar: LidarConfig, bounds: Sequence[float]) -> Iterator[Problem]:
    key = "model.lidar.voxel_size"
    for axis in range(3):
        span = f"{bounds[axis]} to {bounds[axis + 3]} m in {'xyz'[axis]}"
        size = lidar.voxel_size[axis]
        count = _cells(bounds[axis], bounds[axis + 3], size)
        if count is None:
            yield Problem(
                key, f"{key}: {span} is no whole number of voxels of {size} m.", "Change the voxel or the range."
            )
        elif axis < 2 and count % (2 * LIDAR_STRIDE):
            message = f"{key}: {span} is {count} voxels, no multiple of the network's stride {2 * LIDAR_STRIDE}."
            yield Problem(key, message, "Change the voxel or the range, for example to a power of two of voxels.")
        elif axis == 2 and count < LIDAR_STRIDE * 3:
            message = f"{key}: {span} is {count} voxels, too few for the encoder's strides."
            yield Problem(key, message, f"Use at least {LIDAR_STRIDE * 3}.")


def _same_grid(view: ViewTransformConfig, lidar: LidarConfig | None, bounds: Sequence[float]) -> Iterator[Problem]:
    """The camera's bird's-eye view must span the range and, with a LiDAR, have its cells."""
    for axis, name in enumerate(("xbound", "ybound")):
        low, high, step = getattr(view, name)
        cell = step * view.downsample
        wanted = lidar.voxel_size[axis] * LIDAR_STRIDE if lidar else cell
        range_low, range_high = bounds[axis], bounds[axis + 3]
        if max(abs(low - range_low), abs(high - range_high), abs(cell - wanted)) > _WHOLE:
            message = (
                f"The camera's grid in {'xy'[axis]} ({low:g} to {high:g} m, cell {cell:g}) is not that of the range "
                f"and voxels ({range_low:g} to {range_high:g} m, cell {wanted:g})."
            )
            hint = "Make the bounds those of model.point_cloud_range, and step × downsample equal to 8 × voxel."
            yield Problem(f"model.camera.view.{name}", message, hint)


def _camera(camera: CameraConfig) -> Iterator[Problem]:
    height, width = camera.image_size
    if height % IMAGE_STRIDE or width % IMAGE_STRIDE:
        message = f"model.camera.image_size is [{height}, {width}]; both must be multiples of {IMAGE_STRIDE}."
        nearest = [max(1, round(side / IMAGE_STRIDE)) * IMAGE_STRIDE for side in (height, width)]
        yield Problem("model.camera.image_size", message, f"For example {nearest}.")
    if camera.backbone == "swin":
        yield from _swin(camera.swin)
    if camera.view:
        yield from _view(camera.view)


def _view(view: ViewTransformConfig) -> Iterator[Problem]:
    for name in ("xbound", "ybound"):
        low, high, step = getattr(view, name)
        cells = _cells(low, high, step)
        if cells is not None and cells % (2 * view.downsample):
            message = f"model.camera.view.{name} gives {cells} cells, which downsample and the decoder do not halve."
            yield Problem(f"model.camera.view.{name}", message, f"Use a multiple of {2 * view.downsample}.")
    if _cells(*view.zbound) not in (None, 1):
        message = f"model.camera.view.zbound gives {_cells(*view.zbound)} cells; the view is flat."
        yield Problem("model.camera.view.zbound", message, "Make the step as long as the range.")


def _swin(swin: SwinConfig) -> Iterator[Problem]:
    if len(swin.depths) != 4 or len(swin.heads) != 4:
        message = f"model.camera.swin has {len(swin.depths)} depths and {len(swin.heads)} heads."
        yield Problem("model.camera.swin.depths", message, "Swin has four stages: give four of each.")
        return
    for stage, heads in enumerate(swin.heads):
        channels = swin.embed * 2**stage
        if channels % heads:
            message = f"model.camera.swin: {heads} heads do not divide the {channels} channels of stage {stage + 1}."
            yield Problem("model.camera.swin.heads", message, "Stage n has embed × 2^(n-1) channels.")


def _mmdet3d(model: ModelConfig) -> Iterator[Problem]:
    if model.mmdet3d is None or not model.mmdet3d.config:
        message = "model.type is mmdet3d, but model.mmdet3d.config names no config of it."
        yield Problem("model.mmdet3d", message, "Give the config itself: bevctl train CONFIG.py --engine mmdet3d.")
    if model.checkpointing:
        message = "model.checkpointing is set, but mmdet3d's models recompute what their own config says."
        yield Problem("model.checkpointing", message, "Set with_cp=True in the config of the backbone.")


def _map(config: Config) -> Iterator[Problem]:
    head, classes = config.model.map, config.data.map_classes
    if head and head.class_weights and len(head.class_weights) != len(classes):
        message = f"model.map.class_weights has {len(head.class_weights)} values for {len(classes)} map classes."
        yield Problem("model.map.class_weights", message, "Give one for each of data.map_classes, or none.")


def _bevfusion(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    if data.previous:
        message = "data.previous is given, but bevfusion sees one moment."
        yield Problem("data.previous", message, "Set data.previous to null, or start from the config petrv2.")
    if data.image.pad:
        message = "data.image.pad is true, but bevfusion would look at the padding."
        yield Problem("data.image.pad", message, "Set it to false: images lie at the bottom then.")
    if model.petr:
        message = "model.petr is given, but model.type is bevfusion."
        yield Problem("model.petr", message, "Set model.petr to null, or start from the config petrv2.")
    if model.camera and not model.camera.view:
        message = "model.camera.view is null, but bevfusion lifts images into the bird's-eye view."
        yield Problem("model.camera.view", message, "Give model.camera.view, or set model.camera to null.")
    if model.camera and model.camera.view and model.camera.view.kind == "depth_lss" and model.lidar is None:
        message = "model.camera.view.kind is depth_lss, which reads LiDAR points, but model.lidar is null."
        yield Problem("model.camera.view.kind", message, "Use lss, or keep the LiDAR branch.")
    if model.lidar:
        yield from _voxels(model.lidar, model.point_cloud_range)
    if model.camera and model.camera.view:
        yield from _same_grid(model.camera.view, model.lidar, model.point_cloud_range)
    if model.object:
        yield from _queries(model.object)


def _queries(head: ObjectHeadConfig) -> Iterator[Problem]:
    if head.hidden % head.attention_heads:
        message = f"model.object: {head.attention_heads} attention heads do not divide hidden {head.hidden}."
        yield Problem("model.object.attention_heads", message, "Use a divisor, for example 8 for 128.")
    if head.nms_kernel % 2 == 0:
        yield Problem("model.object.nms_kernel", f"model.object.nms_kernel is {head.nms_kernel}.", "Use an odd number.")
