from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from bevctl.ops.resample import linear_weights, resample, resize, resize_samples


def test_weights_by_hand() -> None:
    weights = linear_weights(torch.tensor([0.0, 1.25, 2.0, -0.25, 2.5, 4.0]), 3)
    assert weights.tolist() == [[1, 0, 0], [0, 0.75, 0.25], [0, 0, 1], [0.75, 0, 0], [0, 0, 0.5], [0, 0, 0]]


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 12), st.integers(1, 12))
def test_resize_equals_torchs(height: int, width: int, new_height: int, new_width: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    expected = F.interpolate(x, size=(new_height, new_width), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize(x, (new_height, new_width)), expected, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 12), st.integers(1, 13))
def test_resizing_between_outer_samples_equals_torchs(height: int, width: int, new_height: int, new_width: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    expected = F.interpolate(x, (new_height, new_width), mode="bilinear", align_corners=True)
    torch.testing.assert_close(resize_samples(x, (new_height, new_width)), expected)


def test_resample_equals_grid_sample_with_zeros_beyond() -> None:
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    rows, columns = torch.linspace(-2, 6, 9, dtype=torch.float64), torch.linspace(-1.5, 7, 6, dtype=torch.float64)
    vertical, horizontal = torch.meshgrid((rows + 0.5) / 5 * 2 - 1, (columns + 0.5) / 7 * 2 - 1, indexing="ij")
    grid = torch.stack([horizontal, vertical], dim=-1).expand(2, -1, -1, -1)
    expected = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    found = resample(x, linear_weights(rows, 5), linear_weights(columns, 7))
    torch.testing.assert_close(found, expected)


def test_gradient() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda image: resize(image, (5, 6)), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 4, 4)
    found = resize(x.to(dtype), (8, 8))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), resize(x, (8, 8)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [(5, 6), (2, 3)])
def test_channels_last_gives_the_same_in_its_own_format(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    grad = torch.randn(2, 3, *size, dtype=torch.float64)
    results = []
    for image in (x, x.to(memory_format=torch.channels_last)):
        image = image.clone().requires_grad_()
        found = resize(image, size)
        results.append((found.detach(), *torch.autograd.grad(found, image, grad)))
    torch.testing.assert_close(results[1], results[0])
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)


def test_channels_last_gradient() -> None:
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    assert torch.autograd.gradcheck(lambda image: resize(image, (5, 6)), (x,))
