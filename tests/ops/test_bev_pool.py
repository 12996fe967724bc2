"""Lift-splat against the outer product, its gradients, its index, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bevctl.ops import backend
from bevctl.ops import bev_pool as module
from bevctl.ops.bev_pool import frustum_cells, index_points, lift_splat
from tests.ops.backends import BACKENDS, CUDA, DEVICES, running
from tests.waits import host_never_waits

Sizes = tuple[int, int, int, int, int]
"""B, N, h, w, D."""


def outer_product(logits: Tensor, cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """The whole outer product, added into the cells with one more for what lies outside."""
    bins, count = cells.shape[-1], grid[0] * grid[1]
    depth, context = logits[:, :, :bins].softmax(dim=2), logits[:, :, bins:]
    product = (depth[:, :, None] * context[:, :, :, None]).permute(0, 1, 4, 5, 3, 2)  # B, N, h, w, D, C
    row = torch.where(cells < 0, count, cells).long() + torch.arange(len(cells)).view(-1, 1, 1, 1, 1) * (count + 1)
    out = logits.new_zeros(len(cells) * (count + 1), context.shape[2])
    out = out.index_add(0, row.flatten(), product.flatten(0, 4))
    return out.view(len(cells), count + 1, context.shape[2])[:, :-1].permute(0, 2, 1).unflatten(2, grid)


def random_inputs(seed: int, sizes: Sizes, channels: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(B, N, D + C, h, w) float64 logits and context, (B, N, h, w, D) cells."""
    generator = torch.Generator().manual_seed(seed)
    batch, cameras, height, width, bins = sizes
    logits = torch.randn(batch, cameras, bins + channels, height, width, dtype=torch.float64, generator=generator)
    return logits, torch.randint(-1, grid[0] * grid[1], sizes, generator=generator)


