from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.backend import forced
from bevctl.ops.linear import linear, linear_reference

pytest.importorskip("triton", minversion="3.3", reason="the kernels need Triton 3.3")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def result_and_gradients(
    choice: str, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, grad: Tensor
) -> list[Tensor]:
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    with forced(choice):
        out = linear(x, weight, bias, dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), grad.to(dtype))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 4, 96), (2, 130, 3, 7), (400, 20)])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = draw(*shape), draw(130, shape[-1], seed=1), draw(130, seed=2)
    grad = draw(*shape[:-1], 130, seed=3)
    ours = result_and_gradients("triton", x, weight, bias, dtype, grad)
    x, weight, bias = (tensor.to(dtype).double() for tensor in (x, weight, bias))
    reference = result_and_gradients("torch", x, weight, bias, torch.float64, grad.to(dtype).double())
    assert [result.dtype for result in ours] == [dtype, torch.float32, torch.float32, torch.float32]
    for result, expected in zip(ours, reference, strict=True):
        assert float((result.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    weight, bias = torch.tensor([[1.0, -1.0]], device=DEVICE), torch.tensor([0.5], device=DEVICE)
    grad = torch.tensor([[10.0], [1.0]], device=DEVICE)
    for choice in ("torch", "triton"):
        out, x_grad, weight_grad, bias_grad = result_and_gradients(choice, x, weight, bias, torch.float32, grad)
        assert out.tolist() == [[-0.5], [-0.5]]
        assert x_grad.tolist() == [[10.0, -10.0], [1.0, -1.0]]
        assert weight_grad.tolist() == [[13.0, 24.0]]
        assert bias_grad.tolist() == [11.0]


@settings(max_examples=10)
@given(rows=st.integers(1, 200), columns=st.integers(1, 300))
def test_bias_gradient_for_any_shape(rows: int, columns: int) -> None:
    from bevctl.ops.kernels.linear import column_sums

    values = draw(rows, columns)
    torch.testing.assert_close(column_sums(values), values.sum(0), rtol=1e-4, atol=1e-4)


def test_strided_input_and_gradient() -> None:
    x, weight, bias, grad = draw(6, 4).T, draw(5, 6, seed=1), draw(5, seed=2), draw(5, 4, seed=3).T
    ours, expected = (result_and_gradients(c, x, weight, bias, torch.float32, grad) for c in ("triton", "torch"))
    for result, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_empty_input() -> None:
    with forced("triton"):
        assert linear(draw(0, 3), draw(2, 3), draw(2), torch.float16).shape == (0, 2)


def test_gradients_of_the_reference() -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_reference(x, weight, bias, torch.float64)

    leaves = tuple(tensor.double().requires_grad_() for tensor in (draw(2, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    assert torch.autograd.gradcheck(product, leaves)


def test_repeats_to_the_bit() -> None:
    drawn = draw(300, 20), draw(40, 20, seed=1), draw(40, seed=2), torch.float16, draw(300, 40, seed=3)
    first, second = (result_and_gradients("triton", *drawn) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
