"""The joined first layers of the depth transform against the layers one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bevctl.models.depth_transform import DepthTransform
from tests.ops.backends import DEVICES, running


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, so that FP32 can be compared closely."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def depth_images() -> Tensor:
    """(2, 1, 24, 40) m, most pixels unknown."""
    generator = torch.Generator().manual_seed(0)
    depth = 60 * torch.rand(2, 1, 24, 40, generator=generator)
    return torch.where(torch.rand(depth.shape, generator=generator) < 0.3, depth, 0.0)


def transform(device: str) -> DepthTransform:
    """Random weights, biases and statistics."""
    torch.manual_seed(0)
    made = DepthTransform(16)
    for layer in made:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
            assert layer.running_mean is not None
            nn.init.normal_(layer.running_mean)
    return made.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0])
def test_both_backends_agree(device: str, training: bool, momentum: float) -> None:
    results = []
    for name in ("torch", "triton"):
        module = transform(device).train(training)
        for layer in module:
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = momentum
        with running(name, device):
            features = module(depth_images().to(device))
            features.square().mean().backward()
        gradients = {key: p.grad for key, p in module.named_parameters()}
        results.append((features, gradients, dict(module.named_buffers())))
    (features, gradients, buffers), (ours, our_gradients, our_buffers) = results
    assert ours.shape == (2, 16, 3, 5)
    torch.testing.assert_close(ours, features, rtol=1e-3, atol=1e-3)
    for key, expected in gradients.items():
        assert expected is not None
        # A BatchNorm in training undoes what is added before it, and here the first factor: rounding is left.
        cancels = training and key in ("0.weight", "0.bias", "3.bias", "6.bias")
        close = 2e-5 if cancels else 2e-3 * float(expected.abs().max())
        torch.testing.assert_close(our_gradients[key], expected, rtol=1e-2, atol=close)
    for key, expected in buffers.items():
        torch.testing.assert_close(our_buffers[key], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_synchronised_statistics_run_layer_by_layer(device: str) -> None:
    module = transform(device)
    assert module._joins_first_layers(depth_images().to(device)) == (device == "cuda")
    with running("triton", device):
        assert module._joins_first_layers(depth_images().to(device))
        synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
        assert isinstance(synchronised, DepthTransform)
        assert not synchronised._joins_first_layers(depth_images().to(device))
        assert not module._joins_first_layers(depth_images().to(device).double())
