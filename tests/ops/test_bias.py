"""The convolution with its own bias gradient against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevctl.ops.bias import BiasedConv2d
from tests.ops.backends import BACKENDS, DEVICES, running


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, so that FP32 can be compared closely."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_plain_convolution(name: str, device: str, batch: int, dtype: torch.dtype) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    single = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(0)
    plain = nn.Conv2d(5, 13, 3, 2, 1).to(device, single)
    ours = BiasedConv2d(5, 13, 3, 2, 1).to(device, single)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(batch, 5, 9, 7).to(device, single)
    weights = torch.randn(batch, 13, 5, 4).to(device)
    results = []
    with running(name, device), torch.autocast(device, dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
        for module in (plain, ours):
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            gradients = torch.autograd.grad(out, (leaf, *module.parameters()), weights.to(out.dtype))
            results.append((out, *gradients))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_bias_gets_no_gradient(device: str) -> None:
    module = BiasedConv2d(2, 3, 1).to(device)
    module.bias.requires_grad_(False)
    with running("triton", device):
        module(torch.randn(1, 2, 4, 4, device=device)).sum().backward()
    assert module.bias.grad is None
    assert module.weight.grad is not None
