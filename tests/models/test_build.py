"""What the builder sets on finished parts."""

from __future__ import annotations

from torch import nn

from bevctl.models.build import build_model
from tests.models.nano import nano_config


def test_norm_momentum_reaches_lidar_encoder_and_decoder_alone() -> None:
    model = build_model(nano_config(**{"model.norm_momentum": 0.25}))
    momenta: dict[str, set[float | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            momenta.setdefault(name.partition(".")[0] + "." + name.split(".")[1], set()).add(module.momentum)
    assert momenta.pop("encoders.lidar") == {0.25}
    assert momenta.pop("decoder.backbone") == {0.25}
    assert momenta.pop("decoder.neck") == {0.25}
    assert set.union(*momenta.values()) == {0.1}
