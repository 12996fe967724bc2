"""The convolution of a spread image against the spread image convolved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from bevctl.ops.affine_conv import affine_relu_conv
from tests.ops.backends import BACKENDS, DEVICES, running


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, so that FP32 can be compared closely."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


Values = tuple[Tensor, Tensor, Tensor, Tensor]
"""Scale, shift, weight, bias."""


def parameters(seed: int, outs: int, channels: int, size: int) -> Values:
    """In float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return draw(channels), draw(channels), draw(outs, channels, size, size), draw(outs)


def as_leaves(values: Values, device: str, dtype: torch.dtype) -> Values:
    scale, shift, weight, bias = (value.detach().to(device, dtype).requires_grad_() for value in values)
    return scale, shift, weight, bias


def reference(image: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    spread = (image[:, None] * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).relu()
    return F.conv2d(spread, weight, bias, stride, weight.shape[2] // 2)


def check(image: Tensor, values: Values, stride: int, dtype: torch.dtype, device: str) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    exact = as_leaves(values, "cpu", torch.float64)
    expected = reference(image.double(), *exact, stride)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    expected_gradients = torch.autograd.grad(expected, exact, weights)

    single = torch.float64 if dtype == torch.float64 else torch.float32
    ours = as_leaves(values, device, single)
    with torch.autocast(device, dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
        out = affine_relu_conv(image.to(device), *ours, stride)
    assert out.dtype == dtype
    if out.numel() and dtype != torch.float64:  # cuDNN has no channels-last float64
        assert out.is_contiguous(memory_format=torch.channels_last)
    gradients = torch.autograd.grad(out, ours, weights.to(device, dtype))
    for found, exactly in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        largest = max(1.0, float(exactly.detach().abs().max())) if exactly.numel() else 1.0
        torch.testing.assert_close(found.cpu().double(), exactly, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("name", BACKENDS)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)),
    channels=st.integers(1, 3),
    size=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 4),
)
@settings(max_examples=10)
def test_equals_the_convolution(
    name: str, seed: int, shape: tuple[int, int, int], channels: int, size: int, stride: int
) -> None:
    image = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    with running(name, "cpu"):
        check(image, parameters(seed, 3, channels, size), stride, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_precision(name: str, device: str, dtype: torch.dtype) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    image = torch.randn(3, 21, 18, generator=torch.Generator().manual_seed(0))
    with running(name, device):
        check(image, parameters(0, 19, 8, 5), 4, dtype, device)


def test_by_hand() -> None:
    """Channels 2x - 1 and 1 - x of the pixels 0, 1, 3; a kernel that adds each channel's neighbours."""
    weight = (
        torch.tensor([[1.0, 0.0, 1.0], [10.0, 0.0, 10.0]])[:, None].expand(2, 3, 3)[None]
        * torch.tensor([0, 1, 0])[:, None]
    )
    out = affine_relu_conv(
        torch.tensor([[[0.0, 1.0, 3.0]]]), torch.tensor([2.0, -1.0]), torch.tensor([-1.0, 1.0]), weight,
        torch.tensor([100.0]), 1,
    )  # fmt: skip
    # Channels: 0, 1, 5 and 1, 0, 0.
    assert out.flatten().tolist() == [101.0, 115.0, 101.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_image(name: str, device: str) -> None:
    with running(name, device):
        check(torch.empty(0, 8, 8), parameters(0, 4, 2, 3), 2, torch.float32, device)


def test_gradients() -> None:
    image = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = as_leaves(parameters(0, 3, 2, 3), "cpu", torch.float64)
    assert torch.autograd.gradcheck(lambda a, b, w, c: affine_relu_conv(image, a, b, w, c, 2), values)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_twice(device: str) -> None:
    image = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)
    values = as_leaves(parameters(0, 8, 4, 3), device, torch.float32)
    results = []
    with running("triton", device):
        for _ in range(2):
            out = affine_relu_conv(image, *values, 2)
            results.append((out, *torch.autograd.grad(out.square().sum(), values)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_shows(name: str, device: str) -> None:
    scale, shift, weight, bias = (value.to(device).float() for value in parameters(0, 3, 2, 3))
    with running(name, device):
        out = affine_relu_conv(torch.ones(1, 4, 4, device=device), scale * torch.nan, shift, weight, bias, 1)
    assert out.isnan().all()


def test_wrong_shapes_are_named() -> None:
    scale, shift, weight, bias = parameters(0, 3, 2, 3)
    with pytest.raises(ValueError, match=r"got \(1, 1, 4, 4\)"):
        affine_relu_conv(torch.ones(1, 1, 4, 4), scale, shift, weight, bias, 1)
    with pytest.raises(ValueError, match="needs a gradient"):
        affine_relu_conv(torch.ones(1, 4, 4, requires_grad=True), scale, shift, weight, bias, 1)
