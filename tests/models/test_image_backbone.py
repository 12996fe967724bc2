from __future__ import annotations

import sys

import pytest
import torch

from bevctl.config.schema import CameraConfig, SwinConfig
from bevctl.errors import BevctlError
from bevctl.models.image_backbone import TimmBackbone, build_image_backbone
from bevctl.models.neck import GeneralizedLSSFPN
from bevctl.models.swin import SwinTransformer


def test_swin_is_ours() -> None:
    config = CameraConfig(swin=SwinConfig(embed=8, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), window=3))
    assert isinstance(build_image_backbone(config), SwinTransformer)


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224"])
def test_timm_maps_are_channels_first_at_three_strides(name: str) -> None:
    pytest.importorskip("timm")
    backbone = build_image_backbone(CameraConfig(backbone=name, image_size=(64, 128))).eval()
    maps = backbone(torch.randn(1, 3, 64, 128))
    assert [tuple(x.shape) for x in maps] == [
        (1, channels, 64 // stride, 128 // stride)
        for channels, stride in zip(backbone.channels, (8, 16, 32), strict=True)
    ]


def test_timm_checkpointing_changes_neither_gradients_nor_statistics() -> None:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    backbone = TimmBackbone("resnet18", (32, 64))
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    images = torch.randn(2, 3, 32, 64)
    results = []
    for checkpointing in (False, True):
        backbone.load_state_dict(state)
        backbone.checkpointing = checkpointing
        backbone.zero_grad()
        sum(x.square().mean() for x in backbone(images)).backward()
        gradients = [p.grad.clone() for p in backbone.parameters() if p.grad is not None]
        results.append((gradients, [buffer.clone() for buffer in backbone.buffers()]))
    for plain, recomputed in zip(results[0], results[1], strict=True):
        assert len(plain) > 10
        for a, b in zip(plain, recomputed, strict=True):
            assert torch.equal(a, b)


def test_unknown_name_gets_a_suggestion() -> None:
    pytest.importorskip("timm")
    with pytest.raises(BevctlError, match="'resnet19x'") as caught:
        build_image_backbone(CameraConfig(backbone="resnet19x"))
    assert "resnet" in caught.value.hint


def test_a_model_without_a_pyramid_is_refused() -> None:
    pytest.importorskip("timm")
    with pytest.raises(BevctlError, match="strides"):
        build_image_backbone(CameraConfig(backbone="vit_tiny_patch16_224", image_size=(64, 64)))


def test_missing_timm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BevctlError, match="needs timm") as caught:
        build_image_backbone(CameraConfig(backbone="resnet18"))
    assert "pip install" in caught.value.hint


def test_neck_merges_top_down() -> None:
    neck = GeneralizedLSSFPN((4, 6, 8), 5)
    maps = [torch.randn(2, c, h, w) for c, h, w in ((4, 8, 12), (6, 4, 6), (8, 2, 3))]
    fine, middle = neck(maps)
    assert fine.shape == (2, 5, 8, 12)
    assert middle.shape == (2, 5, 4, 6)
    changed = neck([maps[0], maps[1], maps[2] + 1])
    assert not torch.allclose(changed[0], fine)
    unchanged = neck([maps[0] + 1, maps[1], maps[2]])
    assert torch.equal(unchanged[1], middle)


def test_neck_has_the_published_number_of_parameters() -> None:
    neck = GeneralizedLSSFPN((192, 384, 768), 256)
    assert sum(p.numel() for p in neck.parameters()) == 1_591_296
