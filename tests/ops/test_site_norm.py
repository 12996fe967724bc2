"""Norm, shortcut and ReLU in one pass against BatchNorm; few sites; statistics of all ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional

from bevctl.ops import site_norm_torch
from bevctl.ops.site_norm import SiteNorm, share_statistics
from tests.ops.backends import BACKENDS, DEVICES, running

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def make_norm(channels: int) -> SiteNorm:
    """Parameters and running statistics that are not the initial ones."""
    norm = SiteNorm(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.bias.copy_(torch.linspace(-1.0, 0.5, channels))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(torch.linspace(-0.5, 2.0, channels))
    norm.running_var.copy_(torch.linspace(0.3, 3.0, channels))
    return norm


def expected(norm: SiteNorm, features: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    """torch's operations one after another; updates `norm`."""
    batch = norm.training and len(features) > 1
    assert norm.momentum is not None
    out = functional.batch_norm(
        features, norm.running_mean, norm.running_var, norm.weight, norm.bias, batch, norm.momentum, norm.eps
    )
    out = out if shortcut is None else out + shortcut
    return out.relu() if relu else out


def check(
    rows: int, channels: int, shortcut: bool, relu: bool, training: bool, dtype: torch.dtype, device: str
) -> None:
    """Result, gradients and running statistics against float64 of the same, rounded numbers."""
    generator = torch.Generator().manual_seed(rows)
    features = (torch.randn(rows, channels, generator=generator) * 3 + 5).to(dtype)
    other = torch.randn(rows, channels, generator=generator).to(dtype) if shortcut else None
    before_relu = expected(make_norm(channels).double().train(training), features.double(), other, relu=False)
    weights = torch.randn(rows, channels, generator=generator).to(dtype)
    # Rounding decides on which side of the ReLU a number near 0 lies.
    weights[before_relu.abs() < 10 * TOLERANCE[dtype]] = 0
    results = []
    for exact in (False, True):
        norm = make_norm(channels).train(training)
        kind, where = (torch.float64, "cpu") if exact else (dtype, device)
        norm = norm.to(where, torch.float64 if kind == torch.float64 else torch.float32)
        leaves = [value.to(where, kind).requires_grad_() for value in (features, other) if value is not None]
        inputs = (leaves[0], leaves[1] if shortcut else None)
        out = expected(norm, *inputs, relu) if exact else norm(*inputs, relu)
        assert out.dtype == kind
        gradients = torch.autograd.grad(out, [*leaves, norm.weight, norm.bias], weights.to(where, kind))
        assert exact or norm.num_batches_tracked == int(training and rows > 1)
        results.append([out, *gradients, norm.running_mean, norm.running_var])
    for found, exactly in zip(*results, strict=True):
        scale = float(exactly.detach().abs().max()) if exactly.numel() else 1.0
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.cpu().double(), exactly, rtol=tolerance, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", BACKENDS)
@given(
    rows=st.integers(0, 40), channels=st.integers(1, 20), shortcut=st.booleans(), relu=st.booleans(), mode=st.booleans()
)
@settings(max_examples=15)
def test_equals_batch_norm(name: str, rows: int, channels: int, shortcut: bool, relu: bool, mode: bool) -> None:
    with running(name, "cpu"):
        check(rows, channels, shortcut, relu, mode, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("rows", "channels"), [(1, 16), (2, 5), (1100, 17), (700, 128)])
