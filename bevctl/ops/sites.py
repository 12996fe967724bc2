"""Active cells of a sparse grid, and the rules of the convolutions that start there.

Where Triton runs, cells are looked up in a map of one word of bits a column of the grid; elsewhere, and for grids too
large or too high for that, by the search of `bevctl.ops.rulebook`. Rows and rules are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bevctl.ops.backend import use_triton
from bevctl.ops.rulebook import RuleBook, Triple, output_shape, strided_rules, submanifold_rules

_MAX_DEPTH = 60
"""Cells of a column, padding included, that have a bit in a non-negative int64."""
_MAX_COLUMNS = 2**28
"""Columns of all samples: 3 GiB of map."""
_SLACK, _STEP = 1.05, 4096


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


class Room:
    """Rows for the sites of each level of a plan, the same from step to step, so that tensors keep their shapes.

    A level that does not fit gets a little more than it needs.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def fit(self, sizes: Sequence[int]) -> list[int]:
        """Rows for levels of `sizes` sites."""
        rows = self.rows or [0] * len(sizes)
        enough = [-(-int(_SLACK * size) // _STEP) * _STEP for size in sizes]
        self.rows = [row if size <= row else more for size, row, more in zip(sizes, rows, enough, strict=True)]
        return self.rows


@dataclass(frozen=True)
class Sites:
    """Active cells of a batch of grids. Rules of submanifold convolutions are made once and shared."""

    coords: Tensor
    """(M, 4) int64 (b, x, y, z), unique, ascending; rows with b = -1 at the end are padding, and meet nothing."""
    shape: Triple
    """Cells along x, y, z."""
    batch: int
    """Samples; some may have no site."""
    map: ColumnMap | None = None
    """Of these sites, if it is there already."""
    window: Window | None = None
    """The strided convolution whose output sites are `coarser`, if there is a plan."""
    coarser: Sites | None = None

    def __len__(self) -> int:
        return len(self.coords)

    @property
    def count(self) -> Tensor | None:
        """(1,) int32 sites without the padding, on the device; None if there is none."""
        return None if self.map is None else self.map.ends[-1:]

    def without_rules(self) -> Sites:
        """The same sites and plan, for which rules are made anew."""
        return dataclasses.replace(self, coarser=self.coarser and self.coarser.without_rules())

    @functools.cached_property
    def _submanifold(self) -> dict[Triple, RuleBook]:
        return {}

    @functools.cached_property
    def _columns(self) -> ColumnMap:
        return self.map or _map(self.coords, self.shape, self.batch)

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
        sites = self.coarser if window == self.window else None
        if sites is None:
            sites = _chain(self.coords, self._columns, self.shape, self.batch, [window], None).coarser
            assert sites is not None
        return sites, RuleBook(self._neighbours(sites, window), len(self), mirrored=False)

    def _neighbours(self, outputs: Sites, window: Window) -> Tensor:
        """(outputs, K) table of rules."""
        from bevctl.ops.kernels import rulebook as kernels

        return kernels.neighbours(outputs.coords, *self._columns, len(self), self.shape, *window).T


def plan_sites(coords: Tensor, shape: Triple, batch: int, windows: Sequence[Window], room: Room | None = None) -> Sites:
    """Sites of (M, 4) ascending coordinates, and of strided convolutions that follow one after another.

    Rows of `coords` with b = -1 at the end are padding, and left out; with a `room`, every level is padded to its
    rows. Where Triton runs, the host waits for the GPU once, to read the numbers of all sites. Elsewhere only the
    first sites are made, and there is no padding.
    """
    if not _mapped(coords, shape, batch, windows):
        return Sites(coords[: int((coords[:, 0] >= 0).sum())], shape, batch)
    return _chain(coords, _map(coords, shape, batch), shape, batch, windows, room)


def _mapped(coords: Tensor, shape: Triple, batch: int, windows: Sequence[Window]) -> bool:
    """Whether a map of columns serves these convolutions."""
    depth = shape[2] + max((window.padding[2] for window in windows), default=0)
    return use_triton(coords) and depth <= _MAX_DEPTH and batch * shape[0] * shape[1] <= _MAX_COLUMNS


def _map(coords: Tensor, shape: Triple, batch: int) -> ColumnMap:
    from bevctl.ops.kernels import rulebook as kernels

    words = kernels.mark(coords, shape, batch)
    return ColumnMap(words, kernels.column_ends(words))


def _chain(
    coords: Tensor, columns: ColumnMap, shape: Triple, batch: int, windows: Sequence[Window], room: Room | None
) -> Sites:
    """The sites of `coords`, whose map is given, linked to those of each of the strided convolutions that follow."""
    from bevctl.ops.kernels import rulebook as kernels

    shapes, maps = [shape], [columns]
    for window in windows:
        shapes.append(output_shape(shapes[-1], *window))
        words = kernels.coarsen(maps[-1].words, batch, shapes[-2], shapes[-1], *window)
        maps.append(ColumnMap(words, kernels.column_ends(words)))
    sizes = torch.stack([level.ends[-1] for level in maps]).tolist()
    rows = sizes if room is None else room.fit(sizes)
    coarser = None
    for level in range(len(windows), 0, -1):
        listed = kernels.list_sites(*maps[level], sizes[level], rows[level], shapes[level])
        following = windows[level] if level < len(windows) else None
        coarser = Sites(listed, shapes[level], batch, maps[level], following, coarser)
    return Sites(fit_rows(coords, rows[0], -1), shape, batch, columns, windows[0] if windows else None, coarser)


def fit_rows(tensor: Tensor, rows: int, value: float) -> Tensor:
    """The first rows of a (M, C) tensor, or all and more rows of `value`."""
    return tensor[:rows] if rows <= len(tensor) else functional.pad(tensor, (0, 0, 0, rows - len(tensor)), value=value)
