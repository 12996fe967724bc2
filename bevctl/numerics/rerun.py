"""The same operation on the same inputs in a wider number format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from bevctl.numerics.extent import Extent, measure
from bevctl.numerics.formats import FP16_MAX, HALF, short_name, wider
from bevctl.numerics.operation import Traits, bound_arguments, floating_tensors
from bevctl.numerics.record import Verdict

_HALF_LIMIT = {torch.float16: FP16_MAX, torch.bfloat16: torch.finfo(torch.bfloat16).max}


@dataclass(frozen=True)
class Call:
    """An operation with its arguments as they were before it ran."""

    func: OpOverload
    traits: Traits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def format_of(inputs: Sequence[Extent], outputs: Sequence[Extent]) -> torch.dtype:
    """The narrowest floating-point format that an operation read or wrote."""
    dtypes = [extent.dtype for extent in (*inputs, *outputs)]
    return min(dtypes, key=lambda dtype: (dtype.itemsize, dtype is not torch.float16), default=torch.float32)


def run_wide(call: Call, narrow: torch.dtype, replace: Mapping[int, Tensor] | None = None) -> list[Tensor]:
    """The floating-point results of a call whose `narrow` tensors are widened; `replace` maps id() to another input.

    Random numbers are drawn as before, and the generators are left as they were.

    Raises:
        RuntimeError: the operation does not exist in the wider format, or memory ran out.
    """
    wide = wider(narrow)

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = (replace or {}).get(id(value), value)
            narrow_float = value.is_floating_point() and (value.dtype is narrow or value.dtype in HALF)
            return value.to(wide) if narrow_float else value
        if isinstance(value, torch.dtype):
            return wide if value is narrow or value in HALF else value
        if isinstance(value, list | tuple):
            return type(value)(convert(item) for item in value)
        return value

    def prepared(arguments: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [
            (name, _copied(convert(value)) if name in call.traits.written else convert(value))
            for name, value in arguments
        ]

    bound = dict(prepared(bound_arguments(call.traits, call.args, call.kwargs)))
    args = [bound.pop(name) for name in call.traits.arguments[: len(call.args)]]
    devices = {tensor.device for tensor in floating_tensors(list(call.args)) if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        result = call.func(*args, **bound)
    return list(floating_tensors(result))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def judge(call: Call, inputs: Sequence[Extent], outputs: Sequence[Extent]) -> Verdict:
    """Why a call with finite inputs gave something else."""
    narrow = format_of(inputs, outputs)
    try:
        wide = measure(run_wide(call, narrow))
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).strip().split("\n")[0]
        return Verdict("unknown", f"could not run in {short_name(wider(narrow))}: {first_line}")
    bad = [extent for extent in wide if extent.bad]
    if not bad:
        return _range_verdict(narrow, max(wide, key=lambda extent: extent.largest))
    return Verdict("code", _in_words(call, narrow), bad[0])


def _range_verdict(narrow: torch.dtype, wide: Extent) -> Verdict:
    limit = _HALF_LIMIT.get(narrow, torch.finfo(narrow).max)
    name = short_name(narrow)
    where = "" if wide.largest > limit else " inside the operation"
    what = (
        f"in {short_name(wide.dtype)} the same inputs give finite numbers up to {wide.largest:.4g}; "
        f"{name} ends at {limit:.5g}{where}"
    )
    return Verdict("overflow", what, wide)


def _in_words(call: Call, narrow: torch.dtype) -> str:
    return f"{call.traits.name} of these inputs is not finite in {short_name(wider(narrow))} either"