def test_every_precision(rows: int, channels: int, name: str, device: str, dtype: torch.dtype) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    with running(name, device):
        check(rows, channels, True, True, True, dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_sites(dtype: torch.dtype) -> None:
    with running("triton", "cuda"):
        check(300_001, 32, True, True, True, dtype, "cuda")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_large_mean_does_not_drown_the_variance(name: str) -> None:
    """Squares of 1000 ± 0.1 less the square of the mean would leave nothing of 0.01 in float32."""
    features = 1000 + 0.1 * torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    with running(name, "cpu"):
        out = SiteNorm(3)(features)
    exact = features.double()
    wanted = (exact - exact.mean(0)) / (exact.var(0, unbiased=False) + 1e-3).sqrt()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_sites_use_running_statistics(rows: int, name: str) -> None:
    norm = make_norm(3)
    before = copy.deepcopy(norm.state_dict())
    features = torch.full((rows, 3), 2.0)
    with running(name, "cpu"):
        out = norm(features)
    torch.testing.assert_close(out, make_norm(3).eval()(features))
    for key in ("running_mean", "running_var"):
        assert torch.equal(norm.state_dict()[key], before[key])


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    features = torch.ones(4, 2)
    features[1, 0] = torch.nan
    with running(name, "cpu"):
        out = SiteNorm(2)(features, relu=True)
        from_shortcut = SiteNorm(2).eval()(torch.ones(4, 2), features, relu=True)
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()
    assert from_shortcut.isnan().sum() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_same_bits_twice_whatever_the_memory_format(name: str, device: str) -> None:
    features = torch.randn(600, 12, generator=torch.Generator().manual_seed(0)).to(device)
    variants = (features, features.T.contiguous().T, torch.cat([features, features], 1)[:, 12:], features)
    results = []
    with running(name, device):
        for variant in variants:
            leaf, norm = variant.detach().requires_grad_(), make_norm(12).to(device)
            out = norm(leaf, variant.detach(), relu=True)
            gradient = torch.arange(12.0, device=device).expand_as(out)
            results.append((out, *torch.autograd.grad(out, [leaf, norm.weight, norm.bias], gradient)))
    for other in results[3:] if name == "torch" else results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("number", [0, 1, 30])
def test_padding_does_not_count(number: int, name: str) -> None:
    """Rows after `count` change neither the statistics nor a gradient, as long as they get none."""
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(40, 4, generator=generator)
    weights = torch.randn(40, 4, generator=generator)
    weights[number:] = 0
    results = []
    for padded in (False, True):
        norm, rows = make_norm(4), 40 if padded else number
        leaf = features[:rows].clone().requires_grad_()
        with running(name, "cpu"):
            out = norm(leaf, relu=True, count=torch.tensor([number], dtype=torch.int32) if padded else None)
            gradients = torch.autograd.grad(out, [leaf, norm.weight, norm.bias], weights[:rows])
        results.append([out[:number], gradients[0][:number], *gradients[1:], norm.running_mean, norm.running_var])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(M, 3\), got \(4, 2\)"):
        SiteNorm(3)(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(5, 3\)"):
        SiteNorm(3)(torch.zeros(4, 3), torch.zeros(5, 3))


def test_moments_of_parts_merge_to_those_of_the_whole() -> None:
    features = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [site_norm_torch.moments(part) for part in (features[:7], features[7:7], features[7:])]
    merged = site_norm_torch.merge(torch.cat(parts))
    torch.testing.assert_close(merged, site_norm_torch.moments(features)[0])


def test_conversion_keeps_site_norms_and_their_names() -> None:
    model = nn.Sequential(SiteNorm(3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(2), SiteNorm(5)))
    before = model.state_dict()
    share_statistics(model)
    assert [type(m).__name__ for m in model.modules()][1:] == [
        "SiteNorm", "SyncBatchNorm", "Sequential", "SyncBatchNorm", "SiteNorm",
    ]  # fmt: skip
    assert all(m.synchronized for m in model.modules() if isinstance(m, SiteNorm))
    assert model.state_dict().keys() == before.keys()
    assert not SiteNorm(3).synchronized


SPLITS = [(5, 7), (0, 6), (1, 0), (1, 1), (0, 0)]
"""Sites of rank 0 and of rank 1."""


def _inputs(split: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Features and weights of the sum, of both ranks together."""
    generator = torch.Generator().manual_seed(sum(split))
    features = torch.randn(sum(split), 3, generator=generator)
    return features, torch.randn(sum(split), 3, generator=generator)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for name in BACKENDS:
        for split in SPLITS:
            norm = make_norm(3)
            share_statistics(nn.Sequential(norm))
            rows = slice(0, split[0]) if rank == 0 else slice(split[0], None)
            features, weights = (value[rows] for value in _inputs(split))
            features.requires_grad_()
            with running(name, "cpu"):
                out = norm(features, relu=True)
                (out * weights).sum().backward()
            gradients = [features.grad, norm.weight.grad, norm.bias.grad]
            found[name, split] = [out.detach(), *gradients, norm.running_mean, norm.running_var]
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def test_ranks_together_are_one_batch(tmp_path: Path) -> None:
    multiprocessing.start_processes(_rank, (tmp_path,), nprocs=2, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (name, split), first in ranks[0].items():
        second = ranks[1][name, split]
        features, weights = _inputs(split)
        norm = make_norm(3)
        out = expected(norm, features.requires_grad_(), None, True)
        wanted = torch.autograd.grad(out, [features, norm.weight, norm.bias], weights)
        torch.testing.assert_close(torch.cat([first[0], second[0]]), out.detach())
        torch.testing.assert_close(torch.cat([first[1], second[1]]), wanted[0], rtol=1e-4, atol=1e-5)
        for index in (1, 2):
            torch.testing.assert_close(first[index + 1] + second[index + 1], wanted[index], rtol=1e-4, atol=1e-5)
        for own in (first, second):
            torch.testing.assert_close(own[4], norm.running_mean)
            torch.testing.assert_close(own[5], norm.running_var)
