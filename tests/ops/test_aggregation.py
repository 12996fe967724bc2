"""One-shot aggregation, its kernels and its plain twin, against sums written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from bevctl.ops import aggregation
from bevctl.ops.aggregation import gated, one_shot_aggregation, shifted_relu_conv
from tests.ops.backends import BACKENDS, DEVICES, running

DTYPES = [torch.float64, torch.float32, torch.float16]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, so that FP32 can be compared closely."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random values that half precision holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).half().double() / 2 for shape in shapes]


def plain_aggregation(x: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    parts = [x]
    for weight, shift in zip(weights[:-1], shifts[:-1], strict=True):
        parts.append(F.relu(F.conv2d(parts[-1], weight, shift, padding=1)))
    out = F.relu(F.conv2d(torch.cat(parts, 1), weights[-1], shifts[-1]))
    return out, out.mean((2, 3))


def aggregation_inputs(seed: int, batch: int, size: tuple[int, int], layers: int, channels: int = 6) -> list[Tensor]:
    """x, weights, shifts."""
    inner, outer = 5, 7
    kernels = [(inner, inner if i else channels, 3, 3) for i in range(layers)]
    kernels.append((outer, channels + layers * inner, 1, 1))
    return draw(seed, (batch, channels, *size), *kernels, *((shape[0],) for shape in kernels))


def called(inputs: Sequence[Tensor], function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    count = len(inputs) // 2
    return function(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = draw(9, *(tuple(out.shape) for out in outputs))
    return list(torch.autograd.grad(outputs, inputs, [w.to(o) for w, o in zip(weights, outputs, strict=True)]))


def leaves(values: Sequence[Tensor], device: str, dtype: torch.dtype, narrow: int) -> list[Tensor]:
    """The first `narrow` of `dtype`, the others of float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return [v.to(device, dtype if i < narrow else wide).requires_grad_() for i, v in enumerate(values)]


