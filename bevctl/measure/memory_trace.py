"""The memory of a training step, counted on tensors without contents: any size, no GPU, a few seconds.

The step is the real one, as it runs on a GPU with the kernels: every operation makes its outputs, the backward pass
keeps what it keeps, and each storage is counted from its birth to its death. Nothing is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bevctl.batch import CAMERAS, Batch, Calibration
from bevctl.config.schema import Config
from bevctl.engine.precision import Precision, keep_fp32
from bevctl.engine.step import total_loss
from bevctl.measure.memory_allocator import Allocator, Block, tensor_bytes
from bevctl.measure.memory_places import INPUTS, REST, watch
from bevctl.measure.parameters import without_weights
from bevctl.models.build import build_model, static_parts
from bevctl.models.lidar import WINDOWS, VoxelLidarEncoder
from bevctl.models.petrv2_transformer import Attention
from bevctl.models.transfusion import TransFusionHead
from bevctl.ops import backend
from bevctl.ops.rulebook import Triple, output_shape
from bevctl.ops.sites import ColumnMap, Room, Sites
from bevctl.ops.sparse_conv import SparseTensor

SLACK = "gaps in the pools of CUDA graphs"
_SCALE = 65536.0


@dataclasses.dataclass(frozen=True)
class SampleSize:
    """What of a sample varies and takes memory."""

    points: int
    sites: tuple[int, ...]
    """Active cells of the voxel grid and after each strided convolution of the LiDAR encoder; empty without one."""
    boxes: int = 0


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of one step in its steady state."""

    parameters: int
    learning: int
    """Of the parameters, those that learn."""
    buffers: int
    by_part: dict[str, int]
    """The rest of what is allocated at its most, by the part of the model that made it."""
    pools: int
    """Of that, in the pools of recorded parts."""
    reserved: int
    """Segments of all pools, without parameters, buffers and the optimizer's state."""

    @property
    def peak(self) -> int:
        """Sum of `by_part`."""
        return sum(self.by_part.values())


def trace_step(config: Config, precision: str, sizes: Sequence[SampleSize]) -> StepMemory:
    """Memory of a training step of `config` in `precision` (fp16, bf16 or fp32) on one sample of each of `sizes`.

    As it runs with the kernels; where plain torch is asked for (BEVCTL_KERNELS=torch), as it runs without them, but for
    the LiDAR encoder and the losses, whose shapes nobody knows beforehand.

    Raises:
        ImportError: Triton, in whose wrappers the kernels' outputs are made, is not installed.
    """
    with torch.device("meta"):
        model = build_model(without_weights(config)).train()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor")
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_LikeGpu())
        plain = backend.is_plain()
        stack.enter_context(backend.assumed())
        _without_contents(model)
        _fuse_attention(model)
        keep_fp32(model, config.precision.fp32_modules, "cpu")
        recorded = static_parts(config.model) if config.train.cuda_graphs else []
        ledger = _Ledger()
        stack.enter_context(ledger)
        ledger.part = INPUTS
        batch = _batch(config, sizes)
        _assume_sites(model, sizes)
        if plain:
            _keep_kernels(model)
            stack.enter_context(backend.forced("torch"))
        watch(model, ledger, recorded)
        with Precision(precision, "cpu").autocast():
            losses = model(batch)
        (total_loss(losses) * _SCALE).backward()
        return _summary(model, ledger)


def _summary(model: nn.Module, ledger: _Ledger) -> StepMemory:
    shared, *recorded = ledger.pools.values()
    composition: Counter[str] = shared.at_peak.copy()
    for pool in recorded:
        composition += pool.at_peak
    pools = sum(pool.allocator.reserved for pool in recorded)
    slack = pools - sum(pool.peak for pool in recorded)
    return StepMemory(
        parameters=sum(tensor_bytes(p) for p in model.parameters()),
        learning=sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad),
        buffers=sum(tensor_bytes(b) for b in model.buffers()),
        by_part={**composition, **({SLACK: slack} if slack else {})},
        pools=pools,
        reserved=pools + shared.allocator.reserved,
    )


def _without_contents(model: nn.Module) -> None:
    """Puts fake tensors in the place of parameters and buffers."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, nn.Parameter(fake, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent)


def _fuse_attention(model: nn.Module) -> None:
    """Attention that keeps no weights, as a GPU has it; a CPU has it only without dropout, whose mask neither keeps."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | Attention):
            module.dropout = 0.0


class _LikeGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU, whose autograd engine would want a real one; addresses are made up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is Tensor.data_ptr:
            return args[0].untyped_storage()._cdata
        return func(*args, **(kwargs or {}))


