"""Triton kernels of `bevctl.ops.sparse_conv`: implicit matrix products over rules in tiles, summed in float32.

A tile is a block of output rows that meet neighbours under much the same offsets; only these are visited. Each output
row is written by one program, and partial weight gradients are added in a fixed order: results repeat bit by bit.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized
from bevctl.ops.rulebook import TILE, Tiles


@sized("inputs", "rows", "padded")
def _convolve_kernel(
    features, kernels, out, table, order, offsets, counts, inputs, rows, padded,
    OFFSETS: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK_OUT: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    channel_in = tl.arange(0, BLOCK_IN)
    channel_out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if TRANSPOSE:
        kernel_place = channel_in[:, None] + channel_out[None, :] * IN
    else:
        kernel_place = channel_in[:, None] * OUT + channel_out[None, :]
    total = tl.zeros((TILE, BLOCK_OUT), tl.float32)
    for step in range(tl.load(counts + tile) * STEPS):
        offset = tl.load(offsets + tile * OFFSETS + step // STEPS)
        met = tl.load(table + offset * padded + place)
        other = OFFSETS - 1 - offset if REVERSE else offset
        for part in tl.static_range(PARTS):
            first = part * BLOCK_IN
            if STEPS > 1:
                first += step % STEPS * PARTS * BLOCK_IN
            channel = first + channel_in
            gathered = tl.load(
                features + met[:, None] * IN + channel[None, :],
                mask=(met < inputs)[:, None] & (channel < IN)[None, :],
                other=0.0,
            )
            kernel = tl.load(
                kernels + other * IN * OUT + first * (1 if TRANSPOSE else OUT) + kernel_place,
                mask=(channel < IN)[:, None] & (channel_out < OUT)[None, :],
                other=0.0,
            )
            total = tl.dot(gathered, kernel, total, input_precision=PRECISION)
    row = tl.load(order + place, mask=place < rows, other=0)
    tl.store(
        out + row[:, None] * OUT + channel_out[None, :],
        total.to(out.dtype.element_ty),
        mask=(place < rows)[:, None] & (channel_out < OUT)[None, :],
    )


@sized("inputs", "rows", "padded", "tiles", "splits")
def _convolve_gradient_kernel(
    features, grad, partial, table, order, listed, counts, inputs, rows, padded, tiles, splits,
    OFFSETS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0)
    split = tl.program_id(1)
    blocks_out = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    channel_in = tl.program_id(2) // blocks_out * BLOCK_IN + tl.arange(0, BLOCK_IN)
    channel_out = tl.program_id(2) % blocks_out * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    count = tl.load(counts + offset) * (TILE // STEP)
    share = (count + splits - 1) // splits
    total = tl.zeros((BLOCK_IN, BLOCK_OUT), tl.float32)
    for index in range(split * share, tl.minimum((split + 1) * share, count)):
        tile = tl.load(listed + offset * tiles + index // (TILE // STEP))
        place = tile * TILE + index % (TILE // STEP) * STEP + tl.arange(0, STEP)
        met = tl.load(table + offset * padded + place)
        row = tl.load(order + place, mask=place < rows, other=0)
        gathered = tl.load(
            features + met[:, None] * IN + channel_in[None, :],
            mask=(met < inputs)[:, None] & (channel_in < IN)[None, :],
            other=0.0,
        )
        reached = tl.load(
            grad + row[:, None] * OUT + channel_out[None, :],
            mask=(met < inputs)[:, None] & (channel_out < OUT)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(gathered), reached, total, input_precision=PRECISION)
    base = partial + (split * OFFSETS + offset) * IN * OUT
    tl.store(
        base + channel_in[:, None] * OUT + channel_out[None, :],
        total,
        mask=(channel_in < IN)[:, None] & (channel_out < OUT)[None, :],
    )


def convolve(features: Tensor, kernels: Tensor, tiles: Tiles, rows: int, reverse: bool, transpose: bool) -> Tensor:
    """(rows, Cout) sums of features (inputs, Cin) @ kernels (K, Cin, Cout).

    Kernels are contiguous, in reverse order and (K, Cout, Cin) where asked.
    """
    channels_in = features.shape[1]
    channels_out = kernels.shape[1 if transpose else 2]
    out = features.new_empty(rows, channels_out)
    single = features.dtype == torch.float32
    # Blocks of half precision are unrolled; those of float32 would fill the shared memory, and take long to compile.
    block_in, block_out = _block(channels_in, 32 if single else 64), _block(channels_out, 64 if single else 128)
    steps = blocks(channels_in, block_in)
    launch(
        _convolve_kernel, (len(tiles.offset_counts), blocks(channels_out, block_out)),
        features, kernels, out, tiles.table, tiles.order, tiles.offsets, tiles.offset_counts,
        len(features), rows, tiles.table.shape[1],
        OFFSETS=len(kernels), REVERSE=reverse, TRANSPOSE=transpose, IN=channels_in, OUT=channels_out,
        BLOCK_IN=block_in, PARTS=1 if single else steps, STEPS=steps if single else 1, BLOCK_OUT=block_out, TILE=TILE,
        PRECISION=_precision(features), num_warps=2 if block_out == 16 else 4, num_stages=2 if single else 3,
    )  # fmt: skip
    return out


def kernel_gradient(features: Tensor, grad: Tensor, tiles: Tiles) -> Tensor:
    """(K, Cin, Cout) float32 gradient of the kernels."""
    offsets, count = tiles.tiles.shape
    channels_in, channels_out = features.shape[1], grad.shape[1]
    single = features.dtype == torch.float32
    block_in, block_out = (_block(channels, 64 if single else 128) for channels in (channels_in, channels_out))
    area = block_in * block_out
    parts = blocks(channels_in, block_in) * blocks(channels_out, block_out)
    # Programs share a gradient: enough to fill a GPU, few enough for the sum over their parts.
    programs = 640 if area == 128 * 128 else 1280 if area >= 64 * 64 else 2560
    splits = max(1, min(programs // (offsets * parts), count))
    partial = torch.empty(splits, offsets, channels_in, channels_out, dtype=torch.float32, device=grad.device)
    launch(
        _convolve_gradient_kernel, (offsets, splits, parts),
        features, grad, partial, tiles.table, tiles.order, tiles.tiles, tiles.tile_counts,
        len(features), len(grad), tiles.table.shape[1], count, splits,
        OFFSETS=offsets, IN=channels_in, OUT=channels_out, BLOCK_IN=block_in, BLOCK_OUT=block_out, TILE=TILE,
        STEP=32 if single else 64 if area == 128 * 128 else 128, PRECISION=_precision(features),
        num_warps=8 if area == 128 * 128 else 4 if area >= 64 * 64 else 2, num_stages=2 if single else 3,
    )  # fmt: skip
    return partial.sum(0)


def _block(channels: int, limit: int) -> int:
    """Channels of a block: a power of two, and at least what a matrix unit takes."""
    return min(limit, max(16, power_of_two(channels)))


def _precision(tensor: Tensor) -> str:
    single = tensor.dtype == torch.float32
    return "ieee" if single and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