def check(logits: Tensor, cells: Tensor, grid: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Sums and gradients in `dtype` against the outer product of the same, rounded numbers in float64."""
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    exact = logits.to(dtype).double().requires_grad_()
    expected = outer_product(exact, cells, grid)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    (expected_gradient,) = torch.autograd.grad(expected, exact, weights)

    ours = logits.to(device, dtype).requires_grad_()
    pooled = lift_splat(ours, index_points(cells.to(device), grid))
    assert pooled.dtype == dtype
    (gradient,) = torch.autograd.grad(pooled, ours, weights.to(device, dtype))
    for found, exactly in ((pooled, expected), (gradient, expected_gradient)):
        scale = float(exactly.detach().abs().max()) if exactly.numel() else 1.0
        torch.testing.assert_close(found.cpu().double(), exactly, rtol=tolerance, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", BACKENDS)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(*[st.integers(1, 3)] * 4, st.integers(1, 5)),
    channels=st.integers(1, 5),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=15)
def test_equals_the_outer_product(name: str, seed: int, sizes: Sizes, channels: int, grid: tuple[int, int]) -> None:
    logits, cells = random_inputs(seed, sizes, channels, grid)
    with running(name, "cpu"):
        check(logits, cells, grid, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_precision(name: str, device: str, dtype: torch.dtype, batch: int) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    logits, cells = random_inputs(0, (batch, 3, 5, 3, 17), 13, (7, 5))
    with running(name, device):
        check(logits, cells, (7, 5), dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cell", [-1, 0, 5])
def test_all_points_in_one_cell(name: str, device: str, cell: int) -> None:
    logits, cells = random_inputs(0, (2, 2, 5, 4, 9), 6, (2, 3))
    with running(name, device):
        check(logits, torch.full_like(cells, cell), (2, 3), torch.float32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 6, 2, 3, 4), (2, 0, 2, 3, 4)])
def test_no_sample_and_no_camera(name: str, device: str, sizes: Sizes) -> None:
    logits, cells = random_inputs(0, sizes, 3, (2, 2)) if sizes[0] else (torch.empty(0, 6, 7, 2, 3), torch.empty(sizes))
    with running(name, device):
        check(logits.double(), cells.long(), (2, 2), torch.float32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_memory_formats(name: str, device: str) -> None:
    """Channels-last, a slice of something larger, and a gradient that is not contiguous."""
    logits, cells = random_inputs(0, (2, 2, 3, 4, 5), 6, (3, 4))
    index = index_points(cells.to(device), (3, 4))
    dense = logits.to(device).float()
    sliced = torch.cat([dense, dense], dim=4)[..., 4:]
    last = dense.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    results = []
    with running(name, device):
        for variant in (dense, sliced, last):
            leaf = variant.detach().requires_grad_()
            pooled = lift_splat(leaf, index)
            assert pooled.is_contiguous(memory_format=torch.channels_last)
            gradient = torch.arange(12.0, device=device).view(4, 3).T.expand_as(pooled)
            results.append((pooled, *torch.autograd.grad(pooled, leaf, gradient)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_by_hand() -> None:
    # One pixel, three depth bins of weights 1/4, 1/4, 1/2: two in the cell (1, 0), one outside.
    logits = torch.tensor([0.25, 0.25, 0.5, 4.0, 8.0]).view(1, 1, 5, 1, 1)
    logits[:, :, :3].log_()
    out = lift_splat(logits, index_points(torch.tensor([2, 2, -1]).view(1, 1, 1, 1, 3), (2, 2)))
    torch.testing.assert_close(out, torch.tensor([[[[0.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [4.0, 0.0]]]]))


@pytest.mark.parametrize("pixels", [1, 3, 100])
def test_gradients(pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(count: int, _elements: int, _on_gpu: bool) -> Iterator[slice]:
        return (slice(first, min(first + pixels, count)) for first in range(0, count, pixels))

    monkeypatch.setattr(module, "_chunks", chunks)
    logits, cells = random_inputs(0, (2, 2, 2, 2, 3), 3, (2, 3))
    index = index_points(cells, (2, 3))
    assert torch.autograd.gradcheck(lambda x: lift_splat(x, index), logits.requires_grad_())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_summed_in_float32(name: str, device: str, dtype: torch.dtype) -> None:
    """2048 + 100 × 1 stays 2048 in float16, 256 + 100 × 1 stays 256 in bfloat16."""
    large = 2048.0 if dtype == torch.float16 else 256.0
    context = torch.cat([torch.tensor([large]), torch.ones(100)]).to(device, dtype).view(1, 1, 1, 1, 101)
    logits = torch.cat([torch.zeros_like(context), context], dim=2)
    index = index_points(torch.zeros(1, 1, 1, 101, 1, dtype=torch.int64, device=device), (1, 1))
    with running(name, device):
        assert lift_splat(logits, index).item() == large + 100


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_lies_outside_reaches_no_cell_and_gets_no_gradient(name: str, device: str) -> None:
    logits = torch.zeros(1, 1, 4, 2, 1, device=device)
    logits[:, :, 3:, 1] = torch.inf
    logits.requires_grad_()
    cells = torch.tensor([[0, 1, 8], [-1, -1, -1]], device=device).view(1, 1, 2, 1, 3)
    with running(name, device):
        out = lift_splat(logits, index_points(cells, (3, 3)))
        out.backward(torch.full_like(out, torch.inf))
    assert not out.any()
    assert logits.grad is not None
    assert not logits.grad[:, :, 3:, 1].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_shows_in_the_cells_of_its_pixel(name: str, device: str, value: float) -> None:
    logits = torch.ones(1, 1, 3, 1, 2, device=device)
    logits[0, 0, 0, 0, 0] = value
    cells = torch.tensor([[0, 1], [2, 3]], device=device).view(1, 1, 1, 2, 2)
    with running(name, device):
        out = lift_splat(logits, index_points(cells, (1, 4)))
    assert out.isnan().tolist() == [[[[True, True, False, False]]]]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


def test_the_outer_product_is_never_held() -> None:
    logits, cells = random_inputs(0, (1, 2, 16, 24, 32), 64, (20, 20))
    leaf = logits.float().requires_grad_()
    with LargestTensor() as largest:
        lift_splat(leaf, index_points(cells, (20, 20))).sum().backward()
    assert 0 < largest.elements < cells.numel() * 64 / 2.9


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BACKENDS)
def test_memory_is_a_fraction_of_the_outer_product(name: str, device: str) -> None:
    logits, cells = random_inputs(0, (1, 6, 32, 88, 118), 80, (360, 360))
    leaf, cells = logits.to(device).half().requires_grad_(), cells.to(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with running(name, device):
        lift_splat(leaf, index_points(cells, (360, 360))).sum().backward()
    outer_product_bytes = cells.numel() * 80 * 4
    assert torch.cuda.max_memory_allocated() - before < outer_product_bytes * (0.5 if name == "torch" else 0.25)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_twice(name: str, device: str) -> None:
    logits, cells = random_inputs(0, (2, 2, 5, 4, 20), 16, (4, 4))
    leaf = logits.to(device).float().requires_grad_()
    results = []
    with running(name, device):
        for _ in range(2):
            pooled = lift_splat(leaf, index_points(cells.to(device), (4, 4)))
            results.append((pooled, *torch.autograd.grad(pooled.square().sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BACKENDS)
def test_never_waits_for_the_device(name: str, device: str) -> None:
    logits, cells = random_inputs(0, (2, 2, 5, 4, 20), 16, (4, 4))
    leaf, cells = logits.to(device).float().requires_grad_(), cells.to(device)
    with running(name, device), host_never_waits():
        lift_splat(leaf, index_points(cells, (4, 4))).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


BOUNDS = (torch.tensor([-2.0, 0.0, -10.0]), torch.tensor([1.0, 0.5, 20.0]), torch.tensor([4, 3, 1]))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_cells_are_truncated_toward_zero(name: str, device: str) -> None:
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
    rays = torch.tensor(list(points), device=device).view(1, 1, 1, -1, 3)
    bounds = tuple(bound.to(device) for bound in BOUNDS)
    with running(name, device):
        found = frustum_cells(rays, rays.new_zeros(1, 1, 3), rays.new_ones(1), bounds)  # type: ignore[arg-type]
        exact = frustum_cells(rays, rays.new_zeros(1, 1, 3), rays.new_ones(1), bounds, truncate=False)  # type: ignore[arg-type]
    assert found.flatten().tolist() == list(points.values())
    low = bounds[0].tolist()
    inside = [all(coordinate >= bound for coordinate, bound in zip(point, low, strict=True)) for point in points]
    expected = [cell if kept else -1 for cell, kept in zip(points.values(), inside, strict=True)]
    assert exact.flatten().tolist() == expected != list(points.values())


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_both_backends_find_the_same_cells(device: str, truncate: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rays = torch.randn(2, 3, 4, 5, 3, generator=generator).to(device)
    origins, depths = torch.randn(2, 3, 3, generator=generator).to(device), torch.arange(0.1, 4.0, 0.05, device=device)
    bounds = tuple(bound.to(device) for bound in BOUNDS)
    with running("torch", device):
        expected = frustum_cells(rays, origins, depths, bounds, truncate)  # type: ignore[arg-type]
    with running("triton", device):
        found = frustum_cells(rays, origins, depths, bounds, truncate)  # type: ignore[arg-type]
    assert (expected >= 0).float().mean() > 0.1
    assert torch.equal(found, expected)


@given(seed=st.integers(0, 10_000), sizes=st.tuples(*[st.integers(0, 3)] * 5))
def test_the_index_lists_each_point_once_in_its_row(seed: int, sizes: Sizes) -> None:
    cells = torch.randint(-1, 6, sizes, generator=torch.Generator().manual_seed(seed))
    index = index_points(cells, (2, 3))
    assert index.order.sort().values.tolist() == list(range(cells.numel()))
    ends = [*index.starts.tolist()[1:], cells.numel()]
    for row in range(index.cells):
        points = index.order[index.starts[row] : ends[row]].tolist()
        sample, cell = divmod(row, 6)
        expected = (cells[sample].flatten() == cell).nonzero().flatten() + sample * cells[0].numel()
        assert points == expected.tolist()
    assert torch.equal(index.rows >= index.cells, cells < 0)


def test_wrong_shapes_are_named() -> None:
    logits, cells = random_inputs(0, (1, 2, 2, 2, 3), 3, (2, 2))
    index = index_points(cells, (2, 2))
    with pytest.raises(ValueError, match=r"\(1, 2, 3 \+ C, 2, 2\), got \(1, 1, 6, 2, 2\)"):
        lift_splat(logits[:, :1], index)
    with pytest.raises(ValueError, match=r"3 channels leave no context"):
        lift_splat(logits[:, :, :3], index)
    with pytest.raises(ValueError, match=r"got \(1, 2, 2, 2\)"):
        index_points(cells[..., 0], (2, 2))
    with pytest.raises(ValueError, match=r"got \(4, 3\) and \(4, 3\)"):
        frustum_cells(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(1), BOUNDS)


def test_float64_always_runs_in_torch() -> None:
    """Its sums are float64, which the kernels do not offer."""
    logits, cells = random_inputs(0, (1, 2, 2, 2, 3), 3, (2, 2))
    with backend.forced("triton"):
        check(logits, cells, (2, 2), torch.float64)
