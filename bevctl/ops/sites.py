"""Active cells of a sparse grid, and the rules of the convolutions that start there.

Where Triton runs, cells are looked up in a map of one word of bits a column of the grid; elsewhere, and for grids too
large or too high for that, by the search of `bevctl.ops.rulebook`. Rows and rules are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bevctl.ops.backend import use_triton
from bevctl.ops.rulebook import RuleBook, Triple, output_shape, strided_rules, submanifold_rules

_MAX_DEPTH = 60
"""Cells of a column, padding included, that have a bit in a non-negative int64."""
_MAX_COLUMNS = 2**28
"""Columns of all samples: 3 GiB of map."""


class Window(NamedTuple):
    """Geometry of a strided convolution, each entry along x, y, z."""

    kernel: Triple
    stride: Triple
    padding: Triple


class ColumnMap(NamedTuple):
    """Where each active cell is in the list of sites."""

    words: Tensor
    """(B · X · Y,) int64: bit z is set where cell z of the column is active."""
    ends: Tensor
    """(B · X · Y,) int32 row after the last site of the column."""


@dataclass(frozen=True)
class Sites:
    """M active cells of a batch of grids. Rules and output sites of a convolution are made once and shared."""

    coords: Tensor
    """(M, 4) int64 (b, x, y, z), unique, ascending."""
    shape: Triple
    """Cells along x, y, z."""
    batch: int
    """Samples; some may have no site."""
    _map: list[ColumnMap] = field(default_factory=list, repr=False, compare=False)
    _submanifold: dict[Triple, RuleBook] = field(default_factory=dict, repr=False, compare=False)
    _coarser: dict[Window, Sites] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.coords)

    def submanifold_rules(self, kernel: Triple) -> RuleBook:
        """Rules of a convolution whose output sites are these; `kernel` must be odd."""
        if kernel not in self._submanifold:
            window = Window(kernel, (1, 1, 1), (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2))
            if _mapped(self.coords, self.shape, self.batch, [window]):
                rules = RuleBook(self._neighbours(self, window), len(self), mirrored=True)
            else:
                rules = submanifold_rules(self.coords, self.shape, kernel)
            self._submanifold[kernel] = rules
        return self._submanifold[kernel]

    def strided_rules(self, window: Window) -> tuple[Sites, RuleBook]:
        """Output sites, wherever a window holds one of these, and rules of a strided convolution."""
        if not _mapped(self.coords, self.shape, self.batch, [window]):
            coords, rules = strided_rules(self.coords, self.shape, *window)
            return Sites(coords, output_shape(self.shape, *window), self.batch), rules
        if window not in self._coarser:
            words = self.column_map().words
            self._coarser[window] = _chain(self.coords, words, self.shape, self.batch, [window])[1][0]
        sites = self._coarser[window]
        return sites, RuleBook(self._neighbours(sites, window), len(self), mirrored=False)

    def column_map(self) -> ColumnMap:
        """Made once."""
        if not self._map:
            from bevctl.ops.kernels import rulebook as kernels

            words = kernels.mark(self.coords, self.shape, self.batch)
            self._map.append(ColumnMap(words, kernels.column_ends(words)))
        return self._map[0]

    def _neighbours(self, outputs: Sites, window: Window) -> Tensor:
        """(outputs, K) table of rules."""
        from bevctl.ops.kernels import rulebook as kernels

        return kernels.neighbours(outputs.coords, *self.column_map(), len(self), self.shape, *window).T


def plan_sites(coords: Tensor, shape: Triple, batch: int, windows: Sequence[Window]) -> Sites:
    """Sites of (M, 4) ascending coordinates, ready for strided convolutions that follow one after another.

    Rows of `coords` with b = -1 at the end are padding. Where Triton runs, the host waits for the GPU once, to read
    the numbers of all sites.
    """
    if not _mapped(coords, shape, batch, windows):
        return Sites(coords[: int((coords[:, 0] >= 0).sum())], shape, batch)
    from bevctl.ops.kernels import rulebook as kernels

    sites, coarser = _chain(coords, kernels.mark(coords, shape, batch), shape, batch, windows)
    finer = sites
    for window, level in zip(windows, coarser, strict=True):
        finer._coarser[window] = level
        finer = level
    return sites


def _mapped(coords: Tensor, shape: Triple, batch: int, windows: Sequence[Window]) -> bool:
    """Whether a map of columns serves these convolutions."""
    depth = shape[2] + max((window.padding[2] for window in windows), default=0)
    return use_triton(coords) and depth <= _MAX_DEPTH and batch * shape[0] * shape[1] <= _MAX_COLUMNS


def _chain(
    coords: Tensor, words: Tensor, shape: Triple, batch: int, windows: Sequence[Window]
) -> tuple[Sites, list[Sites]]:
    """The sites of `coords`, marked in `words`, and those of each of the strided convolutions that follow."""
    from bevctl.ops.kernels import rulebook as kernels

    shapes, maps = [shape], [ColumnMap(words, kernels.column_ends(words))]
    for window in windows:
        shapes.append(output_shape(shapes[-1], *window))
        words = kernels.coarsen(words, batch, shapes[-2], shapes[-1], *window)
        maps.append(ColumnMap(words, kernels.column_ends(words)))
    sizes = torch.stack([level.ends[-1] for level in maps]).tolist()
    levels = [
        Sites(kernels.list_sites(*level, size, cells), cells, batch, [level])
        for level, size, cells in zip(maps[1:], sizes[1:], shapes[1:], strict=True)
    ]
    return Sites(coords[: sizes[0]], shape, batch, maps[:1]), levels
