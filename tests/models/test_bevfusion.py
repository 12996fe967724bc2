from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.document import packaged_names
from bevctl.config.load import load
from bevctl.config.schema import Config, MapHeadConfig, ViewTransformConfig
from bevctl.errors import BevctlError
from bevctl.models.bevfusion import BEVFusion
from bevctl.models.build import bev_grid, build_bevfusion, trainable_parameters
from bevctl.models.image_input import IMAGE_MEAN, IMAGE_STD
from tests.models.keys import inventory, needs_keys
from tests.models.nano import nano_batch, nano_config

VARIANTS: dict[str, dict[str, object]] = {
    "multitask": {},
    "detection": {"model.map": None},
    "segmentation": {"model.object": None, "model.camera.view.kind": "lss"},
    "camera": {"model.lidar": None},
    "lidar": {"model.camera": None},
}


def seeded_model(config: Config) -> BEVFusion:
    torch.manual_seed(0)
    return build_bevfusion(config).train()


def total(values: dict[str, Tensor]) -> Tensor:
    return torch.stack([value for name, value in values.items() if name.startswith("loss/")]).sum()


def without_gradient(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant: str) -> None:
    config = nano_config(**VARIANTS[variant])
    model = seeded_model(config)
    loss = total(model(nano_batch(config)))
    loss.backward()
    assert loss.isfinite()
    assert without_gradient(model) == []
    idle = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
    # Eight queries need not touch every rare path (a bias whose gradient a norm cancels); whole parts must move.
    assert len(idle) < 0.1 * len(list(model.parameters())), idle


