"""Triton kernels of `bevctl.ops.site_norm`: moments in float32 merged in a fixed order, and one pass each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized

_PROGRAMS = 512
_ELEMENTS = 2048
"""Numbers that a program holds at a time."""
_CHANNELS_OF_MERGE = 16


@triton.jit
def _combine(count, mean, square):
    """Count, mean and sum of squared distances to it of sets together, from those of each along axis 0."""
    total = tl.sum(count, axis=0)
    middle = tl.sum(count * mean, axis=0) / tl.maximum(total, 1.0)
    distance = mean - middle[None, :]
    return total, middle, tl.sum(square + count * distance * distance, axis=0)


@sized("rows", "share")
def _moment_kernel(
    features,
    number,
    moments,
    rows,
    share,
    COUNTED: tl.constexpr,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.arange(0, CHANNELS)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, rows)
    if COUNTED:
        end = tl.minimum(end, tl.load(number))
    # Welford's update, each place of the block for itself: no sum across the block inside the loop.
    count = tl.zeros((ROWS, CHANNELS), tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    square = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = (row < end)[:, None] & (channel < C)[None, :]
        values = tl.load(features + row[:, None] * C + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        count += valid.to(tl.float32)
        step = tl.where(valid, values - mean, 0.0)
        mean += step / tl.maximum(count, 1.0)
        square += step * (values - mean)
    total, middle, spread = _combine(count, mean, square)
    out = moments + tl.program_id(0) * 3 * C + channel
    tl.store(out, total, mask=channel < C)
    tl.store(out + C, middle, mask=channel < C)
    tl.store(out + 2 * C, spread, mask=channel < C)


@triton.jit
def _merge(moments, channel, sets, C: tl.constexpr, SETS: tl.constexpr):
    """Count, mean and sum of squared distances to it of all sets together."""
    which = tl.arange(0, SETS)
    valid = (which < sets)[:, None] & (channel < C)[None, :]
    place = moments + which[:, None] * 3 * C + channel[None, :]
    count = tl.load(place, mask=valid, other=0.0)
    mean = tl.load(place + C, mask=valid, other=0.0)
    square = tl.load(place + 2 * C, mask=valid, other=0.0)
    return _combine(count, mean, square)


@sized("sets")
def _merge_kernel(moments, merged, sets, C: tl.constexpr, SETS: tl.constexpr, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    count, mean, square = _merge(moments, channel, sets, C, SETS)
    tl.store(merged + channel, count, mask=channel < C)
    tl.store(merged + C + channel, mean, mask=channel < C)
    tl.store(merged + 2 * C + channel, square, mask=channel < C)


@sized("sets")
def _finish_kernel(
    moments, running_mean, running_var, batches, statistics, sets, momentum, eps,
    COUNT: tl.constexpr, C: tl.constexpr, SETS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    count, mean, square = _merge(moments, channel, sets, C, SETS)
    old_mean = tl.load(running_mean + channel, mask=inside, other=0.0)
    old_var = tl.load(running_var + channel, mask=inside, other=1.0)
    enough = count > 1
    mean = tl.where(enough, mean, old_mean)
    unbiased = tl.where(enough, square / tl.maximum(count - 1, 1.0), old_var)
    variance = tl.where(enough, square / tl.maximum(count, 1.0), old_var)
    tl.store(statistics + channel, mean, mask=inside)
    tl.store(statistics + C + channel, 1 / tl.sqrt_rn(variance + eps), mask=inside)
    tl.store(statistics + 2 * C + channel, tl.where(enough, 1 / tl.maximum(count, 1.0), 0.0), mask=inside)
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=inside)
    tl.store(running_var + channel, old_var + momentum * (unbiased - old_var), mask=inside)
    if COUNT and tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + tl.max(enough.to(tl.int64), axis=0))


@triton.jit
def _normalised(features, place, valid, channel, statistics, C: tl.constexpr):
    """Features less their mean over their deviation, in float32."""
    inside = channel < C
    mean = tl.load(statistics + channel, mask=inside, other=0.0)[None, :]
    scale = tl.load(statistics + C + channel, mask=inside, other=0.0)[None, :]
    return (tl.load(features + place, mask=valid, other=0.0).to(tl.float32) - mean) * scale


@sized("rows")
def _apply_kernel(
    features, shortcut, out, statistics, weight, bias, rows, RELU: tl.constexpr, SHORTCUT: tl.constexpr,
    C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, CHANNELS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row < rows)[:, None] & (channel < C)[None, :]
    place = row[:, None] * C + channel[None, :]
    factor = tl.load(weight + channel, mask=channel < C, other=0.0)[None, :]
    shift = tl.load(bias + channel, mask=channel < C, other=0.0)[None, :]
    value = _normalised(features, place, valid, channel, statistics, C) * factor + shift
    if SHORTCUT:
        value += tl.load(shortcut + place, mask=valid, other=0.0).to(tl.float32)
    if RELU:
        # NaN must stay NaN.
        value = tl.where(value < 0, 0.0, value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _passed(
    grad, normalised, out, weight, bias, place, valid, channel, RELU: tl.constexpr, SHORTCUT: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Gradient before the ReLU, float32; without a shortcut, what went into the ReLU is made again."""
    value = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32)
    if RELU:
        if SHORTCUT:
            passes = tl.load(out + place, mask=valid, other=0.0) > 0
        else:
            factor = tl.load(weight + channel, mask=channel < C, other=0.0)[None, :]
            passes = normalised * factor + tl.load(bias + channel, mask=channel < C, other=0.0)[None, :] > 0
        value = tl.where(passes, value, 0.0)
    return value


