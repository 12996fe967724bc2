"""Splatting against the outer product and a loop, its gradients, and what it keeps in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bevctl.ops import bev_pool as module
from bevctl.ops.bev_pool import bev_cells, bev_pool


def loop_reference(depth: Tensor, context: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """The whole outer product, added point by point."""
    product = depth[:, :, None] * context[:, :, :, None]
    out = product.new_zeros(len(depth), context.shape[2], shape[0] * shape[1])
    for b, n, d, h, w in torch.cartesian_prod(*(torch.arange(size) for size in depth.shape)).tolist():
        if cells[b, n, d, h, w] >= 0:
            out[b, :, cells[b, n, d, h, w]] += product[b, n, :, d, h, w]
    return out.view(len(depth), -1, *shape)


def random_inputs(
    seed: int, sizes: tuple[int, int, int, int, int], channels: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, cameras, _, height, width = sizes
    depth = torch.rand(sizes, dtype=torch.float64, generator=generator)
    context = torch.randn(batch, cameras, channels, height, width, dtype=torch.float64, generator=generator)
    cells = torch.randint(-1, shape[0] * shape[1], sizes, generator=generator)
    return depth, context, cells


@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(*[st.integers(1, 3)] * 5),
    channels=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=30, deadline=None)
def test_equals_the_loop(
    seed: int, sizes: tuple[int, int, int, int, int], channels: int, shape: tuple[int, int]
) -> None:
    depth, context, cells = random_inputs(seed, sizes, channels, shape)
    expected = loop_reference(depth, context, cells, shape)
    torch.testing.assert_close(bev_pool(depth, context, cells, shape), expected)


def test_by_hand() -> None:
    # One pixel, three depth bins: two in the cell (1, 0), one outside.
    depth = torch.tensor([0.25, 0.25, 0.5]).view(1, 1, 3, 1, 1)
    context = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1, 1)
    cells = torch.tensor([2, 2, -1]).view(1, 1, 3, 1, 1)
    out = bev_pool(depth, context, cells, (2, 2))
    assert out.tolist() == [[[[0.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [4.0, 0.0]]]]


@pytest.mark.parametrize("bins", [1, 2, 100])
def test_gradients(bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(depth: Tensor, _channels: int) -> list[slice]:
        return [slice(first, first + bins) for first in range(0, depth.shape[2], bins)]

    monkeypatch.setattr(module, "_chunks", chunks)
    depth, context, cells = random_inputs(0, (2, 2, 3, 2, 2), 3, (2, 3))
    inputs = (depth.requires_grad_(), context.requires_grad_())
    assert torch.autograd.gradcheck(lambda d, c: bev_pool(d, c, cells, (2, 3)), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    """2048 + 100 × 1 stays 2048 in float16, 256 + 100 × 1 stays 256 in bfloat16."""
    large = 2048.0 if dtype == torch.float16 else 256.0
    depth = torch.cat([torch.tensor([large]), torch.ones(100)]).to(dtype).view(1, 1, 101, 1, 1).requires_grad_()
    context = torch.ones(1, 1, 1, 1, 1, dtype=dtype, requires_grad=True)
    out = bev_pool(depth, context, torch.zeros(1, 1, 101, 1, 1, dtype=torch.int64), (1, 1))
    assert out.dtype == torch.float32
    assert out.item() == large + 100
    out.sum().backward()
    assert depth.grad is not None
    assert context.grad is not None
    assert depth.grad.dtype == context.grad.dtype == dtype


def test_what_lies_outside_reaches_no_cell() -> None:
    depth = torch.ones(1, 1, 2, 1, 1)
    context = torch.full((1, 1, 1, 1, 1), torch.inf)
    cells = torch.full((1, 1, 2, 1, 1), -1)
    assert not bev_pool(depth, context, cells, (3, 3)).any()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


def test_the_outer_product_is_never_held() -> None:
    depth = torch.rand(1, 2, 32, 16, 24, requires_grad=True)
    context = torch.randn(1, 2, 64, 16, 24, requires_grad=True)
    cells = torch.randint(-1, 400, depth.shape)
    outer_product = depth.numel() * context.shape[2]
    with LargestTensor() as largest:
        bev_pool(depth, context, cells, (20, 20)).sum().backward()
    assert 0 < largest.elements < outer_product / 1.4


def test_cells_are_truncated_toward_zero() -> None:
    low, size, counts = torch.tensor([-2.0, 0.0, -10.0]), torch.tensor([1.0, 0.5, 20.0]), torch.tensor([4, 3, 1])
    points = {
        (-2.0, 0.0, 0.0): 0,
        (-2.9, -0.4, -29.9): 0,
        (-3.0, 0.0, 0.0): -1,
        (0.5, 0.9, 9.9): 2 * 3 + 1,
        (1.9, 1.4, 0.0): 3 * 3 + 2,
        (2.0, 0.0, 0.0): -1,
        (0.0, 1.5, 0.0): -1,
        (0.0, 0.0, 10.0): -1,
        (0.0, 0.0, -30.0): -1,
        (float("nan"), 0.0, 0.0): -1,
        (1e30, 0.0, 0.0): -1,
    }
    found = bev_cells(torch.tensor(list(points)), low, size, counts)
    assert found.tolist() == list(points.values())


def test_wrong_shapes_are_named() -> None:
    depth, context, cells = random_inputs(0, (1, 2, 3, 2, 2), 3, (2, 2))
    with pytest.raises(ValueError, match=r"got \(1, 2, 3, 2, 2\), \(1, 2, 2, 2, 2\)"):
        bev_pool(depth, context, cells[:, :, :2], (2, 2))
    with pytest.raises(ValueError, match=r"\(1, 1, 3, 2, 2\)"):
        bev_pool(depth, context[:, :1], cells, (2, 2))
    with pytest.raises(ValueError, match=r"got \(4, 2\)"):
        bev_cells(torch.zeros(4, 2), torch.zeros(3), torch.ones(3), torch.ones(3))
