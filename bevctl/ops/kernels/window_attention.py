"""Triton kernels of `bevctl.ops.window_attention`: a window and head at a time, nothing between them in memory.

Padding, shift and the cut into windows are index arithmetic. The backward pass makes the weights of the attention
again; a program walks through windows of one head and adds up the gradient of the bias in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4
_PROGRAMS_PER_PROCESSOR = 4
_PROCESSORS_OF_INTERPRETER = 1
_SIZES = ["windows", "height", "width", "rows", "columns", "heads"]
"""Not compiled into the kernels: the stages of a network share them."""


@triton.jit
def _places(
    window_index, height, width, rows, columns, WINDOW: tl.constexpr, SHIFT: tl.constexpr, LENGTH: tl.constexpr
):
    """Of a window's positions: row of the flat map, whether it lies on the map, and side of the shift's seams."""
    per_row = columns // WINDOW
    per_map = (rows // WINDOW) * per_row
    sample = window_index // per_map
    position = tl.arange(0, LENGTH)
    row = (window_index % per_map) // per_row * WINDOW + position // WINDOW
    column = window_index % per_row * WINDOW + position % WINDOW
    side = 3 * ((row >= rows - WINDOW).to(tl.int32) + (row >= rows - SHIFT).to(tl.int32))
    side += (column >= columns - WINDOW).to(tl.int32) + (column >= columns - SHIFT).to(tl.int32)
    row = (row + SHIFT) % rows
    column = (column + SHIFT) % columns
    inside = (position < WINDOW * WINDOW) & (row < height) & (column < width)
    return (sample.to(tl.int64) * height + row) * width + column, inside, side


@triton.jit
def _load(pointer, padding, place, inside, stride, first, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """(LENGTH, WIDTH) features of one head; positions beyond the map hold the padding."""
    feature = tl.arange(0, WIDTH)
    valid = feature < HEAD
    fill = tl.load(padding + first + feature, mask=valid, other=0.0)
    pointers = pointer + place[:, None] * stride + (first + feature)[None, :]
    values = tl.load(pointers, mask=inside[:, None] & valid[None, :], other=0.0)
    return tl.where(inside[:, None], values, fill.to(values.dtype)[None, :])


@triton.jit
def _store(pointer, values, place, inside, stride, first, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    feature = tl.arange(0, WIDTH)
    pointers = pointer + place[:, None] * stride + (first + feature)[None, :]
    tl.store(pointers, values.to(pointer.dtype.element_ty), mask=inside[:, None] & (feature < HEAD)[None, :])


@triton.jit
def _load_bias(bias, head, AREA: tl.constexpr, LENGTH: tl.constexpr):
    """(LENGTH, LENGTH) bias of a head; keys that fill up the block are -inf."""
    query = tl.arange(0, LENGTH)[:, None]
    key = tl.arange(0, LENGTH)[None, :]
    values = tl.load(bias + head * AREA * AREA + query * AREA + key, mask=(query < AREA) & (key < AREA), other=0.0)
    return tl.where(key < AREA, values, float("-inf"))


@triton.jit
def _weights(query, key, bias, side, scale, masked, SHIFT: tl.constexpr, PRECISION: tl.constexpr):
    """(LENGTH, LENGTH) float32 softmax of the logits."""
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale + bias
    if SHIFT > 0:
        logits += tl.where(side[:, None] != side[None, :], masked, 0.0)
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit(do_not_specialize=_SIZES)
def _attention_forward_kernel(
    qkv, padding, bias, out, height, width, rows, columns, heads, scale, masked,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEAD: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    channels = heads * HEAD
    place, inside, side = _places(tl.program_id(1), height, width, rows, columns, WINDOW, SHIFT, LENGTH)
    query = _load(qkv, padding, place, inside, 3 * channels, head * HEAD, HEAD, WIDTH)
    key = _load(qkv, padding, place, inside, 3 * channels, channels + head * HEAD, HEAD, WIDTH)
    value = _load(qkv, padding, place, inside, 3 * channels, 2 * channels + head * HEAD, HEAD, WIDTH)
    head_bias = _load_bias(bias, head, WINDOW * WINDOW, LENGTH)
    weights = _weights(query, key, head_bias, side, scale, masked, SHIFT, PRECISION)
    result = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    _store(out, result, place, inside, channels, head * HEAD, HEAD, WIDTH)


@triton.jit(do_not_specialize=_SIZES)
def _attention_backward_kernel(
    grad, qkv, padding, bias, qkv_grad, padding_grad, bias_grad,
    windows, height, width, rows, columns, heads, scale, masked,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEAD: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`padding_grad` (programs, 3, heads, HEAD) and `bias_grad` (programs, heads, L, L) hold each program's share."""
    head = tl.program_id(0)
    channels = heads * HEAD
    AREA: tl.constexpr = WINDOW * WINDOW
    position = tl.arange(0, LENGTH)
    feature = tl.arange(0, WIDTH)
    head_bias = _load_bias(bias, head, AREA, LENGTH)
    bias_sum = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    key_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    value_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    for window_index in range(tl.program_id(1), windows, tl.num_programs(1)):
        place, inside, side = _places(window_index, height, width, rows, columns, WINDOW, SHIFT, LENGTH)
        query = _load(qkv, padding, place, inside, 3 * channels, head * HEAD, HEAD, WIDTH)
        key = _load(qkv, padding, place, inside, 3 * channels, channels + head * HEAD, HEAD, WIDTH)
        value = _load(qkv, padding, place, inside, 3 * channels, 2 * channels + head * HEAD, HEAD, WIDTH)
        pointers = grad + place[:, None] * channels + (head * HEAD + feature)[None, :]
        out_grad = tl.load(pointers, mask=inside[:, None] & (feature < HEAD)[None, :], other=0.0)

        weights = _weights(query, key, head_bias, side, scale, masked, SHIFT, PRECISION)
        weight_grad = tl.dot(out_grad, tl.trans(value), input_precision=PRECISION)
        logit_grad = weights * (weight_grad - tl.sum(weights * weight_grad, axis=1)[:, None])
        bias_sum += logit_grad
        scaled = (logit_grad * scale).to(query.dtype)
        value_grad = tl.dot(tl.trans(weights.to(value.dtype)), out_grad, input_precision=PRECISION)
        query_grad = tl.dot(scaled, key, input_precision=PRECISION)
        key_grad = tl.dot(tl.trans(scaled), query, input_precision=PRECISION)
        _store(qkv_grad, query_grad, place, inside, 3 * channels, head * HEAD, HEAD, WIDTH)
        _store(qkv_grad, key_grad, place, inside, 3 * channels, channels + head * HEAD, HEAD, WIDTH)
        _store(qkv_grad, value_grad, place, inside, 3 * channels, 2 * channels + head * HEAD, HEAD, WIDTH)

        # A position beyond the map is a key and a value, but nobody reads what it asks for.
        beyond = ((position < AREA) & (inside == 0))[:, None]
        key_sum += tl.sum(tl.where(beyond, key_grad, 0.0), axis=0)
        value_sum += tl.sum(tl.where(beyond, value_grad, 0.0), axis=0)

    program = tl.program_id(1)
    share = padding_grad + program * 3 * channels + head * HEAD + feature
    tl.store(share, tl.zeros((WIDTH,), dtype=tl.float32), mask=feature < HEAD)
    tl.store(share + channels, key_sum, mask=feature < HEAD)
    tl.store(share + 2 * channels, value_sum, mask=feature < HEAD)
    share = bias_grad + (program * heads + head) * AREA * AREA + position[:, None] * AREA + position[None, :]
    tl.store(share, bias_sum, mask=(position < AREA)[:, None] & (position < AREA)[None, :])


