from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops.backend import forced
from bevctl.ops.window_attention import (
    MASKED,
    from_windows,
    shift_mask,
    to_windows,
    window_attention,
    window_attention_reference,
)

pytest.importorskip("triton", minversion="3.3", reason="the kernels need Triton 3.3")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = [
    pytest.param((1, 4, 7), (2, 4), 3, 1, id="odd padding in both axes"),
    pytest.param((2, 6, 3), (1, 16), 3, 1, id="whole windows, shifted"),
    pytest.param((2, 5, 4), (3, 8), 3, 0, id="not shifted"),
    pytest.param((1, 2, 2), (2, 4), 4, 2, id="smaller than a window"),
    pytest.param((1, 7, 7), (1, 32), 7, 3, id="one window"),
    pytest.param((1, 9, 8), (2, 32), 7, 3, id="Swin-T's window and head"),
]


def inputs(
    size: tuple[int, int, int], heads: tuple[int, int], window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, padding, bias and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    count, width = heads
    channels = count * width

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    qkv, padding = draw(*size, 3 * channels).to(dtype), draw(3 * channels)
    return qkv, padding, draw(count, window**2, window**2), draw(*size, channels).to(dtype)


def result_and_gradients(
    choice: str, qkv: Tensor, padding: Tensor, bias: Tensor, grad: Tensor, window: int, shift: int
) -> list[Tensor]:
    qkv, padding, bias = (tensor.detach().clone().requires_grad_() for tensor in (qkv, padding, bias))
    with forced(choice):
        out = window_attention(qkv, padding, bias, window, shift)
    # A map of whole windows has no padding.
    gradients = torch.autograd.grad(out, (qkv, padding, bias), grad.to(out.dtype), materialize_grads=True)
    return [out.detach(), *gradients]


def relative_error(ours: Tensor, reference: Tensor) -> float:
    difference = (ours.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp(min=1e-6))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("size", "heads", "window", "shift"), SHAPES)
