"""Boxes as the detection head regresses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CODE_SIZE = 10
CODE_WEIGHTS = (1.0,) * 8 + (0.2, 0.2)
"""Weight of each code in the box loss; velocity counts less."""


@dataclass(frozen=True)
class BevGrid:
    """The cells of a bird's-eye-view map; x is the first axis."""

    lower: tuple[float, float]
    """x, y of the first cell's outer corner, m."""
    cell: tuple[float, float]
    """Cell size in x and y, m."""
    shape: tuple[int, int]
    """Cells in x and y."""

    @property
    def upper(self) -> tuple[float, float]:
        """x, y of the last cell's outer corner, m."""
        return self.lower[0] + self.cell[0] * self.shape[0], self.lower[1] + self.cell[1] * self.shape[1]

    def to_cells(self, xy: Tensor) -> Tensor:
        """(..., 2) positions in m → in cells from the lower corner."""
        x, y = xy.unbind(-1)
        return torch.stack([(x - self.lower[0]) / self.cell[0], (y - self.lower[1]) / self.cell[1]], dim=-1)

    def to_metres(self, cells: Tensor) -> Tensor:
        """Inverse of `to_cells`."""
        x, y = cells.unbind(-1)
        return torch.stack([x * self.cell[0] + self.lower[0], y * self.cell[1] + self.lower[1]], dim=-1)


def encode(boxes: Tensor, grid: BevGrid) -> Tensor:
    """(..., 9) boxes → (..., 10) codes: x, y in cells, z of the gravity centre, log l, w, h, sin, cos of yaw, vx, vy.

    z, the sizes' logarithms and velocities are in m and m/s.
    """
    return torch.cat(
        [
            grid.to_cells(boxes[..., :2]),
            boxes[..., 2:3],
            boxes[..., 3:6].clamp(min=1e-3).log(),
            boxes[..., 6:7].sin(),
            boxes[..., 6:7].cos(),
            boxes[..., 7:9],
        ],
        dim=-1,
    )


def decode(codes: Tensor, grid: BevGrid) -> Tensor:
    """Inverse of `encode`."""
    return torch.cat(
        [
            grid.to_metres(codes[..., :2]),
            codes[..., 2:3],
            codes[..., 3:6].exp(),
            torch.atan2(codes[..., 6:7], codes[..., 7:8]),
            codes[..., 8:10],
        ],
        dim=-1,
    )
