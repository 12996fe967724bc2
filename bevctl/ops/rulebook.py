"""Which input row of a sparse convolution meets which output row, under each offset of the kernel.

Sites are looked up by binary search in sorted linear indices; no array of the size of the grid is made. Coordinates
are (M, 4) int64 rows (b, x, y, z), unique and ascending; sparse shapes and kernels are in the order (x, y, z).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Block:
    """The pairs of a range of output rows, those of one kernel offset side by side."""

    rows: slice
    """Output rows."""
    sources: Tensor
    """(P,) int32 input row of each pair."""
    targets: Tensor
    """(P,) int32 output row of each pair."""
    counts: list[int]
    """Pairs of each offset."""
    order: Tensor
    """(P,) int32 pairs sorted by output row, and by offset inside it."""
    starts: Tensor
    """(rows,) int32 place in `order` where each output row begins."""


@dataclass(frozen=True)
class RuleBook:
    """Neighbours of K kernel offsets (C order of (kx, ky, kz)). A row occurs at most once under an offset."""

    table: Tensor
    """(K, outputs) int32 input row that each output row meets, or -1."""
    inputs: int
    """Input rows."""
    mirrored: bool
    """The pairs of an offset are those of the mirrored offset swapped (output sites = input sites)."""
    _made: dict[int, list[Block]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def outputs(self) -> int:
        """Output rows."""
        return self.table.shape[1]

    def blocks(self, rows: int) -> list[Block]:
        """The pairs in blocks of `rows` output rows, made once."""
        if rows not in self._made:
            self._made[rows] = _blocks(self.table, rows)
        return self._made[rows]

    def transposed(self) -> RuleBook:
        """Rules from the outputs back to the inputs, as the gradient of the input needs them."""
        if self.mirrored:
            return RuleBook(self.table.flip(0), self.outputs, mirrored=True)
        offsets, targets = (self.table >= 0).nonzero(as_tuple=True)
        sources = self.table[offsets, targets]
        return RuleBook(_table(offsets, sources, targets, len(self.table), self.inputs), self.outputs, mirrored=False)


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
    """Rules of a convolution whose output sites are its input sites; `kernel` must be odd.

    Only half of the offsets is searched: if row i meets row j under an offset, j meets i under the mirrored one.
    """
    gap = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    # With empty cells between the rows of the grid, a neighbour outside it has an index that no site has.
    spaced = (shape[0] + gap[0], shape[1] + gap[1], shape[2] + gap[2])
    keys = ravel(coords, spaced)
    steps = _steps(gap, spaced, coords.device)
    half, sites = len(steps) // 2, len(keys)
    wanted = keys + steps[:half, None]
    rows = torch.searchsorted(keys, wanted).clamp_(max=max(sites - 1, 0))
    offsets, targets = (keys[rows] == wanted).nonzero(as_tuple=True)
    sources = rows[offsets, targets]
    own = torch.arange(sites, device=coords.device)
    table = _table(
        torch.cat([offsets, torch.full_like(own, half), 2 * half - offsets]),
        torch.cat([targets, own, sources]),
        torch.cat([sources, own, targets]),
        len(steps),
        sites,
    )
    return RuleBook(table, sites, mirrored=True)


def strided_rules(
    coords: Tensor, shape: Triple, kernel: Triple, stride: Triple, padding: Triple
) -> tuple[Tensor, RuleBook]:
    """Output sites (M', 4) and rules of a convolution with output wherever its window holds an input site."""
    into = output_shape(shape, kernel, stride, padding)
    axes = [_reached(coords[:, i + 1], into[i], kernel[i], stride[i], padding[i]) for i in range(3)]
    (x, has_x), (y, has_y), (z, has_z) = axes
    reaches = (has_x[:, None, None] & has_y[None, :, None] & has_z[None, None]).flatten(0, 2)
    partial = ((coords[:, 0] * into[0] + x)[:, None] * into[1] + y[None])[:, :, None] * into[2]
    keys = (partial + z[None, None]).flatten(0, 2)
    offsets, sources = reaches.nonzero(as_tuple=True)
    sites, targets = torch.unique(keys[offsets, sources], return_inverse=True)
    table = _table(offsets, targets, sources, len(reaches), len(sites))
    return unravel(sites, into), RuleBook(table, len(coords), mirrored=False)


def _steps(gap: Triple, shape: Triple, device: torch.device) -> Tensor:
    """(K,) change of the linear index under each offset of a centred kernel."""
    x, y, z = (torch.arange(-g, g + 1, device=device) for g in gap)
    return ((x[:, None, None] * shape[1] + y[:, None]) * shape[2] + z).flatten()


def _reached(position: Tensor, size: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Along one axis: (kernel, M) output cell that each offset carries a site to, and whether there is one."""
    scaled = position + padding - torch.arange(kernel, device=position.device)[:, None]
    cell = torch.div(scaled, stride, rounding_mode="floor")
    return cell, (scaled % stride == 0) & (cell >= 0) & (cell < size)


def _table(offsets: Tensor, rows: Tensor, values: Tensor, kernel_size: int, row_count: int) -> Tensor:
    """(kernel_size, row_count) int32 holding `values` at (offsets, rows), -1 elsewhere."""
    table = torch.full((kernel_size * row_count,), -1, dtype=torch.int32, device=rows.device)
    table[offsets * row_count + rows] = values.int()
    return table.view(kernel_size, row_count)


def _blocks(table: Tensor, size: int) -> list[Block]:
    parts = table.split(size, dim=1)
    # One copy to the host for all blocks.
    counts = torch.stack([(part >= 0).sum(dim=1) for part in parts]).tolist()
    return [_block(part, i * size, count) for i, (part, count) in enumerate(zip(parts, counts, strict=True))]


def _block(part: Tensor, first: int, counts: list[int]) -> Block:
    """Block of the columns `part` of a table, whose output rows begin at `first`."""
    has = part >= 0
    place = has.flatten().cumsum(0, dtype=torch.int32).view_as(part) - 1
    pairs = has.sum(dim=0, dtype=torch.int32)
    return Block(
        rows=slice(first, first + part.shape[1]),
        sources=part[has],
        targets=has.nonzero()[:, 1].int() + first,
        counts=counts,
        order=place.T[has.T],
        starts=pairs.cumsum(0, dtype=torch.int32) - pairs,
    )
