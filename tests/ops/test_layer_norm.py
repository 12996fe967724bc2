from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.backend import forced
from bevctl.ops.layer_norm import layer_norm, layer_norm_reference, scaled_residual, scaled_residual_reference

pytest.importorskip("triton", minversion="3.3", reason="the kernels need Triton 3.3")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_and_gradients(choice: str, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    with forced(choice):
        out = layer_norm(x, weight, bias, EPS, dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), draw(*x.shape, seed=9).to(dtype))]


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-6))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 96), (2, 3, 5, 33), (300, 20)])
def test_norm_equals_the_reference(shape: tuple[int, ...], source: torch.dtype, dtype: torch.dtype) -> None:
    x, weight, bias = draw(*shape, dtype=source), draw(shape[-1], seed=1), draw(shape[-1], seed=2)
    ours = norm_and_gradients("triton", x, weight, bias, dtype)
    reference = norm_and_gradients("torch", x.double(), weight.double(), bias.double(), torch.float64)
    assert [result.dtype for result in ours] == [dtype, source, torch.float32, torch.float32]
    for result, expected in zip(ours, reference, strict=True):
        assert relative_error(result, expected) < max(TOLERANCE[dtype], TOLERANCE[source])


def test_norm_by_hand() -> None:
    out = layer_norm_reference(
        torch.tensor([[1.0, 3.0]]), torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.0]), 0.0, torch.float32
    )
    assert out.tolist() == [[-1.5, 1.0]]


def test_norm_of_half_precision_is_computed_in_single() -> None:
    """The squares of these values are beyond FP16's range."""
    x = torch.tensor([[300.0, -300.0, 500.0, -500.0]], dtype=torch.float16, device=DEVICE)
    for choice in ("torch", "triton"):
        with forced(choice):
            out = layer_norm(x, torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE), EPS, torch.float16)
        torch.testing.assert_close(out.float(), x.float() / x.float().std(unbiased=False), rtol=1e-3, atol=1e-3)


@settings(max_examples=15)
@given(rows=st.integers(1, 40), channels=st.integers(2, 70), offset=st.floats(-100, 100))
def test_norm_ignores_an_offset_of_the_row(rows: int, channels: int, offset: float) -> None:
    x, weight, bias = draw(rows, channels), draw(channels, seed=1), draw(channels, seed=2)
    with forced("triton"):
        out = layer_norm(x, weight, bias, EPS, torch.float32)
        moved = layer_norm(x + offset, weight, bias, EPS, torch.float32)
    torch.testing.assert_close(moved, out, rtol=2e-3, atol=2e-3)


def test_norm_of_strided_and_empty_input() -> None:
    weight, bias = draw(6, seed=1), draw(6, seed=2)
    x = draw(6, 4).T
    assert not x.is_contiguous()
    ours, expected = (norm_and_gradients(choice, x, weight, bias, torch.float32) for choice in ("triton", "torch"))
    for result, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    with forced("triton"):
        assert layer_norm(x[:0], weight, bias, EPS, torch.float16).shape == (0, 6)


def test_gradients_of_the_references() -> None:
    x, weight, bias = (draw(*shape).double().requires_grad_() for shape in ((3, 4), (4,), (4,)))
    assert torch.autograd.gradcheck(
        lambda x, w, b: layer_norm_reference(x, w, b, EPS, torch.float64), (x, weight, bias)
    )
    branch, scale = draw(3, 4, seed=1).double().requires_grad_(), torch.tensor([0.0, 1.25, 2.0], device=DEVICE)
    assert torch.autograd.gradcheck(lambda x, branch: scaled_residual_reference(x, branch, scale), (x, branch))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 7, 3), (3, 1100)])
def test_residual_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, branch, grad = draw(*shape), draw(*shape, dtype=dtype, seed=1), draw(*shape, seed=2)
    scale = draw(shape[0], seed=3)
    results = []
    for choice in ("triton", "torch"):
        leaves = x.clone().requires_grad_(), branch.clone().requires_grad_()
        with forced(choice):
            out = scaled_residual(*leaves, scale)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for result, expected in zip(*results, strict=True):
        assert result.dtype == expected.dtype
        assert relative_error(result, expected) < TOLERANCE[dtype]


def test_residual_of_a_dropped_sample_is_the_input() -> None:
    x, branch = draw(2, 3), draw(2, 3, seed=1)
    out = scaled_residual(x, branch, torch.tensor([0.0, 2.0], device=DEVICE))
    assert torch.equal(out[0], x[0])
    torch.testing.assert_close(out[1], x[1] + 2 * branch[1])


def test_kernels_repeat_to_the_bit() -> None:
    drawn = draw(300, 20), draw(20, seed=1), draw(20, seed=2)
    first, second = (norm_and_gradients("triton", *drawn, torch.float16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
