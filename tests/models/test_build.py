"""What the builder sets on finished parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevctl.errors import BevctlError
from bevctl.models.build import build_bevfusion, build_model, static_parts, trainable_parameters
from bevctl.models.layouts import match_decoders
from tests.models.nano import nano_batch, nano_config


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
    compiled = set(static_parts(recomputed.model, for_compiler=True))
    assert every - compiled == {*inside_view, "encoders.camera.backbone", "decoder", "encoders.lidar.backbone"}
    timm = nano_config(**{"model.checkpointing": ("camera",), "model.camera.backbone": "resnet18"})
    assert every - set(static_parts(timm.model)) == {*inside_view, "encoders.camera.backbone"}


TWO_DECODERS = {"model.shared_decoder": False}


def test_each_task_can_have_a_decoder_of_its_own() -> None:
    shared, separate = nano_config(), nano_config(**TWO_DECODERS)
    names = dict(build_model(separate).named_modules())
    assert {"decoder.object.backbone", "decoder.map.neck"} <= names.keys()
    assert set(static_parts(separate.model)) <= names.keys()
    assert {"decoder.object", "decoder.map"} <= set(static_parts(separate.model))
    before, after = (trainable_parameters(build_model(config)) for config in (shared, separate))
    assert after == {**before, "decoder": 2 * before["decoder"]}


def test_one_task_has_one_decoder_whatever_the_config_says() -> None:
    alone = nano_config(**TWO_DECODERS, **{"model.map": None})
    assert build_model(alone).state_dict().keys() == build_model(nano_config(**{"model.map": None})).state_dict().keys()


def test_decoders_of_equal_weights_give_what_a_shared_one_gives() -> None:
    torch.manual_seed(0)
    shared = build_bevfusion(nano_config()).eval()
    separate = build_bevfusion(nano_config(**TWO_DECODERS)).eval()
    separate.load_state_dict(match_decoders(shared.state_dict(), separate.state_dict()))
    batch = nano_batch(nano_config())
    with torch.no_grad():
        expected, found = shared(batch), separate(batch)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_task_teaches_its_own_decoder_alone() -> None:
    model = build_bevfusion(nano_config(**TWO_DECODERS))
    losses = model(nano_batch(nano_config()))
    sum(value for name, value in losses.items() if name.startswith("loss/map/")).backward()
    taught = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(name.startswith("decoder.map.") for name in taught)
    assert any(name.startswith("fuser.") for name in taught)
    assert not any(name.startswith(("decoder.object.", "heads.object.")) for name in taught)


FROZEN = ("encoders.camera.backbone", "encoders.lidar", "decoder.neck.deblocks.0")


def test_frozen_modules_do_not_learn_and_keep_their_statistics() -> None:
    model = build_bevfusion(nano_config(**{"model.freeze": FROZEN})).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = model(nano_batch(nano_config()))
    sum(value for name, value in losses.items() if name.startswith("loss/")).backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith(FROZEN) for name in changed)
    for part in ("encoders.camera.neck", "fuser.1.running_mean", "decoder.neck.deblocks.1", "heads.map"):
        assert any(name.startswith(part) for name in changed), part


def test_frozen_parts_are_not_counted_as_trainable() -> None:
    counts = trainable_parameters(build_model(nano_config(**{"model.freeze": ("encoders.camera", "heads.map")})))
    assert set(counts) == {"encoders.lidar", "fuser", "decoder", "heads.object"}


def test_a_part_to_freeze_that_is_not_there_is_named() -> None:
    with pytest.raises(BevctlError, match="no module") as caught:
        build_model(nano_config(**{"model.freeze": ("encoders.camera.backbon",)}))
    assert "encoders.camera.backbone" in caught.value.hint
