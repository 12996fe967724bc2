"""The number format of a run: what was asked for, what the device can do, and what really ran."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bevctl.errors import BevctlError, did_you_mean

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_MINIMUM_CAPABILITY = {"fp16": (7, 0), "bf16": (8, 0), "fp32": (0, 0)}


@dataclass(frozen=True)
class Precision:
    """A resolved number format on a kind of device."""

    name: str
    """fp16, bf16 or fp32."""
    device_type: str

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.name]

    @property
    def is_half(self) -> bool:
        """Whether gradients need a loss scale."""
        return self.name == "fp16"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A fresh autocast context; it does nothing in FP32."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


def resolve_precision(requested: str, device: torch.device) -> Precision:
    """The format for `auto`, `fp16`, `bf16` or `fp32` on `device`.

    `auto` is FP32 on a CPU, FP16 on GPUs of capability 7.x and BF16 from 8.0 on: torch calls BF16 supported on Volta
    too, but emulates it there.

    Raises:
        BevctlError: the GPU has no units for the format.
    """
    if device.type != "cuda":
        return Precision("fp32" if requested == "auto" else requested, device.type)
    capability = torch.cuda.get_device_capability(device)
    if requested == "auto":
        requested = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    if capability < _MINIMUM_CAPABILITY[requested]:
        name = torch.cuda.get_device_name(device)
        needed = ".".join(map(str, _MINIMUM_CAPABILITY[requested]))
        raise BevctlError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and {requested.upper()} needs {needed}.",
            "Use --fp16." if requested == "bf16" and capability >= (7, 0) else "Use --fp32.",
        )
    return Precision(requested, device.type)


def keep_fp32(model: nn.Module, patterns: Sequence[str], device_type: str) -> list[str]:
    """Makes the modules whose name matches one of `patterns` (fnmatch) compute in FP32 under autocast.

    Returns the matched names, without those inside another match. The modules' `forward` is wrapped in place.

    Raises:
        BevctlError: a pattern matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    matched: list[str] = []
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise BevctlError(
                f"precision.fp32_modules: {pattern!r} matches no module of this model.", _nearest(pattern, names)
            )
        matched += found
    outermost = [name for name in names if name in matched and not _has_ancestor(name, matched)]
    for name in outermost:
        module = model.get_submodule(name)
        module.forward = _in_fp32(module.forward, device_type)
    return outermost


def _has_ancestor(name: str, others: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """A did-you-mean among names of the same depth; a model has too many modules to list them all."""
    depth = pattern.count(".")
    candidates = [name for name in names if name.count(".") == depth] or names
    hint = did_you_mean(pattern, candidates)
    return hint if hint.startswith("Did") else f"Its parts: {', '.join(n for n in names if n.count('.') == 0)}."


def _in_fp32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(*_to_float(args), **_to_float(kwargs))

    return wrapped


def _to_float(value: Any) -> Any:
    """`value` with every FP16 and BF16 tensor inside it as FP32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        return {key: _to_float(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_float(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _to_float(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


class MatmulCounter(TorchDispatchMode):
    """Counts the floating-point work of matrix products, convolutions and attention by the type it really ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops[_operand_dtype(args)] += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def share(self, dtype: torch.dtype) -> float:
        """Share of the counted work done in `dtype`, 0..1; 0 before anything was counted."""
        total = sum(self.flops.values())
        return self.flops[dtype] / total if total else 0.0


def _operand_dtype(args: Sequence[Any]) -> torch.dtype:
    return next(a.dtype for a in reversed(args) if isinstance(a, Tensor) and a.ndim > 1)


def precision_sentence(precision: Precision, counter: MatmulCounter, loss_scale: float) -> str:
    """What the first steps showed, for example "FP16 active: 97 % of matmul/conv work in half precision, ..."."""
    share = counter.share(precision.dtype)
    name = precision.name.upper()
    if precision.name == "fp32":
        return f"FP32: {share:.0%} of matmul/conv work in FP32"
    state = "active" if share >= 0.5 else "NOT active" if share == 0 else "mostly not active"
    kind = "half precision" if precision.is_half else "BF16"
    scale = f", loss scale {loss_scale:.10g}" if precision.is_half else ""
    return f"{name} {state}: {share:.0%} of matmul/conv work in {kind}{scale}"
