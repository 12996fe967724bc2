"""The sparse encoder against dense convolutions of the whole grid, sites being a mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.models.lidar import ConvNormAct, ResidualBlock, SparseEncoder
from bevctl.ops.rulebook import Triple, unravel
from bevctl.ops.site_norm import SiteNorm
from bevctl.ops.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d

SHAPE = (16, 8, 41)
CHANNELS = (4, 5, 6, 7)
FEATURES, OUT = 5, 3
STRIDES: list[tuple[Triple, Triple]] = [
    ((2, 2, 2), (1, 1, 1)),
    ((2, 2, 2), (1, 1, 1)),
    ((2, 2, 2), (1, 1, 0)),
    ((1, 1, 2), (0, 0, 0)),
]
"""Stride and padding of the four convolutions that make new sites."""


def dense(grid: Tensor, conv: nn.Module, stride: Triple | int = 1, padding: Triple | int = 1) -> Tensor:
    """Convolution of a whole (B, C, X, Y, Z) grid with the layer's kernel."""
    assert isinstance(conv, SubMConv3d | SparseConv3d)
    return F.conv3d(grid, conv.weight.permute(4, 3, 0, 1, 2), stride=stride, padding=padding)


def norm(grid: Tensor, mask: Tensor, layer: nn.Module) -> Tensor:
    """Batch norm with eps 1e-3 over what `mask` (B, 1, X, Y, Z) marks, 0 elsewhere."""
    assert isinstance(layer, SiteNorm)
    sites = grid.movedim(1, -1)[mask[:, 0] > 0]
    mean, var = layer.running_mean, layer.running_var
    if layer.training:
        mean, var = sites.mean(0), sites.var(0, unbiased=False)
    assert mean is not None
    assert var is not None
    scale = layer.weight / (var + 1e-3).sqrt()
    shift = layer.bias - mean * scale
    return (grid * scale.view(1, -1, 1, 1, 1) + shift.view(1, -1, 1, 1, 1)) * mask


def dense_encoder(encoder: SparseEncoder, grid: Tensor, mask: Tensor) -> Tensor:
    """(B, FEATURES, X, Y, Z) → (B, OUT · Z', X', Y')."""
    stem = encoder.conv_input
    x = norm(dense(grid, stem[0]), mask, stem[1]).relu()
    for stage, layers in enumerate(encoder.encoder_layers):
        for layer in layers:  # type: ignore[attr-defined]
            if isinstance(layer, ResidualBlock):
                y = norm(dense(x, layer.conv1), mask, layer.bn1).relu()
                x = (norm(dense(y, layer.conv2), mask, layer.bn2) + x).relu()
            else:
                x, mask = downsampled(x, mask, layer, *STRIDES[stage])
    x, _ = downsampled(x, mask, encoder.conv_out, *STRIDES[3])
    return x.permute(0, 1, 4, 2, 3).flatten(1, 2)


def downsampled(
    grid: Tensor, mask: Tensor, layer: ConvNormAct, stride: Triple, padding: Triple
) -> tuple[Tensor, Tensor]:
    """The result and its sites: cells whose window holds a site."""
    conv = layer[0]
    assert isinstance(conv, SparseConv3d)
    kernel = conv.weight.shape[:3]
    reached = F.conv3d(mask, torch.ones(1, 1, *kernel, dtype=mask.dtype), stride=stride, padding=padding)
    mask = (reached > 0).to(mask.dtype)
    return norm(dense(grid, conv, stride, padding), mask, layer[1]).relu(), mask


@pytest.fixture
def encoder() -> SparseEncoder:
    torch.manual_seed(0)
    made = SparseEncoder(FEATURES, CHANNELS, 1, OUT, SHAPE).double()
    for layer in made.modules():
        if isinstance(layer, SiteNorm):
            for values, low in ((layer.weight, 1.0), (layer.bias, 0.0), (layer.running_mean, -0.5)):
                assert values is not None
                nn.init.uniform_(values, low, low + 1)
            assert layer.running_var is not None
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return made


def sites_and_grid(share: float) -> tuple[SparseTensor, Tensor, Tensor]:
    """Random features at a share of the cells: sparse, as a grid, and its mask."""
    generator = torch.Generator().manual_seed(1)
    cells = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    coords = unravel(torch.randperm(cells, generator=generator)[: round(share * cells)], SHAPE)
    features = torch.randn(len(coords), FEATURES, dtype=torch.float64, generator=generator)
    b, x, y, z = coords.unbind(1)
    grid, mask = torch.zeros(2, FEATURES, *SHAPE, dtype=torch.float64), torch.zeros(2, 1, *SHAPE, dtype=torch.float64)
    grid[b, :, x, y, z], mask[b, :, x, y, z] = features, 1.0
    return SparseTensor.build(features, coords, SHAPE, 2), grid, mask


def gradients(encoder: SparseEncoder, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The result, and gradients of a weighted sum of it."""
    out = run()
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    return out.detach(), list(torch.autograd.grad((out * weights).sum(), list(encoder.parameters())))


@pytest.mark.parametrize("share", [1.0, 0.03])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_equals_dense_convolutions(encoder: SparseEncoder, share: float, training: bool) -> None:
    """With every cell a site, and with few; forward and the gradient of every parameter."""
    encoder.train(training)
    sparse, grid, mask = sites_and_grid(share)
    expected, expected_gradients = gradients(encoder, lambda: dense_encoder(encoder, grid, mask))
    found, found_gradients = gradients(encoder, lambda: encoder(sparse))
    assert (expected != 0).double().mean() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, ours, theirs in zip(dict(encoder.named_parameters()), found_gradients, expected_gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-7, atol=1e-7), name
