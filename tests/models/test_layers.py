from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.engine.precision import keep_fp32
from bevctl.models.layers import ConvBlock, LayerNorm, Linear, is_plain, recompute, recomputed_when_saved


class Counting(nn.Module):
    """A small network with statistics and random draws that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.layers(x)
        return out


def step(enabled: bool) -> tuple[Counting, Tensor]:
    torch.manual_seed(0)
    module = Counting()
    x = torch.randn(3, 2, 4, 4, requires_grad=True)
    recompute(module, x, enabled=enabled).square().sum().backward()
    assert x.grad is not None
    return module, x.grad


def test_recomputing_gives_the_same_gradients_statistics_and_draws() -> None:
    plain, plain_gradient = step(enabled=False)
    recomputed, gradient = step(enabled=True)
    assert (plain.runs, recomputed.runs) == (1, 2)
    assert torch.equal(gradient, plain_gradient)
    for ours, expected in zip(recomputed.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, expected)
    norm = recomputed.layers[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.momentum == 0.1
    assert int(recomputed.state_dict()["layers.1.num_batches_tracked"]) == 1


def test_nothing_is_recomputed_without_gradients() -> None:
    module = Counting()
    with torch.no_grad():
        recompute(module, torch.randn(3, 2, 4, 4), enabled=True)
    assert module.runs == 1


def test_conv_block_keeps_the_size() -> None:
    assert ConvBlock(2, 5, 3)(torch.randn(2, 2, 6, 7)).shape == (2, 5, 6, 7)
    assert ConvBlock(2, 5, 1, dims=1)(torch.randn(2, 2, 6)).shape == (2, 5, 6)


def test_a_saved_tensor_is_let_go_and_computed_again() -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(1)
        return F.gelu(hidden)

    activated = F.gelu(hidden)
    with recomputed_when_saved(activated, compute):
        out = linear(activated)
    kept = weakref.ref(activated)
    del activated
    assert kept() is None
    found = torch.autograd.grad(out.square().sum(), (hidden, linear.weight))
    expected = torch.autograd.grad(linear(F.gelu(hidden)).square().sum(), (hidden, linear.weight))
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_saved_tensors_stay() -> None:
    x, factor = torch.randn(3, requires_grad=True), torch.randn(3)
    with recomputed_when_saved(torch.randn(3), lambda: torch.full((3,), torch.nan)):
        out = x * factor
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], factor)


def test_a_wrapped_or_hooked_module_is_not_plain() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert is_plain(first, second)
    handle = second.register_forward_hook(lambda *_: None)
    assert not is_plain(first, second)
    handle.remove()
    keep_fp32(nn.ModuleDict({"first": first}), ["first"], "cpu")
    assert not is_plain(first, second)


@pytest.mark.parametrize(("wide", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_layer_norm_under_autocast(wide: bool, expected: torch.dtype) -> None:
    norm, x = LayerNorm(4, wide), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    assert out.dtype == expected
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(out.float(), F.layer_norm(x, (4,)), rtol=1e-2, atol=1e-2)


def test_linear_is_torchs() -> None:
    torch.manual_seed(0)
    linear, x = Linear(3, 2), torch.randn(4, 3)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