def forward(qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int, masked: float) -> Tensor:
    """See `window_attention`; all inputs contiguous, padding and bias float32."""
    batch, height, width, channels = qkv.shape
    heads = len(bias)
    out = qkv.new_empty(batch, height, width, channels // 3)
    rows, columns = height + -height % window, width + -width % window
    windows = batch * (rows // window) * (columns // window)
    _attention_forward_kernel[(heads, windows)](
        qkv, padding, bias, out, height, width, rows, columns, heads, **_constants(qkv, heads, window, shift, masked)
    )
    return out


def backward(
    grad: Tensor, qkv: Tensor, padding: Tensor, bias: Tensor, window: int, shift: int, masked: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, padding and bias; the order of every sum is fixed."""
    batch, height, width, channels = qkv.shape
    heads, area = bias.shape[:2]
    rows, columns = height + -height % window, width + -width % window
    windows = batch * (rows // window) * (columns // window)
    programs = min(windows, triton.cdiv(_PROGRAMS_PER_PROCESSOR * _processors(qkv), heads))
    qkv_grad = torch.empty_like(qkv)
    padding_grad = qkv.new_empty(programs, channels, dtype=torch.float32)
    bias_grad = qkv.new_empty(programs, heads, area, area, dtype=torch.float32)
    constants = _constants(qkv, heads, window, shift, masked)
    if qkv.dtype == torch.float32:  # twice the registers: four warps would spill 17 KB a thread
        constants |= {"num_warps": 8, "num_stages": 1}
    _attention_backward_kernel[(heads, programs)](
        grad, qkv, padding, bias, qkv_grad, padding_grad, bias_grad,
        windows, height, width, rows, columns, heads, **constants,
    )  # fmt: skip
    return qkv_grad, padding_grad.sum(0), bias_grad.sum(0)


def _processors(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":
        return _PROCESSORS_OF_INTERPRETER
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _constants(qkv: Tensor, heads: int, window: int, shift: int, masked: float) -> dict[str, object]:
    head = qkv.shape[3] // (3 * heads)
    single = qkv.dtype == torch.float32
    return {
        "scale": head**-0.5,
        "masked": masked,
        "WINDOW": window,
        "SHIFT": shift,
        "HEAD": head,
        "LENGTH": max(16, triton.next_power_of_2(window**2)),
        "WIDTH": max(16, triton.next_power_of_2(head)),
        "PRECISION": "ieee" if single and not torch.backends.cuda.matmul.allow_tf32 else "tf32",
        "num_warps": _WARPS,
    }
