"""How the map head samples its input, and its loss."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevctl.config.schema import MapHeadConfig
from bevctl.models.box_coder import BevGrid
from bevctl.models.map_head import MapHead
from tests.models.nano import nano_batch, nano_config

DETECTION_GRID = BevGrid(lower=(-54.0, -54.0), cell=(0.6, 0.6), shape=(180, 180))
MAP_GRID = BevGrid(lower=(-51.2, -51.2), cell=(0.8, 0.8), shape=(128, 128))
OBLONG_GRID = BevGrid(lower=(-30.0, -54.0), cell=(0.5, 0.75), shape=(100, 140))
"""Ends inside the output's range in x: sampling beyond it gives zero."""


@pytest.mark.parametrize("grid", [DETECTION_GRID, MAP_GRID, OBLONG_GRID])
def test_sampling_is_bilinear_at_the_output_cells(grid: BevGrid) -> None:
    """±50 m in cells of 0.5 m; positions go to -1..1 over the input's extent, x along the first axis."""
    bev = torch.randn(1, 2, *grid.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centres = np.arange(-50, 50, 0.5) + 0.25
    x, y = (
        torch.from_numpy(2 * (centres - low) / (high - low) - 1)
        for low, high in zip(grid.lower, grid.upper, strict=True)
    )
    # grid_sample wants (last axis, first axis)
    places = torch.stack([y[None].expand(200, 200), x[:, None].expand(200, 200)], dim=-1)[None]
    expected = F.grid_sample(bev, places, mode="bilinear", padding_mode="zeros", align_corners=False)
    head = MapHead(MapHeadConfig(), 2, ("road",), grid)
    head.classifier = nn.Sequential(nn.Identity())
    # Positions on the map are float32: off by 1e-5 cells.
    torch.testing.assert_close(head(bev), expected.float(), rtol=0, atol=2e-4)


def test_focal_loss_of_each_class() -> None:
    """(1 - p)² times cross entropy, no weight on either side, mean over the samples with a map and their cells."""
    generator = np.random.default_rng(0)
    logits, targets = generator.normal(scale=3, size=(3, 2, 12, 12)), generator.integers(0, 2, size=(3, 2, 12, 12))
    p = 1 / (1 + np.exp(-logits))
    right = np.where(targets == 1, p, 1 - p)
    expected = (-((1 - right) ** 2) * np.log(right))[:2].mean(axis=(0, 2, 3))
    head = MapHead(MapHeadConfig(), 2, ("road", "kerb"), MAP_GRID)
    batch = dataclasses.replace(
        nano_batch(nano_config(), batch=3),
        bev_map=torch.from_numpy(targets).float(),
        has_map=torch.tensor([True, True, False]),
    )
    losses = head.loss(torch.from_numpy(logits).float(), batch)
    assert list(losses) == ["loss/map/road/focal", "loss/map/kerb/focal"]
    np.testing.assert_allclose([float(loss) for loss in losses.values()], expected, rtol=1e-5)