def agree(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    for ours, exact in zip(found, expected, strict=True):
        scale = float(exact.detach().abs().max()) + 1e-6
        torch.testing.assert_close(ours.double().cpu() / scale, exact / scale, rtol=0, atol=TOLERANCE[dtype])


def on_each(function: Any) -> Any:
    for mark in (
        pytest.mark.parametrize("dtype", DTYPES),
        pytest.mark.parametrize("device", DEVICES),
        pytest.mark.parametrize("name", BACKENDS),
    ):
        function = mark(function)
    return function


@on_each
def test_aggregation(name: str, device: str, dtype: torch.dtype) -> None:
    inputs = aggregation_inputs(0, 2, (5, 4), layers=3)
    exact = [value.clone().requires_grad_() for value in inputs]
    expected = called(exact, plain_aggregation)
    with running(name, device):
        ours = leaves(inputs, device, dtype, narrow=5)
        out, means = called(ours, one_shot_aggregation)
        assert out.dtype == dtype
        assert means.dtype == torch.promote_types(dtype, torch.float32)
        agree([out, means], expected, dtype)
        agree(gradients([out, means], ours), gradients(expected, exact), dtype)


@on_each
def test_convolution(name: str, device: str, dtype: torch.dtype) -> None:
    for stride, kernel, size in ((1, 3, (5, 4)), (2, 3, (7, 6)), (1, 1, (3, 3))):
        inputs = draw(1, (2, 3, *size), (4, 3, kernel, kernel), (4,))
        exact = [value.clone().requires_grad_() for value in inputs]
        expected = F.relu(F.conv2d(exact[0], exact[1], exact[2], stride, kernel // 2))
        with running(name, device):
            ours = leaves(inputs, device, dtype, narrow=2)
            out = shifted_relu_conv(ours[0], ours[1], ours[2], stride)
            agree([out], [expected], dtype)
            agree(gradients([out], ours), gradients([expected], exact), dtype)


@pytest.mark.parametrize("with_sum", [False, True])
@on_each
def test_gates(name: str, device: str, dtype: torch.dtype, with_sum: bool) -> None:
    values, added, gates = draw(2, (2, 70, 5, 4), (2, 70, 5, 4), (2, 70))
    chosen = [values, added, gates] if with_sum else [values, gates]
    exact = [value.clone().requires_grad_() for value in chosen]
    expected = exact[0] * exact[-1][:, :, None, None] + (exact[1] if with_sum else 0)
    with running(name, device):
        ours = leaves(chosen, device, dtype, narrow=len(chosen) - 1)
        out = gated(ours[0], ours[-1], ours[1] if with_sum else None)
        assert out.dtype == dtype
        agree([out], [expected], dtype)
        agree(gradients([out], ours), gradients([expected], exact), dtype)


@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 2),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layers=st.integers(1, 2),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(seed: int, batch: int, size: tuple[int, int], layers: int) -> None:
    inputs = aggregation_inputs(seed, batch, size, layers)
    expected = called([value.clone() for value in inputs], plain_aggregation)
    agree(called(inputs, one_shot_aggregation), expected, torch.float64)


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("device", DEVICES)
def test_maps_of_one_row_or_column(device: str, size: tuple[int, int]) -> None:
    inputs = aggregation_inputs(6, 3, size, layers=2)
    exact = [value.clone().requires_grad_() for value in inputs]
    expected = called(exact, plain_aggregation)
    with running("triton", device):
        ours = leaves(inputs, device, torch.float32, narrow=4)
        found = called(ours, one_shot_aggregation)
        agree(found, expected, torch.float32)
        # As the gradient of a map of one position often lies in memory.
        grads = [torch.ones_like(x, memory_format=torch.contiguous_format) for x in found]
        gradient = torch.autograd.grad(found, ours, grads)
    agree(gradient, torch.autograd.grad(expected, exact, [torch.ones_like(x) for x in expected]), torch.float32)


def test_hand_made() -> None:
    """One channel, one layer: a chain 2 → relu(2·3 − 1) = 5; together 2·1 + 5·(−1) + 4 = 1 and −2·1 + 4 = 2."""
    x = torch.tensor([[[[2.0, -2.0]]]])
    weights = [torch.zeros(1, 1, 3, 3), torch.tensor([[[[1.0]], [[-1.0]]]])]
    weights[0][0, 0, 1, 1] = 3.0
    out, means = one_shot_aggregation(x, weights, [torch.tensor([-1.0]), torch.tensor([4.0])])
    assert out.flatten().tolist() == [1.0, 2.0]
    assert means.tolist() == [[1.5]]
    assert gated(out, torch.tensor([[0.5]]), x).flatten().tolist() == [2.5, -1.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_nan_is_passed_on(name: str, device: str) -> None:
    inputs = [value.float().to(device) for value in aggregation_inputs(3, 1, (2, 2), layers=1)]
    inputs[0][0, 0, 0, 0] = torch.nan
    with running(name, device):
        out, means = called(inputs, one_shot_aggregation)
    assert out.isnan().any()
    assert means.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_frozen_weights_get_no_gradient(name: str, device: str) -> None:
    inputs = [value.float().to(device) for value in aggregation_inputs(4, 1, (2, 3), layers=2)]
    inputs[2].requires_grad_()
    with running(name, device):
        out, _ = called(inputs, one_shot_aggregation)
        out.sum().backward()
    assert inputs[2].grad is not None
    assert all(value.grad is None for i, value in enumerate(inputs) if i != 2)


def test_kernels_keep_each_result_once() -> None:
    """Beside weights, the graph holds the input, each layer's result and the output: not the concatenated map."""
    inputs = leaves(aggregation_inputs(5, 1, (4, 4), layers=3), "cpu", torch.float32, narrow=5)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 4:
            held[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with running("triton", "cpu"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        called(inputs, one_shot_aggregation)
    assert sorted(held.values()) == sorted([16 * c for c in (6, 5, 5, 5, 7)])


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    inputs = aggregation_inputs(0, 1, (2, 2), layers=2)
    with pytest.raises(ValueError, match=r"the last weight must be \(O, 11, 1, 1\)"):
        aggregation.one_shot_aggregation(inputs[0], inputs[1:3], inputs[3:5])
