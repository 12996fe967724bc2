"""Sparse convolution against torch's dense one, by hand, its gradients, on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from bevctl.ops.rulebook import Triple, output_shape, ravel, strided_rules, submanifold_rules, unravel
from bevctl.ops.site_norm import SiteNorm
from bevctl.ops.sites import Sites, Window
from bevctl.ops.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d, sparse_conv
from tests.ops.backends import BACKENDS, DEVICES, running

SHAPE = (5, 4, 6)
SUBMANIFOLD = Window((3, 3, 3), (1, 1, 1), (1, 1, 1))
STRIDED = [
    Window((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Window((3, 3, 3), (2, 2, 2), (1, 1, 0)),
    Window((1, 1, 3), (1, 1, 2), (0, 0, 0)),
    Window((2, 1, 3), (2, 1, 1), (0, 0, 2)),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def random_sites(seed: int, count: int, batch: int = 2, shape: Triple = SHAPE) -> Tensor:
    """Unique (b, x, y, z) rows in no particular order."""
    cells = batch * shape[0] * shape[1] * shape[2]
    generator = torch.Generator().manual_seed(seed)
    return unravel(torch.randperm(cells, generator=generator)[:count], shape)


def random_tensor(seed: int, count: int, channels: int = 3, dtype: torch.dtype = torch.float64) -> SparseTensor:
    features = torch.randn(count, channels, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return SparseTensor.build(features, random_sites(seed, count), SHAPE, 2)


def dense_conv(x: SparseTensor, weight: Tensor, stride: Triple, padding: Triple) -> Tensor:
    """torch's convolution of the whole grid; (B, Cout, X, Y, Z)."""
    return functional.conv3d(x.dense(), weight.permute(4, 3, 0, 1, 2), stride=stride, padding=padding)


def at_sites(grid: Tensor, coords: Tensor) -> Tensor:
    """(M, C) values of (B, C, X, Y, Z) at (M, 4) sites."""
    b, x, y, z = coords.unbind(1)
    return grid[b, :, x, y, z]


