"""Self-attention inside the windows of a feature map, which may be shifted against them (Liu et al., Swin, 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bevctl.ops.backend import use_triton

MASKED = -100.0
"""Added to the logits of positions that only the cyclic shift made neighbours."""
_LARGEST_AREA = 64
"""Positions of a window that the fused kernel holds at once."""
_LARGEST_HEAD = 128


def window_attention(qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int) -> Tensor:
    """Multi-head attention among the positions of each window.

    The map is padded at its end to whole windows, then shifted cyclically towards its start; afterwards both are
    undone. Positions that were neighbours of each other only by the shift are masked with `MASKED`.

    Args:
        qkv: (B, H, W, 3·C) queries, keys and values; each C holds the heads side by side.
        padding: (3·C,) the same of a position beyond the map, rounded to qkv's dtype.
        bias: (heads, L, L) float32 added to the logits of a window's L = window² positions.
        window: side of a window.
        shift: cells of the shift, 0 or up to the window's side.

    Returns:
        (B, H, W, C) of qkv's dtype. Logits and softmax are float32 at least.

    Raises:
        ValueError: shapes that do not belong together.
    """
    heads, area = bias.shape[0], window**2
    if qkv.dim() != 4 or qkv.shape[3] % (3 * heads) or bias.shape != (heads, area, area):
        raise ValueError(
            f"qkv must be (B, H, W, 3·C), C a multiple of the heads, and bias (heads, {area}, {area}), "
            f"got {tuple(qkv.shape)} and {tuple(bias.shape)}"
        )
    if padding.shape != qkv.shape[3:]:
        raise ValueError(f"padding must be ({qkv.shape[3]},), got {tuple(padding.shape)}")
    if use_triton(qkv) and _fits_kernel(qkv, heads, area):
        fused: Tensor = _fused(qkv, padding.float(), bias.float(), window, shift)
        return fused
    return window_attention_reference(qkv, padding, bias, window, shift)


def _fits_kernel(qkv: Tensor, heads: int, area: int) -> bool:
    half_or_single = qkv.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return half_or_single and area <= _LARGEST_AREA and qkv.shape[3] // (3 * heads) <= _LARGEST_HEAD and qkv.numel() > 0


def window_attention_reference(qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int) -> Tensor:
    """`window_attention` in plain torch, on any device."""
    batch, height, width, channels = qkv.shape
    heads, area = bias.shape[:2]
    padded = _padded_and_shifted(qkv, padding.to(qkv.dtype), window, shift)
    rows, columns = padded.shape[1:3]
    head = channels // (3 * heads)
    split = to_windows(padded, window).unflatten(3, (3, heads, head))
    query, key, value = split.permute(3, 0, 1, 4, 2, 5).unbind(0)
    # Windows join the batch, or the heads where each has a mask of its own: either way the bias broadcasts.
    merged = (0, 1)
    if shift:
        merged = (1, 2)
        bias = (bias + shift_mask(rows, columns, window, shift, qkv.device)[:, None]).flatten(0, 1)
    windows = split.shape[1]
    query, key, value = (part.flatten(*merged) for part in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(query.dtype))
    out = out.view(batch, windows, heads, area, head).transpose(2, 3).flatten(3)
    shifted = from_windows(out, rows, columns)
    return shifted.roll((shift, shift), dims=(1, 2))[:, :height, :width] if shift else shifted[:, :height, :width]


def _padded_and_shifted(x: Tensor, padding: Tensor, window: int, shift: int) -> Tensor:
    for axis in (1, 2):
        missing = -x.shape[axis] % window
        if not missing and not shift:
            continue
        shape = list(x.shape)
        shape[axis] = missing
        filled = padding.expand(shape)
        x = torch.cat([x.narrow(axis, shift, x.shape[axis] - shift), filled, x.narrow(axis, 0, shift)], dim=axis)
    return x


def shift_mask(height: int, width: int, window: int, shift: int, device: torch.device | None = None) -> Tensor:
    """(windows, L, L) additive mask of a shifted map whose sides are multiples of the window."""

    def region(size: int) -> Tensor:
        position = torch.arange(size, device=device)
        return (position >= size - window).long() + (position >= size - shift)

    regions = region(height)[:, None] * 3 + region(width)
    windows = to_windows(regions[None, ..., None], window)[0, ..., 0]
    return (windows[:, :, None] != windows[:, None, :]) * MASKED


def to_windows(x: Tensor, window: int) -> Tensor:
    """(B, H, W, C) → (B, windows, window², C); H and W are multiples of the window."""
    batch, height, width, channels = x.shape
    rows, columns = height // window, width // window
    x = x.view(batch, rows, window, columns, window, channels)
    return x.transpose(2, 3).reshape(batch, rows * columns, window * window, channels)


def from_windows(windows: Tensor, height: int, width: int) -> Tensor:
    """Inverse of `to_windows`."""
    batch, _, area, channels = windows.shape
    side = round(area**0.5)
    x = windows.view(batch, height // side, width // side, side, side, channels)
    return x.transpose(2, 3).reshape(batch, height, width, channels)


# Operators of their own, so that torch.compile calls the kernels and does not look inside. The schemas are written out:
# torch 2.4 cannot read them from annotations that are strings.
_SCHEMA = "Tensor qkv, Tensor padding, Tensor bias, int window, int shift"


@torch.library.custom_op("bevctl::window_attention", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor")
def _fused(qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int) -> Tensor:
    from bevctl.ops.kernels.window_attention import forward

    return forward(qkv.contiguous(), padding.contiguous(), bias.contiguous(), window, shift, MASKED)


@torch.library.custom_op(
    "bevctl::window_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _fused_backward(
    grad: Tensor, qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    from bevctl.ops.kernels.window_attention import backward

    return backward(grad.contiguous(), qkv.contiguous(), padding.contiguous(), bias.contiguous(), window, shift, MASKED)


@_fused.register_fake
def _(qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int) -> Tensor:  # noqa: ARG001
    return qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3)


@_fused_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    qkv: Tensor,
    padding: Tensor,
    bias: Tensor,
    window: int,  # noqa: ARG001
    shift: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), padding.new_empty(padding.shape), bias.new_empty(bias.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch.library's signature
    qkv, padding, bias, ctx.window, ctx.shift = inputs
    ctx.save_for_backward(qkv, padding, bias)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_fused_backward(grad, *ctx.saved_tensors, ctx.window, ctx.shift), None, None


_fused.register_autograd(_gradients, setup_context=_save_inputs)
