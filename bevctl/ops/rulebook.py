"""Which input row of a sparse convolution meets which output row, under each offset of the kernel.

Coordinates are (M, 4) int64 rows (b, x, y, z), unique and ascending; sparse shapes and kernels are in the order
(x, y, z). Sites are looked up by binary search in sorted linear indices, and no array of the size of the grid is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Triple = tuple[int, int, int]
TILE = 128
"""Rows of a tile."""
MAX_OFFSETS = 31
"""Offsets that tiles are made for: each has a bit in an int32."""


class Tiles(NamedTuple):
    """A rule-book for a block-wise product. Rows that meet neighbours under the same offsets share tiles.

    The sort by those offsets is stable, so that rows close to each other stay close.
    """

    order: Tensor
    """(rows,) int32 row at each place."""
    table: Tensor
    """(K, places) int32 as `RuleBook.table`, transposed, in the order of places; the last tile is filled up."""
    offsets: Tensor
    """(tiles, K) int32 offsets under which a row of the tile has a neighbour, ascending, the first `offset_counts`."""
    offset_counts: Tensor
    """(tiles,) int32."""
    tiles: Tensor
    """(K, tiles) int32 tiles with a neighbour under the offset, ascending, the first `tile_counts`."""
    tile_counts: Tensor
    """(K,) int32."""


class RuleBook:
    """The input row that each output row meets under each of K kernel offsets, in C order of (kx, ky, kz).

    It holds either the plain table or the tiles made of it, not both.

    Args:
        table: (outputs, K) int32 input row; `inputs`, one past the last, where there is none.
        inputs: input rows.
        mirrored: input and output sites are the same: if i meets j under an offset, j meets i under the mirrored one.
    """

    def __init__(self, table: Tensor, inputs: int, mirrored: bool) -> None:
        self.outputs, self.offsets = table.shape
        self.inputs, self.mirrored = inputs, mirrored
        self._table: Tensor | None = table
        self._tiles: Tiles | None = None

    @property
    def table(self) -> Tensor:
        """(outputs, K) int32 as above."""
        if self._table is not None:
            return self._table
        table = self.tiles.table.new_empty(self.outputs, self.offsets)
        table[self.tiles.order.long()] = self.tiles.table[:, : self.outputs].T
        return table

    @property
    def tiles(self) -> Tiles:
        """For the Triton path; at least one output row."""
        if self._tiles is None:
            from bevctl.ops.kernels import rulebook as kernels

            self._tiles = Tiles(*kernels.arrange(self.table.T.contiguous(), self.inputs, TILE))
            self._table = None
        return self._tiles

    def transposed(self) -> RuleBook:
        """The output row that each input row meets under each offset; an input meets at most one."""
        if self._tiles is not None:
            from bevctl.ops.kernels import rulebook as kernels

            return RuleBook(kernels.transpose(self._tiles, self.outputs, self.inputs).T, self.outputs, mirrored=False)
        table = self.table.new_full((self.inputs + 1, self.offsets), self.outputs)
        rows = torch.arange(self.outputs, dtype=table.dtype, device=table.device)
        table.scatter_(0, self.table.long(), rows[:, None].expand(-1, self.offsets))
        return RuleBook(table[:-1], self.outputs, mirrored=False)


def ravel(coords: Tensor, shape: Triple) -> Tensor:
    """(M,) linear index of (M, 4) rows (b, x, y, z) in a grid of `shape`."""
    b, x, y, z = coords.unbind(dim=1)
    return ((b * shape[0] + x) * shape[1] + y) * shape[2] + z


def unravel(keys: Tensor, shape: Triple) -> Tensor:
    """(M, 4) rows (b, x, y, z) of (M,) linear indices in a grid of `shape`."""
    rest, z = keys // shape[2], keys % shape[2]
    rest, y = rest // shape[1], rest % shape[1]
    return torch.stack([rest // shape[0], rest % shape[0], y, z], dim=1)


def output_shape(shape: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    """Sparse shape after a strided convolution."""
    x, y, z = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding, strict=True))
    return x, y, z


def submanifold_rules(coords: Tensor, shape: Triple, kernel: Triple) -> RuleBook:
    """Rules of a convolution whose output sites are its input sites; `kernel` must be odd."""
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    table = _neighbours(coords, coords, shape, kernel, (1, 1, 1), padding)
    return RuleBook(table, len(coords), mirrored=True)


def strided_rules(
    coords: Tensor, shape: Triple, kernel: Triple, stride: Triple, padding: Triple
) -> tuple[Tensor, RuleBook]:
    """Output sites (M', 4) and rules of a convolution with output wherever its window holds an input site."""
    sites = _output_sites(coords, output_shape(shape, kernel, stride, padding), kernel, stride, padding)
    return sites, RuleBook(_neighbours(coords, sites, shape, kernel, stride, padding), len(coords), mirrored=False)


def _neighbours(
    coords: Tensor, sites: Tensor, shape: Triple, kernel: Triple, stride: Triple, padding: Triple
) -> Tensor:
    """(M', K) int32 row in `coords` of each cell of the window of each output site, M where the cell is empty."""
    # With empty cells after each row of the grid, a cell outside it has an index that no site has.
    x, y, z = (n + p for n, p in zip(shape, padding, strict=True))
    spaced = (x, y, z)
    keys = ravel(coords, spaced)
    first = ravel(sites * sites.new_tensor((1, *stride)) - sites.new_tensor((0, *padding)), spaced)
    columns = torch.arange(kernel[0], device=keys.device)[:, None] * y + torch.arange(kernel[1], device=keys.device)
    wanted = first[:, None] + columns.flatten() * z
    # Cells that follow each other in z have indices that follow each other: one search a column of the window.
    place = torch.searchsorted(keys, wanted, out_int32=True)
    ended = torch.cat([keys, keys.new_full((1,), -1)])
    rows = []
    for dz in range(kernel[2]):
        found = ended.index_select(0, place.flatten()).view_as(wanted) == wanted + dz
        rows.append(torch.where(found, place, len(keys)))
        place = place + found
    return torch.stack(rows, dim=2).flatten(1)


def _output_sites(coords: Tensor, into: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Tensor:
    """(M', 4) ascending sites whose window holds one of the input sites."""
    axes = [_windows(coords[:, i + 1], into[i], kernel[i], stride[i], padding[i]) for i in range(3)]
    (x, has_x), (y, has_y), (z, has_z) = axes
    keys = ((coords[:, :1] * into[0] + x)[:, :, None] * into[1] + y[:, None])[..., None] * into[2] + z[:, None, None]
    exists = has_x[:, :, None, None] & has_y[:, None, :, None] & has_z[:, None, None]
    return unravel(torch.unique(keys[exists]), into)


def _windows(position: Tensor, size: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Along one axis: (M, n) output cells whose window may hold each site, and whether it does."""
    reach = position + padding
    first = torch.div(reach - kernel + stride, stride, rounding_mode="floor")
    cells = first[:, None] + torch.arange(-(-kernel // stride), device=position.device)
    return cells, (cells >= 0) & (cells < size) & (cells * stride <= reach[:, None])
