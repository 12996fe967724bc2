"""PETR's feature pyramid against sums written out in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.models.neck import CPFPN


def plain(neck: CPFPN, maps: list[Tensor]) -> Tensor:
    """A cell of a finer map reads the cell of the coarser one that its centre's corner falls into."""
    convs = [conv for conv in neck.lateral_convs if isinstance(conv, nn.Conv2d)]
    laterals = [F.conv2d(x, conv.weight, conv.bias) for conv, x in zip(convs, maps, strict=True)]
    merged = laterals[-1]
    for finer in reversed(laterals[:-1]):
        height, width = finer.shape[2:]
        rows = torch.arange(height) * merged.shape[2] // height
        columns = torch.arange(width) * merged.shape[3] // width
        merged = finer + merged[:, :, rows][:, :, :, columns]
    last = neck.fpn_convs[0]
    assert isinstance(last, nn.Conv2d)
    return F.conv2d(merged, last.weight, last.bias, padding=1)


def test_equals_the_sum_written_out() -> None:
    torch.manual_seed(0)
    neck = CPFPN((4, 6, 8), 5).double()
    for parameter in neck.parameters():
        nn.init.normal_(parameter)
    # Sizes that do not divide: a stage of the backbone rounds up.
    maps = [torch.randn(2, c, h, w, dtype=torch.float64) for c, h, w in ((4, 7, 10), (6, 4, 5), (8, 2, 3))]
    leaves = [x.clone().requires_grad_() for x in maps]
    found, expected = neck(leaves), plain(neck, leaves)
    assert found.shape == (2, 5, 7, 10)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [*leaves, *neck.parameters()]
    weights = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    )
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


def test_hand_made() -> None:
    """A coarse cell is added to the four fine cells below it, then each cell and its right neighbour are summed."""
    neck = CPFPN((1, 1), 1)
    for conv in neck.lateral_convs:
        assert isinstance(conv, nn.Conv2d)
        nn.init.constant_(conv.weight, 2.0)
    last = neck.fpn_convs[0]
    assert isinstance(last, nn.Conv2d)
    kernel = torch.zeros(3, 3)
    kernel[1, 1] = kernel[1, 2] = 1.0
    with torch.no_grad():
        last.weight.copy_(kernel)
    fine = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
    out = neck([fine, torch.tensor([[[[10.0, 100.0]]]])])
    merged = [[22.0, 24.0, 206.0], [28.0, 30.0, 212.0]]
    assert out.tolist() == [[[[a + b, b + c, c] for a, b, c in merged]]]


def test_has_the_published_number_of_parameters() -> None:
    assert sum(p.numel() for p in CPFPN((768, 1024), 256).parameters()) == 256 * (768 + 1024 + 2) + 256 * 256 * 9 + 256
