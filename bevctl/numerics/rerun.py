"""The same operation on the same inputs in a wider number format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevctl.numerics.formats import HALF, wider
from bevctl.numerics.operation import Call, floating_tensors


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
        substitute = _HALF_ONLY.get(call.traits.name)
        if substitute is not None:
            return substitute(bound)
        positional = [bound.pop(name) for name in call.traits.arguments[: len(call.args)]]
        return list(floating_tensors(call.func(*positional, **bound)))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _attention(bound: Mapping[str, Any]) -> list[Tensor]:
    """What fused attention gives, without its dropout."""
    return [_attention_weights(bound) @ bound["value"]]


def _attention_gradients(bound: Mapping[str, Any]) -> list[Tensor]:
    """Gradients of query, key and value of fused attention, without its dropout."""
    weights, grad = _attention_weights(bound), bound["grad_out"]
    of_weights = grad @ bound["value"].mT
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * _attention_scale(bound)
    return [of_logits @ bound["key"], of_logits.mT @ bound["query"], weights.mT @ grad]


def _attention_weights(bound: Mapping[str, Any]) -> Tensor:
    logits = bound["query"] @ bound["key"].mT * _attention_scale(bound)
    if bound.get("attn_bias") is not None:
        logits = logits + bound["attn_bias"]
    if bound.get("is_causal"):
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1)


def _attention_scale(bound: Mapping[str, Any]) -> float:
    return float(bound.get("scale") or bound["query"].shape[-1] ** -0.5)


_HALF_ONLY = {
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_cudnn_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention_backward.default": _attention_gradients,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention_gradients,
}
"""Operations that run in half precision only, and the same in plain operations."""
