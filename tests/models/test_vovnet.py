from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.schema import CameraConfig, VoVNetConfig
from bevctl.engine.precision import keep_fp32
from bevctl.models.image_backbone import build_image_backbone
from bevctl.models.vovnet import OsaBlock, VoVNet, VoVNetConv
from bevctl.ops import backend

TINY = VoVNetConfig(stem=(4, 4, 6), inner=(4, 5, 6, 7), channels=(8, 10, 12, 14), blocks=(1, 2, 2, 1), layers=2)


def conv(channels_in: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


class PlainBlock(nn.Module):
    def __init__(self, channels_in: int, inner: int, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([conv(inner if i else channels_in, inner, 3) for i in range(layers)])
        self.concat = conv(channels_in + layers * inner, channels, 1)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, identity: bool) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts[-1]))
        out = self.concat(torch.cat(parts, 1))
        out = out * F.relu6(self.gate(F.adaptive_avg_pool2d(out, 1)) + 3) / 6
        return cast("Tensor", x + out if identity else out)


class PlainVoVNet(nn.Module):
    """The network as its paper writes it, layer by layer."""

    def __init__(self, config: VoVNetConfig) -> None:
        super().__init__()
        first, second, third = config.stem
        self.stem = nn.Sequential(conv(3, first, 3, 2), conv(first, second, 3), conv(second, third, 3, 2))
        self.stages = nn.ModuleList()
        source = third
        for inner, channels, blocks in zip(config.inner, config.channels, config.blocks, strict=True):
            stage = [PlainBlock(channels if i else source, inner, channels, config.layers) for i in range(blocks)]
            self.stages.append(nn.ModuleList(stage))
            source = channels

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.stem(images)
        maps = []
        for place, stage in enumerate(self.stages):
            x = F.max_pool2d(x, 3, 2, ceil_mode=True) if place else x
            for index, block in enumerate(cast("Iterable[nn.Module]", stage)):
                x = block(x, index > 0)
            maps.append(x)
        return maps


def pair(norm_eval: bool = True, checkpointing: bool = False) -> tuple[VoVNet, PlainVoVNet]:
    """The same float64 weights and statistics, in training mode."""
    torch.manual_seed(0)
    plain = PlainVoVNet(TINY).double()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(cast("Tensor", values), 0.4, 1.4)
            if norm_eval:
                module.eval()
    ours = VoVNet(TINY, levels=4, checkpointing=checkpointing, norm_eval=norm_eval).double().train()
    ours.load_state_dict(dict(zip(ours.state_dict(), plain.state_dict().values(), strict=True)))
    return ours, plain


def outputs_and_gradients(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    outputs = model(images)
    loss = sum((out.square().mean() for out in outputs), torch.zeros(()))
    return outputs, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("norm_eval", [False, True])
def test_equals_the_network_written_plainly(norm_eval: bool, checkpointing: bool) -> None:
    ours, plain = pair(norm_eval, checkpointing)
    images = torch.randn(2, 3, 50, 70, dtype=torch.float64)  # no multiples of 32: the pools round up
    outputs, gradients = outputs_and_gradients(ours, images)
    expected, expected_gradients = outputs_and_gradients(plain, images)
    for found, exact in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)
    for found, exact in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


def test_kernels_give_the_same_in_float32() -> None:
    ours, plain = pair()
    ours = ours.float()
    images = torch.randn(1, 3, 33, 32)
    with backend.forced("triton"):
        outputs, gradients = outputs_and_gradients(ours, images)
    expected, expected_gradients = outputs_and_gradients(plain, images.double())
    for found, exact in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=2e-5)


def test_vovnet_99_has_the_published_size() -> None:
    with torch.device("meta"):
        model = VoVNet(VoVNetConfig(), levels=2, norm_eval=True)
    assert sum(p.numel() for p in model.parameters()) == 69_523_520
    assert model.channels == (768, 1024)


def test_statistics_stand_still_and_factors_learn() -> None:
    ours, _ = pair()
    before = [buffer.clone() for buffer in ours.buffers()]
    sum(x.sum() for x in ours(torch.randn(2, 3, 32, 32).double())).backward()
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), before, strict=True))
    first = cast("VoVNetConv", ours.stem[0])
    assert first.bn.weight.grad is not None
    assert first.bn.weight.grad.abs().min() > 0
    assert not first.bn.training
    assert ours.eval().train().training


def test_a_wrapped_part_runs_as_it_is() -> None:
    """Modules that are told to compute in FP32 do, and hooks fire."""
    model = VoVNet(TINY, norm_eval=True).train()
    seen = []
    block = cast("OsaBlock", cast("nn.Sequential", model.stages[1])[0])
    cast("VoVNetConv", block.layers[0]).conv.register_forward_hook(lambda *_: seen.append("conv"))
    keep_fp32(model, ["stages.2.1.concat"], "cpu")
    kinds = []
    wrapped = cast("OsaBlock", cast("nn.Sequential", model.stages[2])[1]).concat
    wrapped.bn.register_forward_hook(lambda _module, args, _out: kinds.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        maps = model(torch.randn(1, 3, 32, 32))
    assert seen == ["conv"]
    assert kinds == [torch.float32]
    assert maps[0].dtype == torch.bfloat16


def test_half_precision_stays_close() -> None:
    ours, plain = pair()
    images = torch.randn(1, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours.float()(images)
    for half, exact in zip(found, plain(images.double()), strict=True):
        assert half.dtype == torch.bfloat16
        assert float((half.double() - exact).detach().norm() / exact.detach().norm()) < 0.03


def test_the_config_builds_it_with_three_levels_for_bevfusion() -> None:
    backbone = build_image_backbone(CameraConfig(backbone="vovnet", vovnet=TINY))
    assert isinstance(backbone, VoVNet)
    maps = backbone(torch.randn(1, 3, 32, 64))
    assert [tuple(x.shape) for x in maps] == [(1, 10, 4, 8), (1, 12, 2, 4), (1, 14, 1, 2)]
    assert backbone.channels == (10, 12, 14)


@pytest.mark.parametrize("levels", [2, 3])
def test_timm_gives_as_many_levels_and_keeps_statistics(levels: int) -> None:
    pytest.importorskip("timm")
    config = CameraConfig(backbone="resnet18", image_size=(32, 64), norm_eval=True)
    backbone = build_image_backbone(config, levels=levels).train()
    assert len(backbone(torch.randn(1, 3, 32, 64))) == len(backbone.channels) == levels
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training for norm in norms)
