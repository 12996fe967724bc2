from __future__ import annotations

import torch

from bevctl.config.schema import DecoderConfig
from bevctl.models.bev_decoder import BevDecoder, ConvFuser, Second, SecondFPN

CONFIG = DecoderConfig(fused_channels=8, channels=(8, 12), layers=2, neck_channels=10)


def test_fuser_reads_the_maps_in_order() -> None:
    fuser = ConvFuser((2, 3), 4).eval()
    camera, lidar = torch.randn(1, 2, 6, 6), torch.randn(1, 3, 6, 6)
    expected = fuser[2](fuser[1](fuser[0](torch.cat([camera, lidar], dim=1))))
    torch.testing.assert_close(fuser([camera, lidar]), expected)
    assert float(expected.detach().min()) == 0, "negative values are cut"


def test_the_second_stage_has_half_the_resolution() -> None:
    fine, coarse = Second(4, (8, 12), layers=2)(torch.randn(2, 4, 6, 10))
    assert fine.shape == (2, 8, 6, 10)
    assert coarse.shape == (2, 12, 3, 5)


def test_fpn_brings_both_to_full_resolution() -> None:
    out = SecondFPN((8, 12), 5)([torch.randn(2, 8, 6, 10), torch.randn(2, 12, 3, 5)])
    assert out.shape == (2, 10, 6, 10)


def test_decoder_joins_them() -> None:
    decoder = BevDecoder(4, CONFIG)
    assert decoder.channels == 20
    assert decoder(torch.randn(2, 4, 6, 10)).shape == (2, 20, 6, 10)


def test_full_size_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        decoder = BevDecoder(256, DecoderConfig())
        fuser = ConvFuser((80, 256), 256)
    assert sum(p.numel() for p in decoder.backbone.parameters()) == 4_280_832
    assert sum(p.numel() for p in decoder.neck.parameters()) == 295_936
    assert sum(p.numel() for p in fuser.parameters()) == 774_656
