"""Triton kernels of `bevctl.ops.affine_conv`: a matrix product whose left side is made from the image on the fly.

A row of the left side belongs to an output pixel, a column to a place of the kernel (a tap) and a channel; a tap's
pixel is read once and spread over the channels in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import launch, sized

_FORWARD_PIXELS = 32
"""Output pixels of a program of the forward pass."""
_BACKWARD_PIXELS = 32
"""Output pixels of a turn of a program of the backward pass."""
_PROGRAMS = 264
"""Most programs of the backward pass: two a processor of an H200, and as many elsewhere, to add in the same order."""


def convolve(image: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """(N, H', W', O) of the weight's dtype from a (N, H, W) float32 image and an (O, C, k, k) weight."""
    size = weight.shape[2]
    height, width = ((length + 2 * (size // 2) - size) // stride + 1 for length in image.shape[1:])
    out = weight.new_empty(len(image), height, width, len(weight))
    options = _options(weight, stride)
    if out.numel():
        launch(
            _convolve, (triton.cdiv(len(image) * height * width, _FORWARD_PIXELS),),
            image.contiguous(), scale.float(), shift.float(), _by_tap(weight), bias.float(), out,
            len(image), *image.shape[1:], height, width,
            PIXELS=_FORWARD_PIXELS, TAPS=max(1, 32 // options["BLOCK_CHANNELS"]), **options,
        )  # fmt: skip
    return out


def gradients(
    image: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, gradient: Tensor, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scale, shift, weight and bias, given that of the (N, H', W', O) result."""
    outs, channels, size = weight.shape[:3]
    options = _options(weight, stride)
    programs = min(_PROGRAMS, triton.cdiv(gradient[..., 0].numel(), _BACKWARD_PIXELS))
    of_weight = image.new_empty(programs, size, size, channels, outs)
    of_affine = image.new_empty(programs, 2, channels)
    of_bias = image.new_empty(programs, outs)
    if programs:
        taps = max(triton.next_power_of_2(size * size), 16 // options["BLOCK_CHANNELS"])
        launch(
            _convolve_gradients, (programs,),
            image.contiguous(), scale.float(), shift.float(), _by_tap(weight), gradient, of_weight, of_affine, of_bias,
            len(image), *image.shape[1:], *gradient.shape[1:3],
            PIXELS=_BACKWARD_PIXELS, TAPS=taps, **options, num_warps=8,
        )  # fmt: skip
    of_scale, of_shift = of_affine.sum(0)
    whole = of_weight.sum(0).permute(3, 2, 0, 1).to(weight.dtype)
    return of_scale.to(scale.dtype), of_shift.to(shift.dtype), whole, of_bias.sum(0)


def _by_tap(weight: Tensor) -> Tensor:
    """(k, k, C, O): as a matrix of O columns, the right side of the product."""
    return weight.permute(2, 3, 1, 0).contiguous()


def _options(weight: Tensor, stride: int) -> dict[str, int]:
    single = weight.dtype == torch.float32
    return {
        "OUT": len(weight),
        "BLOCK_OUT": max(16, triton.next_power_of_2(len(weight))),
        "CHANNELS": weight.shape[1],
        "BLOCK_CHANNELS": triton.next_power_of_2(weight.shape[1]),
        "SIZE": weight.shape[2],
        "STRIDE": stride,
        # As cuDNN does with float32 convolutions.
        "TF32": not single or torch.backends.cudnn.allow_tf32,
    }


@triton.jit
def _spread(
    image, scale, shift, pixel, tap, images, height, width, out_height, out_width, dtype: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """(pixels, taps) image, and (pixels, taps, channels) relu(image · scale + shift), 0 in the padding around it."""
    top = pixel // out_width % out_height * STRIDE - SIZE // 2
    left = pixel % out_width * STRIDE - SIZE // 2
    v = top[:, None] + (tap // SIZE)[None, :]
    u = left[:, None] + (tap % SIZE)[None, :]
    valid = (v >= 0) & (v < height) & (u >= 0) & (u < width) & (tap < SIZE * SIZE)[None, :]
    valid = valid & (pixel < images * out_height * out_width)[:, None]
    first = (pixel // (out_height * out_width)).to(tl.int64) * height * width
    seen = tl.load(image + first[:, None] + v * width + u, valid, 0.0)
    channel = tl.arange(0, BLOCK_CHANNELS)
    factor = tl.load(scale + channel, channel < CHANNELS, 0.0)
    offset = tl.load(shift + channel, channel < CHANNELS, 0.0)
    value = seen[:, :, None] * factor[None, None, :] + offset[None, None, :]
    # NaN must stay NaN.
    return seen, tl.where(valid[:, :, None] & ~(value < 0), value, 0.0).to(dtype)


@triton.jit
def _weight_place(
    first_tap, COLUMNS: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Where a (columns, outs) block of the right side lies, and which of it exists."""
    column = tl.arange(0, COLUMNS)
    tap = first_tap + column // BLOCK_CHANNELS
    channel = column % BLOCK_CHANNELS
    out = tl.arange(0, BLOCK_OUT)
    known = ((tap < SIZE * SIZE) & (channel < CHANNELS))[:, None] & (out < OUT)[None, :]
    return (tap * CHANNELS + channel)[:, None] * OUT + out[None, :], known


@sized("images", "height", "width", "out_height", "out_width")
def _convolve(
    image, scale, shift, weights, bias, out, images, height, width, out_height, out_width,
    PIXELS: tl.constexpr, TAPS: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel_out = tl.arange(0, BLOCK_OUT)
    precision: tl.constexpr = "tf32" if TF32 else "ieee"
    total = tl.zeros([PIXELS, BLOCK_OUT], tl.float32)
    for first in range(0, SIZE * SIZE, TAPS):
        _, value = _spread(
            image, scale, shift, pixel, first + tl.arange(0, TAPS), images, height, width, out_height, out_width,
            weights.dtype.element_ty, CHANNELS, BLOCK_CHANNELS, SIZE, STRIDE,
        )  # fmt: skip
        place, known = _weight_place(first, TAPS * BLOCK_CHANNELS, OUT, BLOCK_OUT, CHANNELS, BLOCK_CHANNELS, SIZE)
        weight = tl.load(weights + place, known, 0.0)
        left = tl.reshape(value, [PIXELS, TAPS * BLOCK_CHANNELS])
        total = tl.dot(left, weight, total, input_precision=precision)
    total += tl.load(bias + channel_out, channel_out < OUT, 0.0)[None, :]
    inside = (pixel < images * out_height * out_width)[:, None] & (channel_out < OUT)[None, :]
    address = out + pixel.to(tl.int64)[:, None] * OUT + channel_out[None, :]
    tl.store(address, total.to(out.dtype.element_ty), inside)


@sized("images", "height", "width", "out_height", "out_width")
def _convolve_gradients(
    image, scale, shift, weights, gradient, of_weight, of_affine, of_bias,
    images, height, width, out_height, out_width,
    PIXELS: tl.constexpr, TAPS: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_CHANNELS)
    channel_out = tl.arange(0, BLOCK_OUT)
    precision: tl.constexpr = "tf32" if TF32 else "ieee"
    place, known = _weight_place(0, TAPS * BLOCK_CHANNELS, OUT, BLOCK_OUT, CHANNELS, BLOCK_CHANNELS, SIZE)
    weight = tl.trans(tl.load(weights + place, known, 0.0))
    weight_sum = tl.zeros([TAPS * BLOCK_CHANNELS, BLOCK_OUT], tl.float32)
    scale_sum = tl.zeros([TAPS, BLOCK_CHANNELS], tl.float32)
    shift_sum = tl.zeros([TAPS, BLOCK_CHANNELS], tl.float32)
    bias_sum = tl.zeros([BLOCK_OUT], tl.float32)
    pixels = images * out_height * out_width
    for first in range(program * PIXELS, pixels, tl.num_programs(0) * PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        seen, value = _spread(
            image, scale, shift, pixel, tl.arange(0, TAPS), images, height, width, out_height, out_width,
            weights.dtype.element_ty, CHANNELS, BLOCK_CHANNELS, SIZE, STRIDE,
        )  # fmt: skip
        inside = (pixel < pixels)[:, None] & (channel_out < OUT)[None, :]
        reached = tl.load(gradient + pixel.to(tl.int64)[:, None] * OUT + channel_out[None, :], inside, 0.0)
        left = tl.reshape(value, [PIXELS, TAPS * BLOCK_CHANNELS])
        weight_sum = tl.dot(tl.trans(left), reached, weight_sum, input_precision=precision)
        of_value = tl.reshape(tl.dot(reached, weight, input_precision=precision), [PIXELS, TAPS, BLOCK_CHANNELS])
        of_value = tl.where(value > 0, of_value, 0.0)
        shift_sum += tl.sum(of_value, 0)
        scale_sum += tl.sum(of_value * seen[:, :, None], 0)
        bias_sum += tl.sum(reached.to(tl.float32), 0)
    tl.store(of_weight + program * SIZE * SIZE * CHANNELS * OUT + place, weight_sum, known)
    row = of_affine + program * 2 * CHANNELS + channel
    tl.store(row, tl.sum(scale_sum, 0), channel < CHANNELS)
    tl.store(row + CHANNELS, tl.sum(shift_sum, 0), channel < CHANNELS)
    tl.store(of_bias + program * OUT + channel_out, bias_sum, channel_out < OUT)
