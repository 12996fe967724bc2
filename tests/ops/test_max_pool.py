"""Max pooling against torch's, value by value and gradient by gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bevctl.ops.max_pool import max_pool
from tests.ops.backends import BACKENDS, DEVICES, running


def reference(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, 2, ceil_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("size", [(2, 3), (5, 4), (8, 7), (9, 12)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_torchs(name: str, device: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels = 5 if size[0] > 2 else 70  # fewer and more than a program holds
    x = torch.randn(2, channels, *size, device=device).round(decimals=1).to(dtype)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with running(name, device):
        found, expected = max_pool(leaves[0]), reference(leaves[1])
        weights = torch.randn(expected.shape, device=device).to(dtype)
        (gradient,) = torch.autograd.grad(found, leaves[0], weights)
    (expected_gradient,) = torch.autograd.grad(expected, leaves[1], weights)
    assert torch.equal(found, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_broken_values_show(name: str, device: str) -> None:
    x = torch.zeros(1, 1, 5, 5, device=device)
    x[0, 0, 2, 2], x[0, 0, 4, 4] = torch.nan, torch.inf
    with running(name, device):
        found = max_pool(x)
    assert found.isnan().sum() == 4
    lone = torch.full((1, 1, 3, 3), -torch.inf, device=device)
    with running(name, device):
        assert max_pool(lone).item() == -torch.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_of_equal_values_the_first_counts(name: str, device: str) -> None:
    x = torch.ones(1, 1, 3, 3, device=device, requires_grad=True)
    with running(name, device):
        max_pool(x).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1.0] + [0.0] * 8


def test_nothing_to_pool() -> None:
    assert max_pool(torch.zeros(0, 3, 8, 8)).shape == (0, 3, 4, 4)


def test_a_single_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2, got \(1, 1, 1, 4\)"):
        max_pool(torch.zeros(1, 1, 1, 4))