def test_masked_tasks_still_reach_every_parameter() -> None:
    config = nano_config()
    model = seeded_model(config)
    batch = nano_batch(config)
    nothing = torch.zeros(2, dtype=torch.bool)
    masked = dataclasses.replace(
        batch,
        boxes=[boxes[:0] for boxes in batch.boxes],
        labels=[labels[:0] for labels in batch.labels],
        bev_map=None,
        has_boxes=nothing,
        has_map=nothing,
    )
    loss = total(model(masked))
    loss.backward()
    assert float(loss.detach()) == 0
    assert without_gradient(model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_under_autocast_is_finite_with_float32_losses(dtype: torch.dtype) -> None:
    config = nano_config()
    model = seeded_model(config)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        values = model(nano_batch(config))
    assert all(value.dtype == torch.float32 and value.isfinite() for value in values.values())
    total(values).backward()
    assert without_gradient(model) == []


def gradients_and_buffers(model: BEVFusion, batch: Batch) -> list[Tensor]:
    torch.manual_seed(1)
    total(model(batch)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers()]


@pytest.mark.parametrize("part", ["camera", "lidar", "decoder"])
def test_checkpointing_changes_neither_gradients_nor_statistics(part: str) -> None:
    plain_config = nano_config()
    batch = nano_batch(plain_config)
    plain = gradients_and_buffers(seeded_model(plain_config), batch)
    recomputed = gradients_and_buffers(seeded_model(nano_config(**{"model.checkpointing": (part,)})), batch)
    assert len(plain) == len(recomputed) > 100
    for expected, found in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_it_learns_a_batch() -> None:
    config = nano_config(**{"model.camera.swin.drop_path": 0.0, "model.object.dropout": 0.0})
    model = seeded_model(config)
    batch = nano_batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = total(model(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", [name for name in packaged_names() if load(name).config.model.type == "bevfusion"])
def test_packaged_configs_fit_together(name: str) -> None:
    config = load(name).config
    grid = bev_grid(config.model)
    assert grid.lower == pytest.approx((-grid.upper[0], -grid.upper[1]))
    if config.model.map is not None:
        assert config.model.map.xbound[1] <= grid.upper[0], "the map lies inside the bird's-eye view"


def test_images_are_normalised_inside_unless_they_come_as_floats() -> None:
    config = nano_config()
    model = seeded_model(config).eval()
    batch = nano_batch(config)
    assert batch.images is not None
    mean, std = torch.tensor(IMAGE_MEAN).view(3, 1, 1), torch.tensor(IMAGE_STD).view(3, 1, 1)
    normalised = dataclasses.replace(batch, images=(batch.images / 255 - mean) / std)
    expected, found = model.predict(batch).bev_map, model.predict(normalised).bev_map
    torch.testing.assert_close(found, expected)


def test_the_batch_is_left_alone() -> None:
    config = nano_config()
    batch, before = nano_batch(config), nano_batch(config)
    total(seeded_model(config)(batch)).backward()
    assert batch.points is not None
    assert before.points is not None
    for ours, original in zip([*batch.points, *batch.boxes], [*before.points, *before.boxes], strict=True):
        assert torch.equal(ours.nan_to_num(), original.nan_to_num())
    assert torch.equal(batch.calibration.image_aug, before.calibration.image_aug)
    assert torch.equal(batch.calibration.lidar2image, before.calibration.lidar2image)


def test_predictions_have_the_shapes_of_the_contract() -> None:
    config = nano_config()
    model = seeded_model(config).eval()
    found = model.predict(nano_batch(config, batch=3))
    assert found.boxes is not None
    assert found.scores is not None
    assert found.labels is not None
    assert found.bev_map is not None
    assert len(found.boxes) == len(found.scores) == len(found.labels) == 3
    assert all(boxes.shape == (len(scores), 9) for boxes, scores in zip(found.boxes, found.scores, strict=True))
    assert found.bev_map.shape == (3, 6, 12, 12)


def test_a_task_without_a_head_is_none() -> None:
    batch = nano_batch(nano_config())
    detection = seeded_model(nano_config(**VARIANTS["detection"])).eval().predict(batch)
    segmentation = seeded_model(nano_config(**VARIANTS["segmentation"])).eval().predict(batch)
    assert detection.bev_map is None
    assert detection.boxes is not None
    assert segmentation.boxes is None
    assert segmentation.bev_map is not None


def test_an_empty_batch_gives_empty_predictions() -> None:
    found = seeded_model(nano_config()).eval().predict(nano_batch(nano_config(), batch=0))
    assert found.boxes == found.scores == found.labels == []


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    config = nano_config()
    model = seeded_model(config).eval()
    batch = nano_batch(config)
    both = model.predict(batch)
    single = dataclasses.replace(
        batch,
        images=None if batch.images is None else batch.images[1:],
        points=None if batch.points is None else batch.points[1:],
        calibration=type(batch.calibration)(
            **{f.name: getattr(batch.calibration, f.name)[1:] for f in dataclasses.fields(batch.calibration)}
        ),
        boxes=batch.boxes[1:],
        labels=batch.labels[1:],
    )
    alone = model.predict(single)
    assert both.boxes is not None
    assert alone.boxes is not None
    assert both.bev_map is not None
    assert alone.bev_map is not None
    torch.testing.assert_close(alone.boxes[0], both.boxes[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone.bev_map[0], both.bev_map[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("missing", "words"), [("images", "camera"), ("points", "lidar")])
def test_a_batch_without_a_sensor_is_refused(missing: str, words: str) -> None:
    config = nano_config(**{"model.camera.view.kind": "lss"})
    changes: dict[str, Any] = {missing: None}
    with pytest.raises(BevctlError, match=f"reads {words} data"):
        seeded_model(config)(dataclasses.replace(nano_batch(config), **changes))


def full_size(name: str) -> Config:
    """The configurations whose inventories are recorded: det, seg, multitask."""
    config = Config()
    model = config.model
    assert model.camera is not None
    assert model.lidar is not None
    if name == "multitask":
        return dataclasses.replace(config, model=dataclasses.replace(model, map=MapHeadConfig()))
    if name == "seg":
        bound = (-51.2, 51.2, 0.4)
        model = dataclasses.replace(
            model,
            object=None,
            map=MapHeadConfig(),
            point_cloud_range=(-51.2, -51.2, -5.0, 51.2, 51.2, 3.0),
            camera=dataclasses.replace(model.camera, view=ViewTransformConfig(kind="lss", xbound=bound, ybound=bound)),
            lidar=dataclasses.replace(model.lidar, voxel_size=(0.1, 0.1, 0.2)),
        )
    return dataclasses.replace(config, model=model)


@functools.cache
def full_model(name: str) -> BEVFusion:
    return build_bevfusion(full_size(name))


SHARED_PARTS = {
    "encoders.camera.backbone": 27_520_506,
    "encoders.camera.neck": 1_591_296,
    "encoders.lidar": 2_694_352,
    "fuser": 774_656,
    "decoder": 4_576_768,
}


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("det", {"encoders.camera.vtransform": 1_610_726, "heads.object": 1_034_910}, 39_803_214),
        ("seg", {"encoders.camera.vtransform": 224_166, "heads.map": 4_723_718}, 42_105_462),
        (
            "multitask",
            {"encoders.camera.vtransform": 1_610_726, "heads.object": 1_034_910, "heads.map": 4_723_718},
            44_526_932,
        ),
    ],
)
def test_trainable_parameters_of_the_full_size(name: str, parts: dict[str, int], expected: int) -> None:
    counts = trainable_parameters(full_model(name))
    assert counts == SHARED_PARTS | parts
    assert sum(counts.values()) == expected


@needs_keys
@pytest.mark.parametrize("name", ["det", "seg", "multitask"])
def test_state_dict_is_that_of_mit_bevfusion(name: str) -> None:
    found = {key: tuple(value.shape) for key, value in full_model(name).state_dict().items()}
    assert found == {key: shape for key, (shape, _) in inventory(f"mit_{name}").items()}