class _Ledger(TorchDispatchMode):
    """Counts each storage from its birth to its death, for the pool and the part that it was born in.

    A recorded part has a pool of its own; everything else shares one, called "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.part, self.pool = REST, ""
        self.pools: dict[str, _Pool] = {"": _Pool()}
        self._known: dict[int, tuple[weakref.ref[Any], _Storage]] = {}

    def enter(self, part: str, pool: str = "") -> None:
        """What is born from now on belongs to `part`, and lies in `pool`."""
        self.part, self.pool = part, pool
        self.pools.setdefault(pool, _Pool())

    def relabel(self, tensor: Tensor, part: str) -> None:
        """Counts the storage of `tensor` for `part` from now on."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            storage = known[1]
            storage.pool.live[storage.part] -= storage.block.size
            storage.part = part
            storage.pool.live[part] += storage.block.size

    def hold(self, size: int, part: str) -> None:
        """`size` bytes more outside the pools of recorded parts, for good."""
        self.pools[""].take(size, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        counted = self.pools[self.pool].take(storage.nbytes(), self.part)

        def died(_: Any) -> None:
            del self._known[key]
            counted.pool.give(counted)

        self._known[key] = weakref.ref(storage, died), counted


class _Pool:
    """An allocator, and what it held by part when that was most."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()

    def take(self, size: int, part: str) -> _Storage:
        block = self.allocator.take(size)
        self.live[part] += block.size
        if self.allocator.allocated > self.peak:
            self.peak = self.allocator.allocated
            self.at_peak = self.live.copy()
        return _Storage(block, part, self)

    def give(self, storage: _Storage) -> None:
        self.live[storage.part] -= storage.block.size
        self.allocator.give(storage.block)


@dataclasses.dataclass
class _Storage:
    block: Block
    part: str
    pool: _Pool


def _batch(config: Config, sizes: Sequence[SampleSize]) -> Batch:
    model, count, views = config.model, len(sizes), len(CAMERAS) * config.data.frames
    images = points = bev_map = padding = None
    if model.camera is not None:
        images = torch.empty(count, views, 3, *model.camera.image_size, dtype=torch.uint8)
    if model.camera is not None and config.data.image.pad:
        padding = torch.empty(count, views, *model.camera.image_size, dtype=torch.bool)
    if model.reads_points:
        points = [torch.empty(size.points, 5) for size in sizes]
    if model.map is not None:
        axes = (model.map.xbound, model.map.ybound)
        cells = [round((high - low) / step) for low, high, step in axes]
        bev_map = torch.empty(count, len(config.data.map_classes), *cells)
    cameras = torch.empty(count, views, 4, 4)
    return Batch(
        images=images,
        points=points,
        calibration=Calibration(
            cameras, cameras, cameras, cameras, torch.empty(count, 4, 4), torch.empty(count, views)
        ),
        boxes=[torch.empty(size.boxes, 9) for size in sizes],
        labels=[torch.empty(size.boxes, dtype=torch.int64) for size in sizes],
        bev_map=bev_map,
        padding=padding,
        has_boxes=torch.empty(count, dtype=torch.bool),
        has_map=torch.empty(count, dtype=torch.bool),
    )


def _assume_sites(model: nn.Module, sizes: Sequence[SampleSize]) -> None:
    """The LiDAR encoder of `model` gets voxels of these numbers instead of looking for them."""
    for encoder in model.modules():
        if isinstance(encoder, VoxelLidarEncoder):
            voxels = functools.partial(_voxels, encoder.config.features, encoder.backbone.in_shape, sizes)
            encoder.prepare = voxels  # type: ignore[method-assign]


def _keep_kernels(model: nn.Module) -> None:
    """Lets what depends on the contents of tensors run with assumed kernels inside a trace without them."""
    for module in model.modules():
        if isinstance(module, VoxelLidarEncoder):
            module.forward = _assumed(module.forward)  # type: ignore[method-assign]
            module.prepare = _assumed(module.prepare)  # type: ignore[method-assign]
        elif isinstance(module, TransFusionHead):
            module.loss = _assumed(module.loss)  # type: ignore[method-assign]


def _assumed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with backend.assumed():
            return function(*args, **kwargs)

    return run


def _voxels(features: int, shape: Triple, sizes: Sequence[SampleSize], _: list[Tensor]) -> SparseTensor:
    """What `VoxelLidarEncoder.prepare` makes on a GPU."""
    rows = Room().fit([sum(level) for level in zip(*(size.sites for size in sizes), strict=True)])
    shapes = [shape]
    for window in WINDOWS:
        shapes.append(output_shape(shapes[-1], *window))
    sites = None
    for level in reversed(range(len(shapes))):
        columns = len(sizes) * shapes[level][0] * shapes[level][1]
        columns_map = ColumnMap(torch.empty(columns, dtype=torch.int64), torch.empty(columns, dtype=torch.int32))
        coords = torch.empty(rows[level], 4, dtype=torch.int64)
        following = WINDOWS[level] if level < len(WINDOWS) else None
        sites = Sites(coords, shapes[level], len(sizes), columns_map, following, sites)
    assert sites is not None
    return SparseTensor(torch.empty(rows[0], features), sites)
