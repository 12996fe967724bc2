"""A folded norm against the convolution and the norm one after the other, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from bevctl.ops.norm_fold import FixedNorm, fold_norm
from tests.ops.backends import BACKENDS, DEVICES, running

EPS = 1e-2


def draw(seed: int, channels: int, channels_in: int, kernel: int) -> tuple[Tensor, ...]:
    """Weight, factor, summand, mean, variance, in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, channels_in, kernel, kernel, generator=generator).double()
    factor, summand, mean = torch.randn(3, channels, generator=generator).double()
    return weight, factor, summand, mean, torch.rand(channels, generator=generator).double()


def plain(x: Tensor, weight: Tensor, factor: Tensor, summand: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    out = F.conv2d(x, weight)
    deviation = (variance + EPS).sqrt()[:, None, None]
    return (out - mean[:, None, None]) / deviation * factor[:, None, None] + summand[:, None, None]


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(("channels_in", "kernel"), [(3, 3), (300, 1), (5, 3)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_convolution_and_norm(name: str, device: str, channels_in: int, kernel: int, dtype: torch.dtype) -> None:
    values = draw(0, 4, channels_in, kernel)
    x = torch.randn(2, channels_in, 3, 3, generator=torch.Generator().manual_seed(1)).double()
    exact = [value.clone().requires_grad_(i < 3) for i, value in enumerate(values)]
    expected = plain(x, *exact)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    expected_gradients = torch.autograd.grad(expected, exact[:3], weights)
    single = torch.promote_types(dtype, torch.float32) if dtype == torch.float16 else dtype
    ours = [value.to(device, single).requires_grad_(i < 3) for i, value in enumerate(values)]
    with running(name, device):
        folded, shift = fold_norm(ours[0], FixedNorm(EPS, *ours[1:]), dtype)
        out = F.conv2d(x.to(device, single), folded.to(single), shift)
        gradients = torch.autograd.grad(out, ours[:3], weights.to(device, single))
    assert folded.dtype == dtype
    assert shift.dtype == single
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    for found, reference in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        scale = float(reference.detach().abs().max())
        torch.testing.assert_close(found.double().cpu() / scale, reference / scale, rtol=0, atol=tolerance)


@given(
    seed=st.integers(0, 99), channels=st.integers(1, 4), channels_in=st.integers(1, 5), kernel=st.sampled_from([1, 3])
)
@settings(max_examples=20, deadline=None)
def test_any_shape(seed: int, channels: int, channels_in: int, kernel: int) -> None:
    weight, *values = draw(seed, channels, channels_in, kernel)
    x = torch.randn(1, channels_in, 4, 3, generator=torch.Generator().manual_seed(seed)).double()
    folded, shift = fold_norm(weight, FixedNorm(EPS, *values), torch.float64)
    torch.testing.assert_close(F.conv2d(x, folded, shift), plain(x, weight, *values), rtol=1e-9, atol=1e-9)


def test_hand_made() -> None:
    """Variance 3 and eps 1 make a deviation of 2: 4 · 6 / 2 = 12, and 5 − 1 · 6 / 2 = 2."""
    one = torch.ones(1)
    folded, shift = fold_norm(4 * torch.ones(1, 1, 1, 1), FixedNorm(1.0, 6 * one, 5 * one, one, 3 * one), torch.float32)
    assert (folded.item(), shift.item()) == (12, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_factor_of_zero_still_learns(name: str, device: str) -> None:
    weight, factor, *others = (value.float().to(device) for value in draw(0, 3, 2, 1))
    factor = torch.zeros_like(factor).requires_grad_()
    with running(name, device):
        folded, _ = fold_norm(weight, FixedNorm(EPS, factor, *others), torch.float32)
        (gradient,) = torch.autograd.grad(folded.sum(), factor)
    assert not folded.any()
    torch.testing.assert_close(gradient, weight.sum((1, 2, 3)) / (others[2] + EPS).sqrt())