def check(
    window: Window, sites: Tensor, batch: int, channels: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    """Features and both gradients in `dtype` against the dense convolution of the same, rounded numbers in float64."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(len(sites), channels[0], dtype=torch.float64, generator=generator).to(dtype)
    weight = (torch.randn(*window.kernel, *channels, dtype=torch.float64, generator=generator) / 4).to(dtype)
    ours = SparseTensor.build(features.to(device), sites.to(device), SHAPE, batch)
    exact = SparseTensor.build(features.double(), sites, SHAPE, batch)
    if window == SUBMANIFOLD:
        out_sites, rules = ours.sites, ours.sites.submanifold_rules(window.kernel)
    else:
        out_sites, rules = ours.sites.strided_rules(window)
    leaves = [ours.features.requires_grad_(), weight.to(device).requires_grad_()]
    exact_leaves = [exact.features.requires_grad_(), weight.double().requires_grad_()]
    out = sparse_conv(leaves[0], leaves[1], rules)
    expected = at_sites(dense_conv(exact, exact_leaves[1], window.stride, window.padding), out_sites.coords.cpu())
    weights = torch.randn(expected.shape, generator=generator).to(dtype)
    found = [out, *torch.autograd.grad(out, leaves, weights.to(device))]
    wanted = [expected, *torch.autograd.grad(expected, exact_leaves, weights.double())]
    assert out.dtype == dtype
    for value, exactly in zip(found, wanted, strict=True):
        scale = float(exactly.detach().abs().max()) if exactly.numel() else 1.0
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(value.cpu().double(), exactly, rtol=tolerance, atol=tolerance * max(scale, 1.0))


CASES = {
    "seed": st.integers(0, 10_000),
    "count": st.integers(0, 60),
    "window": st.sampled_from([SUBMANIFOLD, *STRIDED]),
}


@given(**CASES)
@settings(max_examples=25)
def test_equals_dense_at_the_sites(seed: int, count: int, window: Window) -> None:
    with running("torch", "cpu"):
        check(window, random_sites(seed, count), 2, (3, 4), torch.float32, "cpu")


@given(**CASES)
@settings(max_examples=8)  # the interpreter is slow
def test_triton_equals_dense_at_the_sites(seed: int, count: int, window: Window) -> None:
    with running("triton", "cpu"):
        check(window, random_sites(seed, count), 2, (3, 4), torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [SUBMANIFOLD, STRIDED[1]])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_precision(window: Window, name: str, device: str, dtype: torch.dtype, batch: int) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    with running(name, device):
        check(window, random_sites(2, 53 * batch, batch), batch, (5, 17), dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("channels", [(1, 1), (130, 3), (33, 140)])
def test_channels_that_fill_no_block(channels: tuple[int, int], name: str, device: str) -> None:
    with running(name, device):
        check(SUBMANIFOLD, random_sites(3, 11), 2, channels, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", BACKENDS)
def test_many_tiles(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (60, 50, 40)
    monkeypatch.setitem(globals(), "SHAPE", shape)
    for window in (SUBMANIFOLD, STRIDED[0]):
        with running(name, "cuda"):
            check(window, random_sites(4, 30_000, 2, shape), 2, (64, 32), dtype, "cuda")


@given(seed=st.integers(0, 10_000), count=st.integers(0, 60), window=st.sampled_from(STRIDED))
@settings(max_examples=40)
def test_strided_equals_dense_everywhere(seed: int, count: int, window: Window) -> None:
    x = random_tensor(seed, count)
    conv = SparseConv3d(3, 4, *window).double()
    y = conv(x)
    assert y.shape == output_shape(SHAPE, *window)
    assert torch.equal(ravel(y.coords, y.shape), ravel(y.coords, y.shape).unique())
    torch.testing.assert_close(y.dense(), dense_conv(x, conv.weight, window.stride, window.padding))
    # A site exists exactly where a window holds an input site.
    ones = x.with_features(torch.ones_like(x.features))
    covered = dense_conv(ones, torch.ones_like(conv.weight), window.stride, window.padding)
    assert len(y.coords) == (covered[:, 0] > 0).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_same_bits_whatever_the_memory_format(name: str, device: str) -> None:
    x = random_tensor(5, 70, channels=6, dtype=torch.float32)
    weight = torch.randn(3, 3, 3, 6, 8, generator=torch.Generator().manual_seed(0)).to(device)
    features = x.features.to(device)
    wide = torch.cat([features, features], dim=1)[:, 6:]
    turned = features.T.contiguous().T
    results = []
    with running(name, device):
        rules = Sites(x.coords.to(device), SHAPE, 2).submanifold_rules((3, 3, 3))
        for variant in (features, wide, turned, features):
            leaves = variant.detach().requires_grad_(), weight.clone().requires_grad_()
            out = sparse_conv(*leaves, rules)
            gradient = torch.arange(8.0, device=device).expand_as(out)
            results.append((out, *torch.autograd.grad(out, leaves, gradient)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_result_of_a_norm_is_made_again_for_the_gradient() -> None:
    x = random_tensor(7, 40, channels=4, dtype=torch.float32)
    norm, first, second = SiteNorm(4), SubMConv3d(4, 4), SubMConv3d(4, 3)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    gradients = []
    for name in BACKENDS:
        kept.clear()
        with running(name, "cpu"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = first(x)
            normed = norm(y.features, relu=True)
            second(y.with_features(normed)).features.square().sum().backward()
        assert (normed.data_ptr() in kept) == (name == "torch")
        assert name == "torch" or y.features.data_ptr() in kept
        gradients.append([p.grad for module in (norm, first, second) for p in module.parameters()])
        for module in (norm, first, second):
            module.zero_grad(set_to_none=True)
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dense_is_channels_last_and_passes_gradients() -> None:
    x = random_tensor(6, 9)
    grid = x.with_features(x.features.requires_grad_()).dense()
    assert grid.permute(0, 1, 4, 2, 3).flatten(1, 2).is_contiguous(memory_format=torch.channels_last)
    weights = torch.randn(grid.shape, dtype=grid.dtype, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(grid, x.features, weights)
    assert torch.equal(gradient, at_sites(weights, x.coords))


def test_by_hand() -> None:
    # Two neighbours along x and one site far away; the kernel copies the row at the lower x.
    coords = torch.tensor([[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 3, 5]])
    x = SparseTensor.build(torch.tensor([[1.0], [10.0], [100.0]]), coords, SHAPE, 1)
    conv = SubMConv3d(1, 1)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 1, 1] = 2.0
    assert conv(x).features.tolist() == [[0.0], [2.0], [0.0]]

    strided = SparseConv3d(1, 1, (1, 1, 3), (1, 1, 2))
    with torch.no_grad():
        strided.weight.copy_(torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1, 1))
    y = strided(x)
    assert y.shape == (5, 4, 2)
    assert y.coords.tolist() == [[0, 1, 0, 0], [0, 2, 0, 0]]
    assert y.features.tolist() == [[1.0], [10.0]]


def test_neighbours_do_not_wrap_around_the_grid() -> None:
    """Sites at the end of one row, column or sample do not meet those at the start of the next."""
    coords = torch.tensor([[0, 0, 3, 5], [0, 1, 0, 0], [0, 3, 0, 5], [0, 3, 1, 0], [0, 4, 3, 5], [1, 0, 0, 0]])
    table = submanifold_rules(coords, SHAPE, (3, 3, 3)).table
    assert (table < len(coords)).sum() == len(coords)


@pytest.mark.parametrize("elements", [200, 1_000_000])
def test_gradients_piece_by_piece(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bevctl.ops.sparse_conv._piece_elements", lambda _: elements)
    x = random_tensor(1, 20, channels=2)
    submanifold = submanifold_rules(x.coords, SHAPE, (3, 3, 3))
    _, strided = strided_rules(x.coords, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 0))
    weight = torch.randn(3, 3, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    features = x.features.requires_grad_()
    for rules in (submanifold, strided):
        assert torch.autograd.gradcheck(lambda f, w, r=rules: sparse_conv(f, w, r), (features, weight))


def test_rules_are_shared_by_layers_on_the_same_sites() -> None:
    x = random_tensor(2, 30)
    y = SubMConv3d(3, 4).double()(x)
    assert y.sites.submanifold_rules((3, 3, 3)) is x.sites.submanifold_rules((3, 3, 3))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_sites_give_zero_gradients(name: str) -> None:
    x = SparseTensor.build(torch.empty(0, 3), torch.empty(0, 4, dtype=torch.int64), SHAPE, 2)
    first, second = SubMConv3d(3, 4), SparseConv3d(4, 5, (3, 3, 3), (2, 2, 2), (1, 1, 1))
    with running(name, "cpu"):
        dense = second(first(x)).dense()
        dense.sum().backward()
    assert dense.shape == (2, 5, 3, 2, 3)
    for conv in (first, second):
        assert conv.weight.grad is not None
        assert not conv.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_products_in_half(dtype: torch.dtype) -> None:
    x = random_tensor(3, 50, dtype=torch.float32)
    conv = SubMConv3d(3, 4)
    exact = conv(x).features
    with torch.autocast("cpu", dtype=dtype):
        y = conv(x).features
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)
    y.float().square().sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32
    half_grad, conv.weight.grad = conv.weight.grad, None
    exact.square().sum().backward()
    torch.testing.assert_close(half_grad, conv.weight.grad, rtol=0.05, atol=0.2)


def test_float32_weights_lift_half_features_without_autocast() -> None:
    x = random_tensor(3, 50, dtype=torch.float16)
    assert SubMConv3d(3, 4)(x).features.dtype == torch.float32


def test_a_huge_grid_costs_nothing() -> None:
    """10^14 cells: only sites are ever stored."""
    shape = (10**6, 10**6, 100)
    coords = torch.tensor([[0, 999_999, 999_999, 99], [1, 5, 5, 5], [1, 5, 5, 6]])
    x = SparseTensor.build(torch.ones(3, 2), coords, shape, 2)
    y = SparseConv3d(2, 3, (3, 3, 3), (2, 2, 2), (1, 1, 1))(SubMConv3d(2, 2)(x))
    assert y.coords.tolist()[0] == [0, 500_000 - 1, 500_000 - 1, 49]
    y.features.sum().backward()


@pytest.mark.parametrize("name", BACKENDS)
def test_half_sums_are_accumulated_in_float32(name: str) -> None:
    """2048 + 26 × 1 is 2048 when each addition is rounded to float16, whose spacing there is 2."""
    x = SparseTensor.build(torch.ones(27, 1), random_sites(0, 27, 1, (3, 3, 3)), (3, 3, 3), 1)
    weight = torch.ones(3, 3, 3, 1, 1)
    weight[0, 0, 0] = 2048.0
    with running(name, "cpu"), torch.autocast("cpu", dtype=torch.float16):
        y = sparse_conv(x.features, weight, x.sites.submanifold_rules((3, 3, 3)))
    middle = ravel(x.coords, x.shape).tolist().index(13)
    assert y[middle].item() == 2074.0


def test_wrong_shapes_are_named() -> None:
    x = random_tensor(4, 10)
    with pytest.raises(ValueError, match=r"got \(10, 3\) and \(9, 4\)"):
        SparseTensor.build(x.features, x.coords[:9], SHAPE, 2)
    rules = x.sites.submanifold_rules((3, 3, 3))
    with pytest.raises(ValueError, match=r"got \(3, 3, 3, 5, 2\)"):
        sparse_conv(x.features, torch.zeros(3, 3, 3, 5, 2), rules)
    with pytest.raises(ValueError, match="27 offsets and 10 sites"):
        sparse_conv(x.features, torch.zeros(1, 1, 3, 3, 2), rules)
    with pytest.raises(ValueError, match="must be odd"):
        SubMConv3d(3, 3, (2, 3, 3))
