"""Habits of other projects that a config can ask for, so that weights trained there mean the same here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from bevctl.config.load import load
from bevctl.models.box_coder import encode
from bevctl.models.build import build_bevfusion
from bevctl.models.transfusion import TransFusionHead
from tests.models.nano import nano_batch, nano_config
from tests.models.test_transfusion import CLASSES, CONFIG, GRID, batch_of, box, outputs_at


def head_of(box_z: str) -> TransFusionHead:
    return TransFusionHead(dataclasses.replace(CONFIG, box_z=box_z), 12, CLASSES, GRID, single_cell=(8, 9)).eval()


def raised(boxes: Tensor, heights: float) -> Tensor:
    moved = boxes.clone()
    moved[..., 2] += heights * moved[..., 5]
    return moved


@pytest.mark.parametrize(("box_z", "heights"), [("centre", 0.0), ("top", 0.5)])
def test_what_the_height_branch_says_is_learned_and_undone(box_z: str, heights: float) -> None:
    """Queries that say the boxes' centres, or tops, exactly: no box loss, and the boxes themselves come out."""
    head = head_of(box_z)
    boxes = torch.stack([box(-3.0, 1.0), box(3.0, -2.0)])
    labels = torch.tensor([0, 1])
    batch = batch_of([boxes], [labels], [True])
    outputs = dataclasses.replace(
        outputs_at(boxes[None], labels[None]), codes=encode(raised(boxes, heights), GRID)[None]
    )
    losses = head.loss(outputs, batch)
    assert float(losses["loss/object/layer_-1_loss_bbox"]) == pytest.approx(0, abs=1e-6)
    assert float(losses["stats/object/matched_ious"]) == pytest.approx(1, abs=1e-5)
    found = head.predict(outputs)[0][0]
    torch.testing.assert_close(found[found[:, 0].argsort()], boxes, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.boxes[0], boxes), "the batch stays as it was"


def test_a_top_taken_for_a_centre_is_half_a_height_too_high() -> None:
    boxes = torch.stack([box(-3.0, 1.0)])
    outputs = dataclasses.replace(
        outputs_at(boxes[None], torch.tensor([[0]])), codes=encode(raised(boxes, 0.5), GRID)[None]
    )
    found = head_of("centre").predict(outputs)[0][0]
    assert float(found[0, 2] - boxes[0, 2]) == pytest.approx(0.75)


def test_points_are_rounded_before_anything_reads_them() -> None:
    """Rounding in the model is the same as giving it rounded points, and differs from not rounding."""
    config = nano_config()
    batch = nano_batch(config)
    assert batch.points is not None
    given = [cloud.clone() for cloud in batch.points]
    coarse = dataclasses.replace(batch, points=[cloud.half().float() for cloud in batch.points])
    heatmaps = []
    for point_dtype, samples in (("fp16", batch), ("fp32", coarse), ("fp32", batch)):
        torch.manual_seed(0)
        model = build_bevfusion(nano_config(**{"model.point_dtype": point_dtype})).eval()
        with torch.no_grad():
            heatmaps.append(model.get_submodule("heads.object")(model.head_inputs(samples)["object"]).heatmap)
    assert torch.equal(heatmaps[0], heatmaps[1])
    assert not torch.equal(heatmaps[0], heatmaps[2])
    assert all(torch.equal(cloud, before) for cloud, before in zip(batch.points, given, strict=True))


def test_the_view_transform_can_count_what_lies_below_its_bounds() -> None:
    """The nano rig looks along x: truncation also takes the points just below its bounds."""
    counts = []
    for truncate in (False, True):
        config = nano_config(**{"model.camera.view.truncate": truncate})
        view = build_bevfusion(config).get_submodule("encoders.camera.vtransform")
        rows = view.index(nano_batch(config).calibration).rows  # type: ignore[operator]
        counts.append(int((rows < rows.shape[0] * 16 * 16).sum()))
    assert counts[0] < counts[1]


@pytest.mark.parametrize(
    ("name", "point_dtype", "truncate", "box_z", "dtype"),
    [
        ("bevfusion_det", "fp32", False, "centre", "fp16"),
        ("bevfusion_det_mit", "fp16", True, "top", "fp16"),
        ("bevfusion_det_mmdet3d", "fp32", True, "centre", "fp32"),
        ("bevfusion_lidar_mit", "fp16", None, "top", "fp16"),
        ("bevfusion_seg_mit", "fp16", True, None, "fp16"),
    ],
)
def test_packaged_configs_take_the_habits_of_their_origin(
    name: str, point_dtype: str, truncate: bool | None, box_z: str | None, dtype: str
) -> None:
    config = load(name).config
    model = config.model
    assert model.point_dtype == point_dtype
    assert (model.camera.view.truncate if model.camera and model.camera.view else None) == truncate
    assert (model.object.box_z if model.object else None) == box_z
    assert config.precision.dtype == dtype
    assert config.data.sweep_choice == ("auto" if name == "bevfusion_det" else "random")
    if config.optim.schedule == "cosine":
        assert (config.optim.cosine_steps, config.optim.min_ratio) == ((None, 1e-4) if "mmdet3d" in name else (6, 1e-3))
    assert config.data.sweep_pose == ("mmdet3d" if name.endswith("mmdet3d") else "exact")
