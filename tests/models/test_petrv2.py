"""The whole PETRv2: sizes, learning, symmetries, and what it refuses."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bevctl.models
from bevctl.batch import Batch
from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.engine.precision import keep_fp32
from bevctl.errors import BevctlError
from bevctl.measure.parameters import count_parameters
from bevctl.models.build import PARTS, build_model, static_parts, trainable_parameters
from bevctl.models.petrv2 import PETRv2
from tests.models.nano_petrv2 import nano_petrv2_batch, nano_petrv2_config

SIZES = {"petrv2": 85_116_740, "petrv2_seg": 84_860_739, "petrv2_multitask": 98_090_567}
STILL = {"model.petr.dropout": 0.0}


def nano(**overrides: object) -> PETRv2:
    torch.manual_seed(0)
    model = build_model(nano_petrv2_config(**overrides))
    assert isinstance(model, PETRv2)
    return model


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


@pytest.mark.parametrize("name", list(SIZES))
def test_trainable_parameters_of_the_full_size(name: str) -> None:
    assert count_parameters(load(name).config).trainable == SIZES[name]


def test_parts_are_those_that_tools_know() -> None:
    counts = trainable_parameters(nano())
    assert list(counts) == [
        "encoders.camera.backbone", "encoders.camera.neck", "encoders.camera.position", "heads.object", "heads.map"
    ]  # fmt: skip
    assert set(counts) <= set(PARTS)
    assert sum(counts.values()) == sum(p.numel() for p in nano().parameters())


def test_every_parameter_learns_and_training_lowers_the_loss() -> None:
    model, batch = nano(**STILL).train(), nano_petrv2_batch(nano_petrv2_config())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    values = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = total(model(batch))
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert values[-1] < 0.8 * values[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_in_each_precision_is_finite_and_close(dtype: torch.dtype) -> None:
    config = nano_petrv2_config(**STILL)
    batch, expected = nano_petrv2_batch(config), total(nano(**STILL)(nano_petrv2_batch(config)))
    model = nano(**STILL)
    keep_fp32(model, load("petrv2").config.precision.fp32_modules, "cpu")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = total(model(batch))
    assert loss.item() == pytest.approx(expected.item(), rel={torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 0))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("shipped", "fits"), [(True, True), (False, False)])
def test_the_first_loss_scale_fits_where_the_first_attention_is_in_fp32(shipped: bool, fits: bool) -> None:
    """Its queries start equal: the norm behind it divides by next to nothing, and magnifies gradients 300 times."""
    config = load("petrv2").config.precision
    model = nano(**STILL)
    patterns = config.fp32_modules if shipped else [p for p in config.fp32_modules if not p.endswith("self_attn")]
    keep_fp32(model, patterns, "cpu")
    with torch.autocast("cpu", torch.float16):
        loss = total(model(nano_petrv2_batch(nano_petrv2_config())))
    (loss * (config.init_scale if fits else 1024.0)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()) == fits


def test_the_modules_that_stay_in_fp32_exist_in_each_config() -> None:
    for name in ("petrv2", "petrv2_seg", "petrv2_multitask"):
        config = load(name).config
        matched = keep_fp32(nano(**_heads_of(config)), config.precision.fp32_modules, "cpu")
        assert "encoders.camera.position.position_encoder" in matched


def _heads_of(config: Config) -> dict[str, object]:
    return {f"model.{task}": None for task in ("object", "map") if getattr(config.model, task) is None}


def test_batch_norms_of_a_pretrained_backbone_stand_still() -> None:
    model = nano(**{"model.camera.norm_eval": True}).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    total(model(nano_petrv2_batch(nano_petrv2_config()))).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    norms = [m for m in model.get_submodule("encoders.camera").modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert all(norm.weight.grad is not None and not norm.training for norm in norms)


def test_recomputing_changes_nothing() -> None:
    batch = nano_petrv2_batch(nano_petrv2_config())
    results = []
    for parts in ((), ("camera", "decoder")):
        model = nano(**{"model.checkpointing": parts}).train()
        torch.manual_seed(1)
        loss = total(model(batch))
        loss.backward()
        results.append((loss, *(p.grad for p in model.parameters())))
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


def test_static_parts_are_all_modules_with_weights() -> None:
    config = nano_petrv2_config()
    parts = {f"encoders.camera.{part}" for part in ("backbone", "neck", "position")}
    heads = {"heads.object", "heads.map"}
    assert set(static_parts(config.model)) == parts | heads
    assert parts | heads <= dict(build_model(config).named_modules()).keys()
    recomputed = nano_petrv2_config(**{"model.checkpointing": ("camera", "decoder")})
    assert set(static_parts(recomputed.model)) == parts  # random states of the decoder's dropout are put back


def test_frozen_modules_do_not_learn() -> None:
    model = nano(**{"model.freeze": ("encoders.camera.backbone", "heads.map")}).train()
    total(model(nano_petrv2_batch(nano_petrv2_config()))).backward()
    learning = {name.rsplit(".", 2)[0] for name, p in model.named_parameters() if p.grad is not None}
    assert not any(name.startswith(("encoders.camera.backbone", "heads.map")) for name in learning)
    with pytest.raises(BevctlError, match=r"no module 'heads\.maps'"):
        nano(**{"model.freeze": ("heads.maps",)})


def turned(batch: Batch, turn: Tensor) -> tuple[Batch, Batch]:
    """The scene turned by the augmentation, and by mounting the cameras elsewhere."""
    c = batch.calibration
    by_augmentation = dataclasses.replace(c, lidar_aug=turn.expand(batch.size, 4, 4))
    by_mounting = dataclasses.replace(
        c, camera2lidar=turn @ c.camera2lidar, lidar2image=c.lidar2image @ torch.linalg.inv(turn)
    )
    return dataclasses.replace(batch, calibration=by_augmentation), dataclasses.replace(batch, calibration=by_mounting)


def test_augmentation_is_the_same_as_cameras_elsewhere() -> None:
    turn = torch.eye(4)
    turn[:2, :2], turn[0, 3] = torch.tensor([[0.8, -0.6], [0.6, 0.8]]), 0.7
    model = nano(**STILL).eval()
    for found, expected in zip(
        *(model(batch).values() for batch in turned(nano_petrv2_batch(nano_petrv2_config()), turn)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_motion_between_the_frames_reaches_the_earlier_views_alone() -> None:
    encoder, batch = nano(**STILL).eval().get_submodule("encoders.camera"), nano_petrv2_batch(nano_petrv2_config())
    c, views = batch.calibration, batch.calibration.times.shape[1] // 2
    further = c.camera2lidar.clone()
    further[:, views:, 0, 3] -= 2.0
    before, after = (
        encoder(batch.images, calibration, None).keys.detach().unflatten(1, (2, -1))
        for calibration in (c, dataclasses.replace(c, camera2lidar=further))
    )
    assert torch.equal(before[:, 0], after[:, 0])
    assert float((before[:, 1] - after[:, 1]).norm() / before[:, 1].norm()) > 1e-2


def test_velocities_are_per_second_between_the_frames() -> None:
    model, batch = nano(**STILL).eval(), nano_petrv2_batch(nano_petrv2_config())
    c = batch.calibration
    slower = dataclasses.replace(batch, calibration=dataclasses.replace(c, times=2 * c.times))
    shorter = dataclasses.replace(batch, calibration=dataclasses.replace(c, times=0 * c.times))
    found, half, same = (model.predict(b).boxes for b in (batch, slower, shorter))
    assert found is not None
    assert half is not None
    assert same is not None
    torch.testing.assert_close(half[0][:, 7:], found[0][:, 7:] / 2)
    torch.testing.assert_close(same[0], found[0])  # one frame twice counts as half a second
    torch.testing.assert_close(half[0][:, :7], found[0][:, :7])


def test_one_frame_is_enough_for_a_model_of_one() -> None:
    config = nano_petrv2_config(**{"data.previous": None})
    model = nano(**{"data.previous": None})
    assert total(model(nano_petrv2_batch(config))).isfinite()


def test_padding_is_not_looked_at() -> None:
    model, batch = nano(**STILL, **{"model.camera.norm_eval": True}).eval(), nano_petrv2_batch(nano_petrv2_config())
    assert batch.images is not None
    padding = torch.zeros(*batch.images.shape[:2], *batch.images.shape[3:], dtype=torch.bool)
    padding[..., 16:, :] = True
    padded = dataclasses.replace(batch, padding=padding)
    painted = dataclasses.replace(padded, images=batch.images.masked_fill(padding.unsqueeze(2), 255))
    torch.testing.assert_close(total(model(painted)), total(model(padded)))
    assert not torch.allclose(total(model(padded)), total(model(batch)))


@pytest.mark.parametrize("half", [False, True])
def test_a_camera_that_is_missing_breaks_nothing(half: bool) -> None:
    """Its image is black, and it stands far below everything."""
    model, batch = nano(**STILL), nano_petrv2_batch(nano_petrv2_config())
    assert batch.images is not None
    c = batch.calibration
    far, images = c.camera2lidar.clone(), batch.images.clone()
    far[:, 1], images[:, 1] = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0])), 0
    far[:, 1, 2, 3] = -1e4
    missing = dataclasses.replace(batch, images=images, calibration=dataclasses.replace(c, camera2lidar=far))
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = total(model(missing))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_empty_batch_gives_nothing_and_missing_images_are_named() -> None:
    model, batch = nano(), nano_petrv2_batch(nano_petrv2_config())
    empty = dataclasses.replace(batch, boxes=[], labels=[])
    assert model.predict(empty).boxes == []
    with pytest.raises(BevctlError, match="reads images of 2 frames, but the batch has 0 views"):
        model(dataclasses.replace(batch, images=None))
    assert batch.images is not None
    with pytest.raises(BevctlError, match="reads images of 2 frames, but the batch has 3 views"):
        model(dataclasses.replace(batch, images=batch.images[:, :3]))


def test_nothing_hides_a_nan() -> None:
    for path in sorted(Path(bevctl.models.__file__).parent.glob("petrv2*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"nan_to_num", "nan_to_num_"}, path.name
    model, batch = nano(), nano_petrv2_batch(nano_petrv2_config())
    with torch.no_grad():
        model.get_parameter("heads.object.transformer.layers.1.linear2.bias")[0] = torch.nan
    losses = model(batch)
    assert losses["loss/object/layer_-1_loss_cls"].isnan()
    assert losses["loss/object/layer_0_loss_cls"].isfinite()
