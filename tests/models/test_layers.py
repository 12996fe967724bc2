from __future__ import annotations

import torch
from torch import Tensor, nn

from bevctl.models.layers import ConvBlock, recompute


class Counting(nn.Module):
    """A small network with statistics and random draws that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.layers(x)
        return out


def step(enabled: bool) -> tuple[Counting, Tensor]:
    torch.manual_seed(0)
    module = Counting()
    x = torch.randn(3, 2, 4, 4, requires_grad=True)
    recompute(module, x, enabled=enabled).square().sum().backward()
    assert x.grad is not None
    return module, x.grad


def test_recomputing_gives_the_same_gradients_statistics_and_draws() -> None:
    plain, plain_gradient = step(enabled=False)
    recomputed, gradient = step(enabled=True)
    assert (plain.runs, recomputed.runs) == (1, 2)
    assert torch.equal(gradient, plain_gradient)
    for ours, expected in zip(recomputed.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, expected)
    norm = recomputed.layers[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.momentum == 0.1
    assert int(recomputed.state_dict()["layers.1.num_batches_tracked"]) == 1


def test_nothing_is_recomputed_without_gradients() -> None:
    module = Counting()
    with torch.no_grad():
        recompute(module, torch.randn(3, 2, 4, 4), enabled=True)
    assert module.runs == 1


def test_conv_block_keeps_the_size() -> None:
    assert ConvBlock(2, 5, 3)(torch.randn(2, 2, 6, 7)).shape == (2, 5, 6, 7)
    assert ConvBlock(2, 5, 1, dims=1)(torch.randn(2, 2, 6)).shape == (2, 5, 6)