@sized("rows", "share")
def _sum_kernel(
    grad, features, out, statistics, weight, bias, sums, rows, share, RELU: tl.constexpr, SHORTCUT: tl.constexpr,
    C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, CHANNELS)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, rows)
    plain = tl.zeros((ROWS, CHANNELS), tl.float32)
    weighted = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = (row < end)[:, None] & (channel < C)[None, :]
        place = row[:, None] * C + channel[None, :]
        normalised = _normalised(features, place, valid, channel, statistics, C)
        value = _passed(grad, normalised, out, weight, bias, place, valid, channel, RELU, SHORTCUT, C)
        plain += value
        weighted += value * normalised
    into = sums + tl.program_id(0) * 2 * C + channel
    tl.store(into, tl.sum(plain, axis=0), mask=channel < C)
    tl.store(into + C, tl.sum(weighted, axis=0), mask=channel < C)


@sized("rows")
def _gradient_kernel(
    grad, features, out, statistics, weight, bias, sums, feature_grad, shortcut_grad, rows,
    RELU: tl.constexpr, SHORTCUT: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, CHANNELS)
    inside = channel < C
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * C + channel[None, :]
    normalised = _normalised(features, place, valid, channel, statistics, C)
    value = _passed(grad, normalised, out, weight, bias, place, valid, channel, RELU, SHORTCUT, C)
    if SHORTCUT:
        tl.store(shortcut_grad + place, value.to(shortcut_grad.dtype.element_ty), mask=valid)
    factor = tl.load(weight + channel, mask=inside, other=0.0) * tl.load(
        statistics + C + channel, mask=inside, other=0.0
    )
    share = tl.load(statistics + 2 * C + channel, mask=inside, other=0.0)
    plain = (tl.load(sums + channel, mask=inside, other=0.0) * share)[None, :]
    weighted = (tl.load(sums + C + channel, mask=inside, other=0.0) * share)[None, :]
    value -= plain + weighted * normalised
    tl.store(feature_grad + place, (value * factor[None, :]).to(feature_grad.dtype.element_ty), mask=valid)


