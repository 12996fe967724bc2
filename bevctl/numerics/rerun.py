"""The same operation on the same inputs in a wider number format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevctl.numerics.formats import HALF, wider
from bevctl.numerics.operation import Call, floating_tensors

_SUBSTITUTES = {
    "aten._scaled_dot_product_flash_attention.default": torch.ops.aten._scaled_dot_product_attention_math.default,
    "aten._scaled_dot_product_cudnn_attention.default": torch.ops.aten._scaled_dot_product_attention_math.default,
}
"""Operations that exist in half precision only, and one of the same arguments that runs in every format."""
_SHARED_ARGUMENTS = ("query", "key", "value", "attn_mask", "attn_bias", "dropout_p", "is_causal", "scale")


def run_wide(call: Call, narrow: torch.dtype, replace: Mapping[int, Tensor] | None = None) -> list[Tensor]:
    """The floating-point results of a call whose tensors of half precision, or of `narrow`, are widened.

    `replace` maps the id() of an input to another one. Nothing outside changes: what the call writes to is copied,
    and random generators are left as they were.

    Raises:
        RuntimeError: the operation does not exist in the wider format, or memory ran out.
    """
    wide = wider(narrow)

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = (replace or {}).get(id(value), value)
            return value.to(wide) if value.dtype is narrow or value.dtype in HALF else value
        if isinstance(value, torch.dtype):
            return wide if value is narrow or value in HALF else value
        return type(value)(convert(item) for item in value) if type(value) in (list, tuple) else value

    written = call.traits.written
    bound = {name: _copied(convert(value)) if name in written else convert(value) for name, value in call.bound.items()}
    devices = {tensor.device for tensor in floating_tensors(list(call.bound.values())) if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        substitute = _SUBSTITUTES.get(call.traits.name)
        if substitute is not None:
            result = substitute(**{name: bound[name] for name in _SHARED_ARGUMENTS if name in bound})
        else:
            positional = [bound.pop(name) for name in call.traits.arguments[: len(call.args)]]
            result = call.func(*positional, **bound)
    return list(floating_tensors(result))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value
