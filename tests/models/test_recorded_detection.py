"""The full-size detection model against numbers recorded from mmdet3d 1.4's BEVFusion, everything after the raster."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch, Predictions
from bevctl.config.schema import Config
from bevctl.models.bevfusion import BEVFusion
from bevctl.models.build import build_bevfusion
from bevctl.models.layouts import mmdet3d_name
from bevctl.models.transfusion import BRANCHES, ObjectOutputs, TransFusionHead
from tests import golden
from tests.models.nano import with_value

pytestmark = [golden.needs_golden, pytest.mark.slow]

MODULES = {
    "encoders.camera.backbone": ("img_backbone.0", "img_backbone.1", "img_backbone.2"),
    "encoders.camera.neck": ("img_neck.0", "img_neck.1"),
    "encoders.camera.vtransform.dtransform": ("view_transform.dtransform",),
    "encoders.camera.vtransform.depthnet": ("view_transform.depthnet",),
    "encoders.camera.vtransform": ("view_transform",),
    "encoders.lidar": ("pts_middle_encoder",),
    "fuser": ("fusion_layer",),
    "decoder.backbone": ("pts_backbone.0", "pts_backbone.1"),
    "decoder.neck": ("pts_neck.0",),
    "heads.object.shared_conv": ("bbox_head.shared_conv",),
}
"""The recorded outputs of each module."""
QUERIES = 400
DIFFERENT_QUERIES = 4
"""Scores as close as 1e-6 may order queries differently."""


@dataclasses.dataclass
class Run:
    """One pass over the recorded inputs, with the outputs of modules by recorded name."""

    tensors: dict[str, Tensor]
    outputs: ObjectOutputs
    losses: dict[str, Tensor]
    predictions: Predictions


def recorded_batch() -> Batch:
    """The recorded inputs; boxes there have the bottom centre."""
    boxes = [torch.from_numpy(b.copy()) for b in golden.inputs()["boxes"]]
    for sample in boxes:
        sample[:, 2] += sample[:, 5] / 2
    return Batch(
        images=golden.images(),
        points=golden.points(),
        calibration=golden.calibration(),
        boxes=boxes,
        labels=[torch.from_numpy(labels) for labels in golden.inputs()["labels"]],
        bev_map=None,
        has_boxes=torch.ones(2, dtype=torch.bool),
        has_map=torch.zeros(2, dtype=torch.bool),
    )


def record_outputs(model: BEVFusion, tensors: dict[str, Tensor]) -> None:
    def recorder(names: tuple[str, ...]) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            values = [output] if isinstance(output, Tensor) else output
            tensors.update(zip(names, values, strict=True))

        return hook

    for module, names in MODULES.items():
        model.get_submodule(module).register_forward_hook(recorder(names))

    def queries(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tensors["bbox_head.query_feat_in"] = inputs[0]
        tensors["bbox_head.query_pos"] = inputs[1]

    def pooled(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tensors["view_transform.bev_pool"] = inputs[0]

    model.get_submodule("heads.object.decoder.0").register_forward_pre_hook(queries)
    model.get_submodule("encoders.camera.vtransform.downsample").register_forward_pre_hook(pooled)


def feed_raster(_module: nn.Module, args: Any, _kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    return args, {"depth_raster": golden.depth_raster()}


@pytest.fixture(scope="module")
def run() -> Run:
    model = build_bevfusion(with_value(Config(), "model.camera.view.truncate", True)).eval()
    golden.load_weights(model, rename=mmdet3d_name)
    tensors: dict[str, Tensor] = {}
    record_outputs(model, tensors)
    model.get_submodule("encoders.camera.vtransform").register_forward_pre_hook(feed_raster, with_kwargs=True)
    head = cast("TransFusionHead", model.heads["object"])
    batch = recorded_batch()
    with torch.no_grad():
        outputs = head(model.head_inputs(batch)["object"])
        boxes, scores, labels = head.predict(outputs)
        return Run(tensors, outputs, head.loss(outputs, batch), Predictions(boxes, scores, labels))


@pytest.mark.parametrize("name", ["view_transform.bev_pool", *(name for names in MODULES.values() for name in names)])
def test_tensors(run: Run, name: str) -> None:
    golden.assert_matches(name, run.tensors[name])


def test_dense_heatmap(run: Run) -> None:
    golden.assert_matches("bbox_head.dense_heatmap", run.outputs.heatmap)


def test_losses(run: Run) -> None:
    for name, expected in golden.summary()["losses"].items():
        kind = "stats" if name == "matched_ious" else "loss"
        assert float(run.losses[f"{kind}/object/{name}"]) == pytest.approx(expected, rel=1e-3), name


def recorded(name: str) -> Tensor:
    stats = golden.summary()["stats"][f"bbox_head.{name}"]
    return torch.from_numpy(golden.recorded()[f"bbox_head.{name}/values"]).view(stats["shape"])


def matching_queries(run: Run) -> list[tuple[int, int, int]]:
    """(sample, our query, recorded query) with the same cell and class."""
    pairs = []
    labels = torch.from_numpy(golden.recorded()["bbox_head.query_labels"])
    for sample in range(2):
        theirs = {
            (*position.tolist(), int(label)): i
            for i, (position, label) in enumerate(zip(recorded("query_pos")[sample], labels[sample], strict=True))
        }
        ours = run.tensors["bbox_head.query_pos"][sample]
        for i, (position, label) in enumerate(zip(ours, run.outputs.query_labels[sample], strict=True)):
            partner = theirs.get((*position.tolist(), int(label)))
            if partner is not None:
                pairs.append((sample, i, partner))
    return pairs


def test_queries_and_what_is_predicted_for_them(run: Run) -> None:
    pairs = matching_queries(run)
    assert len(pairs) >= QUERIES - DIFFERENT_QUERIES
    sample, ours, theirs = torch.tensor(pairs).T
    start = 0
    branches = {"heatmap": run.outputs.logits, "query_heatmap_score": run.outputs.query_scores}
    for name, width in BRANCHES.items():
        branches[name] = run.outputs.codes[..., start : start + width]
        start += width
    for name, values in branches.items():
        errors = (values[sample, ours] - recorded(name)[sample, :, theirs]).abs()
        assert float(errors.max()) < 1e-2, name


def test_queries_start_with_the_recorded_features(run: Run) -> None:
    sample, ours, theirs = torch.tensor(matching_queries(run)).T
    in_their_order = torch.zeros(2, 128, 200)
    in_their_order[sample, :, theirs] = run.tensors["bbox_head.query_feat_in"][sample, ours]
    golden.assert_matches("bbox_head.query_feat_in", in_their_order, outliers=0.005 + DIFFERENT_QUERIES / QUERIES)


@pytest.mark.parametrize("sample", [0, 1])
def test_predictions(run: Run, sample: int) -> None:
    stored = golden.recorded()
    boxes = stored[f"predict.{sample}.boxes"].astype(np.float64)
    boxes[:, 2] += boxes[:, 5] / 2
    found = run.predictions
    assert found.boxes is not None
    assert found.scores is not None
    assert found.labels is not None
    assert abs(len(found.boxes[sample]) - len(boxes)) <= DIFFERENT_QUERIES
    unmatched = 0
    ours = found.boxes[sample].double().numpy()
    for box, score, label in zip(ours, found.scores[sample], found.labels[sample], strict=True):
        errors = np.abs(boxes - box)
        errors[:, 6] = np.abs(np.sin(errors[:, 6] / 2)) * 2
        same = (stored[f"predict.{sample}.labels"] == int(label)) & (
            np.abs(stored[f"predict.{sample}.scores"] - float(score)) < 1e-2
        )
        unmatched += not (same & (errors.max(1) < 1e-2)).any()
    assert unmatched <= DIFFERENT_QUERIES