def test_kernel_equals_the_reference(
    size: tuple[int, int, int], heads: tuple[int, int], window: int, shift: int, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies BF16 wrongly")
    qkv, padding, bias, grad = inputs(size, heads, window, dtype)
    ours = result_and_gradients("triton", qkv, padding, bias, grad, window, shift)
    # The padding takes part with the precision of the map.
    reference = result_and_gradients(
        "torch", qkv.double(), padding.to(dtype).double(), bias.double(), grad.double(), window, shift
    )
    for result, expected in zip(ours, reference, strict=True):
        assert relative_error(result, expected) < TOLERANCE[dtype]


@settings(max_examples=8)
@given(
    batch=st.integers(1, 2),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    heads=st.integers(1, 3),
    window=st.integers(2, 4),
    shifted=st.booleans(),
)
def test_kernel_equals_the_reference_for_any_shape(
    batch: int, height: int, width: int, heads: int, window: int, shifted: bool
) -> None:
    shift = min(window // 2, height, width) if shifted else 0
    drawn = inputs((batch, height, width), (heads, 4), window, torch.float32)
    ours = result_and_gradients("triton", *drawn, window, shift)
    for result, expected in zip(ours, result_and_gradients("torch", *drawn, window, shift), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_two_neighbours_by_hand() -> None:
    """A map of one row and a window of two: each cell mixes the values of both with the weights of its logits."""
    query, key, value = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), torch.tensor([10.0, 20.0])
    bias = torch.zeros(1, 4, 4)
    bias[0, 0, 1] = 0.25
    bias[0, :, 2:] = -math.inf  # the row of padding below
    qkv = torch.stack([query, key, value], dim=-1).view(1, 1, 2, 3)
    out = window_attention_reference(qkv, torch.zeros(3), bias, 2, 0).flatten()
    first = torch.tensor([0.5, -1.0 + 0.25]).softmax(0) @ value
    second = torch.tensor([1.0, -2.0]).softmax(0) @ value
    torch.testing.assert_close(out, torch.stack([first, second]))


def test_padding_takes_part_as_keys_and_values() -> None:
    qkv = torch.tensor([0.0, 0.0, 8.0]).view(1, 1, 1, 3)
    padding = torch.tensor([7.0, 0.0, 4.0])
    out = window_attention(qkv, padding, torch.zeros(1, 4, 4), 2, 0)
    assert float(out) == pytest.approx((8 + 3 * 4) / 4)


def test_a_shift_moves_the_windows() -> None:
    """With equal logits a cell gets the mean over its window; the seam of the shift splits the last one."""
    values = torch.arange(16.0).view(1, 4, 4, 1)
    qkv = torch.cat([torch.zeros(1, 4, 4, 2), values], dim=-1)
    out = window_attention(qkv, torch.zeros(3), torch.zeros(1, 4, 4), 2, 1)[0, :, :, 0]
    assert float(out[1, 1]) == pytest.approx(float(values[0, 1:3, 1:3].mean()))
    assert float(out[0, 0]) == pytest.approx(0.0)
    assert float(out[0, 1]) == pytest.approx(1.5)


def test_gradients_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(1, 3, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    padding = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def attend(qkv: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
        return window_attention_reference(qkv, padding, bias, 2, 1)

    assert torch.autograd.gradcheck(attend, (qkv, padding, bias))


def test_strided_input() -> None:
    qkv, padding, bias, grad = inputs((1, 5, 4), (2, 4), 3, torch.float32)
    qkv, grad = (tensor.transpose(1, 2) for tensor in (qkv, grad))
    assert not qkv.is_contiguous()
    ours, expected = (result_and_gradients(choice, qkv, padding, bias, grad, 3, 1) for choice in ("triton", "torch"))
    for result, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


def test_kernel_repeats_to_the_bit() -> None:
    drawn = inputs((2, 9, 8), (2, 8), 3, torch.float16)
    first, second = (result_and_gradients("triton", *drawn, 3, 1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_windows_too_large_for_the_kernel_run_in_torch() -> None:
    drawn = inputs((1, 10, 4), (1, 4), 9, torch.float32)
    ours, expected = (result_and_gradients(choice, *drawn, 9, 4) for choice in ("triton", "torch"))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_an_empty_batch() -> None:
    qkv, padding, bias, _ = inputs((0, 4, 4), (1, 4), 2, torch.float32)
    with forced("triton"):
        assert window_attention(qkv, padding, bias, 2, 1).shape == (0, 4, 4, 4)


def test_operators_are_declared_as_they_behave() -> None:
    """Shapes and gradients under tracing, which torch.compile relies on."""
    from bevctl.ops.window_attention import _fused

    qkv, padding, bias, _ = inputs((1, 4, 5), (1, 4), 3, torch.float32)
    leaves = (qkv.requires_grad_(), padding.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(_fused, (*leaves, 3, 1), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("qkv", "padding", "bias", "message"),
    [
        ((1, 4, 4, 7), (7,), (1, 4, 4), "a multiple of the heads"),
        ((4, 4, 6), (6,), (1, 4, 4), r"\(B, H, W, 3·C\)"),
        ((1, 4, 4, 6), (6,), (1, 9, 9), r"bias \(heads, 4, 4\)"),
        ((1, 4, 4, 6), (5,), (1, 4, 4), r"padding must be \(6,\)"),
    ],
)
def test_shapes_that_do_not_belong_together(
    qkv: tuple[int, ...], padding: tuple[int, ...], bias: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        window_attention(torch.zeros(qkv), torch.zeros(padding), torch.zeros(bias), 2, 0)


def test_windows_round_trip() -> None:
    x = torch.arange(2 * 6 * 9 * 2.0).view(2, 6, 9, 2)
    windows = to_windows(x, 3)
    assert windows.shape == (2, 6, 9, 2)
    assert torch.equal(windows[0, 1].view(3, 3, 2), x[0, :3, 3:6])
    assert torch.equal(from_windows(windows, 6, 9), x)


def test_mask_of_a_map_of_one_window() -> None:
    mask = shift_mask(2, 2, 2, 1)
    assert mask.shape == (1, 4, 4)
    assert mask[0].tolist() == [[0.0 if i == j else MASKED for j in range(4)] for i in range(4)]
