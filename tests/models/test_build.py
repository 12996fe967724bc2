"""What the builder sets on finished parts."""

from __future__ import annotations

from torch import nn

from bevctl.models.build import build_model, static_parts
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


def test_static_parts_are_modules_of_the_model() -> None:
    config = nano_config()
    modules = dict(build_model(config).named_modules())
    assert set(static_parts(config.model)) <= modules.keys()


def test_static_parts_leave_out_what_is_run_twice() -> None:
    every = set(static_parts(nano_config().model))
    recomputed = nano_config(**{"model.checkpointing": ("camera", "decoder")})
    inside_view = {f"encoders.camera.vtransform.{part}" for part in ("dtransform", "depthnet", "downsample")}
    assert every - set(static_parts(recomputed.model)) == inside_view
    without_recomputing = set(static_parts(recomputed.model, recomputing=False))
    assert every - without_recomputing == {*inside_view, "encoders.camera.backbone", "decoder"}
    timm = nano_config(**{"model.checkpointing": ("camera",), "model.camera.backbone": "resnet18"})
    assert every - set(static_parts(timm.model)) == {*inside_view, "encoders.camera.backbone"}