def moments(features: Tensor, number: Tensor | None) -> Tensor:
    """(sets, 3, C) float32 count, mean and sum of squared distances to the mean of each set of rows.

    `number` is how many rows count, (1,) int32 on the device.
    """
    rows, channels = features.shape
    sizes = _sizes(channels)
    programs, share = _shares(rows, sizes["ROWS"])
    parts = torch.empty(programs, 3, channels, dtype=torch.float32, device=features.device)
    launch(
        _moment_kernel, (programs,), features, features if number is None else number, parts, rows, share,
        COUNTED=number is not None, **sizes,
    )  # fmt: skip
    return parts


def merge(moments: Tensor) -> Tensor:
    """(3, C) moments of all sets together."""
    sets, _, channels = moments.shape
    merged = moments.new_empty(3, channels)
    launch(_merge_kernel, _merge_grid(channels), moments, merged, sets, **_merge_sizes(sets, channels))
    return merged


def finish(
    moments: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor | None, momentum: float, eps: float
) -> Tensor:
    """(3, C) mean, inverse deviation and inverse count; updates the running statistics, which stand in below two.

    `batches` is the number of batches that went in, and counts this one if it does.
    """
    sets, _, channels = moments.shape
    statistics = moments.new_empty(3, channels)
    launch(
        _finish_kernel, _merge_grid(channels), moments, running_mean, running_var,
        moments if batches is None else batches, statistics, sets, momentum, eps,
        COUNT=batches is not None, **_merge_sizes(sets, channels),
    )  # fmt: skip
    return statistics


def apply(
    features: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, relu: bool
) -> Tensor:
    """Normalised features · weight + bias (+ shortcut), through the ReLU if asked."""
    rows, channels = features.shape
    out = torch.empty_like(features)
    sizes = _sizes(channels)
    launch(
        _apply_kernel, (blocks(rows, sizes["ROWS"]),), features,
        features if shortcut is None else shortcut, out, statistics, weight, bias, rows,
        RELU=relu, SHORTCUT=shortcut is not None, **sizes,
    )  # fmt: skip
    return out


def sums(
    grad: Tensor, features: Tensor, out: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> Tensor:
    """(2, C) float32 sums of the gradient before the ReLU, plain and weighted by normalised features.

    `out` is the result where there was a shortcut.
    """
    rows, channels = features.shape
    sizes = _sizes(channels)
    programs, share = _shares(rows, sizes["ROWS"])
    parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=features.device)
    launch(
        _sum_kernel, (programs,), grad, features, features if out is None else out, statistics, weight, bias, parts,
        rows, share, RELU=relu, SHORTCUT=out is not None, **sizes,
    )  # fmt: skip
    return parts.sum(0)


def gradients(
    grad: Tensor, features: Tensor, out: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor,
    sums: Tensor, shortcut: bool, relu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of features and shortcut, given `sums` over the rows that the statistics stand for."""
    rows, channels = features.shape
    sizes = _sizes(channels)
    feature_grad = torch.empty_like(features)
    shortcut_grad = torch.empty_like(features) if shortcut else None
    launch(
        _gradient_kernel, (blocks(rows, sizes["ROWS"]),), grad, features, features if out is None else out,
        statistics, weight, bias, sums, feature_grad, feature_grad if shortcut_grad is None else shortcut_grad, rows,
        RELU=relu, SHORTCUT=shortcut, **sizes,
    )  # fmt: skip
    return feature_grad, shortcut_grad


def _merge_grid(channels: int) -> tuple[int]:
    return (blocks(channels, _CHANNELS_OF_MERGE),)


def _merge_sizes(sets: int, channels: int) -> dict[str, int]:
    return {"C": channels, "SETS": power_of_two(sets), "CHANNELS": _CHANNELS_OF_MERGE}


def _sizes(channels: int) -> dict[str, int]:
    width = power_of_two(channels)
    return {"C": channels, "CHANNELS": width, "ROWS": max(1, _ELEMENTS // width)}


def _shares(rows: int, block: int) -> tuple[int, int]:
    """Programs, and rows of each: whole blocks."""
    share = blocks(blocks(rows, block), _PROGRAMS) * block
    return blocks(rows, share), share
