"""Which operations of a forward pass ran in half precision, which could have and did not, and where the host waited."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bevctl.numerics.place import Place, Places

HALF = (torch.float16, torch.bfloat16)
EIGHT = 8
"""Half-precision numbers that a tensor core takes at once."""
SMALL_FLOPS = 2**20
"""Arithmetic of one operation below which starting it costs more than computing."""
OFF, OUT_OF_REACH, ODD, SMALL = "autocast is off there", "autocast does not reach it", "odd widths", "too small"
"""Why an eligible operation does not run well in half precision."""
_WAITS = (
    *("_local_scalar_dense", "nonzero", "is_nonzero", "unique_dim", "_unique2", "unique_consecutive"),
    *("masked_select", "equal", "unique_dim_consecutive"),
)
_FREE = ("detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_IN_FP32 = (
    *(
        "softmax",
        "norm",
        "loss",
        "cross_entropy",
        "exp",
        "log",
        "pow",
        "sum",
        "prod",
        "cumsum",
        "mse",
        "kl_div",
        "rsqrt",
    ),
    *("sigmoid_backward", "huber", "nll", "dist", "erfinv", "acos", "asin", "cosh", "tan", "reciprocal"),
)
"""In the names of operations that autocast itself runs in FP32."""


@dataclass
class Group:
    """Operations at one place."""

    calls: int = 0
    flops: int = 0
    """Of products, convolutions and attention."""
    half_flops: int = 0
    why: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Arithmetic that does not run well in half precision, by reason."""
    planar_flops: int = 0
    """Of convolutions in half precision whose channels are not last in memory."""
    float_bytes: int = 0
    """Written in half precision and in FP32, but for what autocast itself keeps in FP32."""
    single_bytes: int = 0
    """Of these, in FP32."""
    cast_bytes: int = 0
    """Written by conversions between number formats."""
    raised_bytes: int = 0
    """Of these, from half precision to FP32."""
    waits: int = 0
    """Times that the host waits for the device."""


class Census:
    """Watches what runs inside the block.

    Attributes:
        groups: by place of the Python line that called.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.groups: dict[Place, Group] = defaultdict(Group)
        self.autocast = False
        self._places = Places(model)
        self._device_type = device_type
        self._stack = ExitStack()

    def __enter__(self) -> Census:
        self._stack.enter_context(_Autocast(self, self._device_type))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def add(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """Counts one operation."""
        name = func.overloadpacket.__name__
        if name in _FREE or func.is_view:
            return
        group = self.groups[self._places.of_forward(requires_grad=False)]
        group.calls += 1
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self._count_product(group, name, args, formula(*args, **kwargs, out_val=result))
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        group.waits += name in _WAITS or _leaves_device(name, args, outputs)
        if name in ("_to_copy", "copy_"):
            _count_cast(group, args, outputs)
        elif not any(word in name for word in _IN_FP32):
            group.float_bytes += sum(_bytes(t) for t in outputs if t.dtype in (*HALF, torch.float32))
            group.single_bytes += sum(_bytes(t) for t in outputs if t.dtype is torch.float32)

    def _count_product(self, group: Group, name: str, args: Sequence[Any], flops: int) -> None:
        group.flops += flops
        operands = [a for a in args if isinstance(a, Tensor) and a.ndim > 1]
        in_half = bool(operands) and operands[-1].dtype in HALF
        group.half_flops += flops if in_half else 0
        if not in_half:
            group.why[OUT_OF_REACH if self.autocast else OFF] += flops
        elif flops < SMALL_FLOPS:
            group.why[SMALL] += flops
        elif any(width > EIGHT and width % EIGHT for width in _widths(name, operands)):
            group.why[ODD] += flops
        if in_half and name == "convolution" and operands[0].ndim == 4:
            last = operands[0].is_contiguous(memory_format=torch.channels_last)
            group.planar_flops += 0 if last else flops

    def places(self) -> Iterator[tuple[Place, Group]]:
        """Those with the most arithmetic first."""
        yield from sorted(self.groups.items(), key=lambda item: -item[1].flops)

    def total(self, name: str) -> int:
        """A number of all groups together."""
        return sum(getattr(group, name) for group in self.groups.values())


class _Autocast(TorchFunctionMode):
    """Notes whether autocast is on where an operation is called: inside of the operation it always looks off."""

    def __init__(self, census: Census, device_type: str) -> None:
        super().__init__()
        self._census, self._device_type = census, device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._census.autocast = torch.is_autocast_enabled(self._device_type)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, census: Census) -> None:
        super().__init__()
        self._census = census

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._census.add(func, args, kwargs or {}, result)
        return result


def _widths(name: str, operands: Sequence[Tensor]) -> list[int]:
    """What must be a multiple of 8: channels of a convolution, columns of factors."""
    if name == "convolution":
        return list(operands[1].shape[:2])
    return [operand.shape[-1] for operand in operands]


def _leaves_device(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> bool:
    moved = name in ("_to_copy", "copy_") and bool(outputs)
    return moved and not outputs[0].is_cuda and any(isinstance(a, Tensor) and a.is_cuda for a in args)


def _count_cast(group: Group, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    sources = [a for a in args if isinstance(a, Tensor)]
    source, made = sources[-1] if sources else None, outputs[0] if outputs else None
    floats = (*HALF, torch.float32)
    if source is None or made is None or source.dtype not in floats or made.dtype not in floats:
        return
    if source.dtype != made.dtype:
        group.cast_bytes += _bytes(made)
        group.raised_bytes += _bytes(made) if source.dtype in HALF else 0


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
