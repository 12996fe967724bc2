"""Triton kernels of `bevctl.ops.layer_norm`: one pass over the map each, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch_specialised

_TILE = 2048
"""Elements that a program holds at once."""
_PROGRAMS_PER_PROCESSOR = 4
_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, weight, bias, out, means, deviations, rows, eps,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    valid = channel < CHANNELS
    mask = (row < rows)[:, None] & valid[None, :]
    place = row[:, None] * CHANNELS + channel[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=1) / CHANNELS
    centred = tl.where(mask, values - mean[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=1) / CHANNELS + eps)
    factor = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    summand = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    result = centred / deviation[:, None] * factor[None, :] + summand[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(deviations + row, deviation, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad, x, weight, means, deviations, x_grad, weight_grad, bias_grad, rows,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`weight_grad` and `bias_grad` (programs, C) hold each program's share."""
    channel = tl.arange(0, WIDTH)
    valid = channel < CHANNELS
    factor = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    bias_sum = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & valid[None, :]
        place = row[:, None] * CHANNELS + channel[None, :]
        values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        out_grad = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        deviation = tl.load(deviations + row, mask=row < rows, other=1.0)
        normal = tl.where(mask, (values - mean[:, None]) / deviation[:, None], 0.0)
        weighted = out_grad * factor[None, :]
        along = tl.sum(weighted * normal, axis=1) / CHANNELS
        average = tl.sum(weighted, axis=1) / CHANNELS
        result = (weighted - average[:, None] - normal * along[:, None]) / deviation[:, None]
        tl.store(x_grad + place, result.to(x_grad.dtype.element_ty), mask=mask)
        weight_sum += out_grad * normal
        bias_sum += out_grad
    share = tl.program_id(0) * CHANNELS + channel
    tl.store(weight_grad + share, tl.sum(weight_sum, axis=0), mask=valid)
    tl.store(bias_grad + share, tl.sum(bias_sum, axis=0), mask=valid)


@triton.jit
def _scaled_kernel(values, scale, added, out, per_sample, ADD: tl.constexpr, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < per_sample
    place += sample * per_sample
    result = tl.load(values + place, mask=mask).to(tl.float32) * tl.load(scale + sample)
    if ADD:
        result += tl.load(added + place, mask=mask).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(..., C) contiguous → the norm in `dtype`, and mean and standard deviation of each row, float32."""
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    means, deviations = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    tile = _tile(channels)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    launch_specialised(_forward_kernel, grid, x, weight, bias, out, means, deviations, rows, eps, **tile)
    return out, means, deviations


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, deviations: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; the order of every sum is fixed."""
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    tile = _tile(channels)
    programs = min(triton.cdiv(rows, tile["ROWS"]), _PROGRAMS_PER_PROCESSOR * _processors(x))
    x_grad = torch.empty_like(x)
    shares = x.new_empty(2, programs, channels, dtype=torch.float32)
    tensors = (grad, x, weight, means, deviations, x_grad, shares[0], shares[1])
    launch_specialised(_backward_kernel, (programs,), *tensors, rows, **tile)
    weight_grad, bias_grad = shares.sum(1).to(weight.dtype)
    return x_grad, weight_grad, bias_grad


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """scale · values (+ added) in `dtype`, contiguous (B, ...) and (B,)."""
    out = torch.empty_like(values, dtype=dtype)
    per_sample = values[0].numel()
    grid = (triton.cdiv(per_sample, _BLOCK), len(values))
    tensors = (values, scale, values if added is None else added, out)
    launch_specialised(_scaled_kernel, grid, *tensors, per_sample, ADD=added is not None, BLOCK=_BLOCK)
    return out


def _tile(channels: int) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(channels))
    return {"CHANNELS": channels, "ROWS": max(1, _TILE // width), "WIDTH": width}


def _processors(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
