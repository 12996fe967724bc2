"""Triton kernels of `bevctl.ops.rulebook`: sites as one word of bits a column of the grid, and rules in tiles.

Bit z of the word of column (b, x, y) says whether cell (b, x, y, z) is active; `starts` holds the row of the first
site of the column, as rows ascend in (b, x, y, z). So the row of a cell is one look-up and one count of bits. Words
of a coarser grid follow from those of the finer one, without the list of sites between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevctl.ops.kernels.launch import blocks, launch, power_of_two, sized
from bevctl.ops.rulebook import Tiles, Triple

_BLOCK = 256
_LIST_BLOCK, _LIST_COLUMNS = 1024, 64


@triton.jit
def _count_bits(word):
    """Set bits of non-negative int64 words."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    word += word >> 32
    return (word & 127).to(tl.int32)


@triton.jit
def _below(z):
    """Bits below bit z."""
    return (tl.full(z.shape, 1, tl.int64) << z.to(tl.int64)) - 1


@sized("sites", "size_x", "size_y")
def _mark_kernel(coords, words, sites, size_x, size_y, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < sites
    sample = tl.load(coords + row * 4, mask=inside, other=-1)
    x = tl.load(coords + row * 4 + 1, mask=inside, other=0)
    y = tl.load(coords + row * 4 + 2, mask=inside, other=0)
    z = tl.load(coords + row * 4 + 3, mask=inside, other=0)
    bit = tl.full((BLOCK,), 1, tl.int64) << z
    tl.atomic_or(words + (sample * size_x + x) * size_y + y, bit, mask=sample >= 0)


@sized("columns", "size_x", "size_y", "out_x", "out_y")
def _coarsen_kernel(
    words, coarse, columns, size_x, size_y, out_x, out_y,
    OUT_Z: tl.constexpr, KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    SX: tl.constexpr, SY: tl.constexpr, SZ: tl.constexpr,
    PX: tl.constexpr, PY: tl.constexpr, PZ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_y = column % out_y * SY - PY
    first_x = column // out_y % out_x * SX - PX
    sample = column // (out_y * out_x)
    seen = tl.zeros((BLOCK,), tl.int64)
    for dx in tl.static_range(KX):
        for dy in tl.static_range(KY):
            x, y = first_x + dx, first_y + dy
            inside = (x >= 0) & (x < size_x) & (y >= 0) & (y < size_y) & (column < columns)
            seen |= tl.load(words + (sample * size_x + x) * size_y + y, mask=inside, other=0)
    seen = seen << PZ
    word = tl.zeros((BLOCK,), tl.int64)
    for z in tl.static_range(OUT_Z):
        window = (seen >> (z * SZ)) & ((1 << KZ) - 1)
        word |= (window != 0).to(tl.int64) << z
    tl.store(coarse + column, word, mask=column < columns)


@sized("columns")
def _count_kernel(words, counts, columns, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + column, mask=column < columns, other=0)
    tl.store(counts + column, _count_bits(word), mask=column < columns)


@sized("columns", "size_x", "size_y")
def _list_kernel(words, ends, coords, columns, size_x, size_y, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + column, mask=column < columns, other=0)
    start = tl.load(ends + column, mask=column < columns, other=0) - _count_bits(word)
    z = tl.arange(0, DEPTH)[None, :]
    bits = word[:, None]
    row = (start[:, None] + _count_bits(bits & _below(z))).to(tl.int64)
    active = ((bits >> z.to(tl.int64)) & 1) != 0
    y = column % size_y
    x = column // size_y % size_x
    sample = column // (size_y * size_x)
    tl.store(coords + row * 4, tl.broadcast_to(sample[:, None], (BLOCK, DEPTH)).to(tl.int64), mask=active)
    tl.store(coords + row * 4 + 1, tl.broadcast_to(x[:, None], (BLOCK, DEPTH)).to(tl.int64), mask=active)
    tl.store(coords + row * 4 + 2, tl.broadcast_to(y[:, None], (BLOCK, DEPTH)).to(tl.int64), mask=active)
    tl.store(coords + row * 4 + 3, tl.broadcast_to(z, (BLOCK, DEPTH)).to(tl.int64), mask=active)


@sized("outputs", "inputs", "size_x", "size_y", "size_z")
def _neighbours_kernel(
    sites, words, ends, table, outputs, inputs, size_x, size_y, size_z,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, SX: tl.constexpr, SY: tl.constexpr, SZ: tl.constexpr,
    PX: tl.constexpr, PY: tl.constexpr, PZ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < outputs
    sample = tl.load(sites + row * 4, mask=exists, other=-1)
    first_x = tl.load(sites + row * 4 + 1, mask=exists, other=0) * SX - PX
    first_y = tl.load(sites + row * 4 + 2, mask=exists, other=0) * SY - PY
    first_z = tl.load(sites + row * 4 + 3, mask=exists, other=0) * SZ - PZ
    for dx in tl.static_range(KX):
        for dy in tl.static_range(KY):
            x, y = first_x + dx, first_y + dy
            inside = (x >= 0) & (x < size_x) & (y >= 0) & (y < size_y) & (sample >= 0)
            column = (sample * size_x + x) * size_y + y
            word = tl.load(words + column, mask=inside, other=0)
            start = tl.load(ends + column, mask=inside, other=0) - _count_bits(word)
            for dz in tl.static_range(KZ):
                z = first_z + dz
                within = (z >= 0) & (z < size_z)
                z = tl.where(within, z, 0)
                found = within & (((word >> z) & 1) != 0)
                met = tl.where(found, start + _count_bits(word & _below(z)), inputs)
                offset = (dx * KY + dy) * KZ + dz
                tl.store(table + offset * outputs + row, met, mask=exists)


@sized("outputs", "inputs", "padded")
def _transpose_kernel(table, order, transposed, outputs, inputs, padded, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(1)
    met = tl.load(table + offset * padded + place, mask=place < outputs, other=inputs)
    row = tl.load(order + place, mask=place < outputs, other=0)
    tl.store(transposed + offset * inputs + met, row, mask=met < inputs)


@sized("rows", "absent")
def _mask_kernel(table, masks, rows, absent, OFFSETS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.zeros((BLOCK,), tl.int32)
    for offset in range(OFFSETS):
        met = tl.load(table + offset * rows + row, mask=row < rows, other=absent)
        mask |= (met < absent).to(tl.int32) << offset
    tl.store(masks + row, mask, mask=row < rows)


@sized("rows", "padded", "tiles", "absent")
def _arrange_kernel(
    table, sorted_rows, order, arranged, offsets, counts, present, rows, padded, tiles, absent,
    OFFSETS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    row = tl.load(sorted_rows + place, mask=place < rows, other=0).to(tl.int32)
    tl.store(order + place, row)
    used = 0
    for offset in range(OFFSETS):
        met = tl.load(table + offset * rows + row, mask=place < rows, other=absent)
        tl.store(arranged + offset * padded + place, met)
        needed = tl.max((met < absent).to(tl.int32), axis=0)
        tl.store(present + offset * tiles + tile, needed)
        tl.store(offsets + tile * OFFSETS + used, offset, mask=needed > 0)
        used += needed
    tl.store(counts + tile, used)


@sized("tiles")
def _tile_list_kernel(present, listed, counts, tiles, BLOCK: tl.constexpr):
    offset = tl.program_id(0)
    used = 0
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        needed = tl.load(present + offset * tiles + tile, mask=tile < tiles, other=0)
        place = used + tl.cumsum(needed, axis=0) - needed
        tl.store(listed + offset * tiles + place, tile, mask=needed > 0)
        used += tl.sum(needed, axis=0)
    tl.store(counts + offset, used)


def mark(coords: Tensor, shape: Triple, batch: int) -> Tensor:
    """(B · X · Y,) int64 words of (M, 4) int64 sites; rows whose sample is negative are left out."""
    words = torch.zeros(batch * shape[0] * shape[1], dtype=torch.int64, device=coords.device)
    if len(coords):
        launch(_mark_kernel, _grid(len(coords)), coords, words, len(coords), shape[0], shape[1], BLOCK=_BLOCK)
    return words


def coarsen(
    words: Tensor, batch: int, shape: Triple, into: Triple, kernel: Triple, stride: Triple, padding: Triple
) -> Tensor:
    """Words of the output sites of a strided convolution, from those of its input."""
    columns = batch * into[0] * into[1]
    coarse = words.new_empty(columns)
    launch(
        _coarsen_kernel, _grid(columns), words, coarse, columns, shape[0], shape[1], into[0], into[1],
        OUT_Z=into[2], **_window(kernel, stride, padding), BLOCK=_BLOCK,
    )  # fmt: skip
    return coarse


def column_ends(words: Tensor) -> Tensor:
    """(columns,) int32 row after the last site of each column; the last one is the number of sites."""
    counts = torch.empty_like(words, dtype=torch.int32)
    launch(_count_kernel, _grid(len(words)), words, counts, len(words), BLOCK=_BLOCK)
    return counts.cumsum(0, dtype=torch.int32)


def list_sites(words: Tensor, ends: Tensor, sites: int, rows: int, shape: Triple) -> Tensor:
    """(rows, 4) int64 coordinates of the set bits, ascending, of which there are `sites`; then rows of -1."""
    coords = words.new_full((rows, 4), -1) if rows > sites else words.new_empty(rows, 4)
    depth = power_of_two(shape[2])
    grid = (blocks(len(words), _LIST_COLUMNS),)
    launch(_list_kernel, grid, words, ends, coords, len(words), shape[0], shape[1], DEPTH=depth, BLOCK=_LIST_COLUMNS)
    return coords


def neighbours(
    sites: Tensor, words: Tensor, ends: Tensor, inputs: int, shape: Triple,
    kernel: Triple, stride: Triple, padding: Triple,
) -> Tensor:  # fmt: skip
    """(K, outputs) int32 input row of each cell of the window of each output site, `inputs` where it is empty."""
    table = ends.new_empty(kernel[0] * kernel[1] * kernel[2], len(sites))
    if len(sites):
        launch(
            _neighbours_kernel, _grid(len(sites)), sites, words, ends, table, len(sites), inputs, *shape,
            **_window(kernel, stride, padding), BLOCK=_BLOCK,
        )  # fmt: skip
    return table


def transpose(tiles: Tiles, outputs: int, inputs: int) -> Tensor:
    """(K, inputs) int32 output row that each input row meets, `outputs` where there is none."""
    offsets, padded = tiles.table.shape
    transposed = tiles.table.new_full((offsets, inputs), outputs)
    grid = (blocks(outputs, _BLOCK), offsets)
    launch(_transpose_kernel, grid, tiles.table, tiles.order, transposed, outputs, inputs, padded, BLOCK=_BLOCK)
    return transposed


def arrange(table: Tensor, absent: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `bevctl.ops.rulebook.Tiles`, whose fields these are, for a (K, rows) table with at least one row."""
    offsets, rows = table.shape
    tiles = blocks(rows, tile)
    # One allocation for all: an allocation costs the host as much as a launch.
    parts = table.new_empty((offsets + 1) * tiles * tile + (3 * offsets + 1) * tiles + offsets + rows).split(
        [rows, tiles * tile, offsets * tiles * tile, *[offsets * tiles] * 3, tiles, offsets]
    )
    masks, order, arranged, tile_offsets, present, offset_tiles, offset_counts, tile_counts = parts
    launch(_mask_kernel, _grid(rows), table, masks, rows, absent, OFFSETS=offsets, BLOCK=_BLOCK)
    launch(
        _arrange_kernel, (tiles,), table, torch.sort(masks, stable=True).indices, order, arranged, tile_offsets,
        offset_counts, present, rows, tiles * tile, tiles, absent, OFFSETS=offsets, TILE=tile,
    )  # fmt: skip
    launch(_tile_list_kernel, (offsets,), present, offset_tiles, tile_counts, tiles, BLOCK=_LIST_BLOCK)
    return (
        order[:rows], arranged.view(offsets, -1), tile_offsets.view(tiles, -1), offset_counts,
        offset_tiles.view(offsets, -1), tile_counts,
    )  # fmt: skip


def _window(kernel: Triple, stride: Triple, padding: Triple) -> dict[str, int]:
    names = [kind + axis for kind in "KSP" for axis in "XYZ"]
    return dict(zip(names, (*kernel, *stride, *padding), strict=True))


def _grid(elements: int) -> tuple[int]:
    return (blocks(elements, _BLOCK),)
