"""`bevctl memory` counts what the model is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Outcome

Invoke = Callable[..., Outcome]

CAMERA = {"encoders.camera.backbone": 27_520_506, "encoders.camera.neck": 1_591_296}
LIDAR = {"encoders.lidar": 2_694_352}
FUSED = {"fuser": 774_656, "decoder": 4_576_768}
DEPTH_LSS = {"encoders.camera.vtransform": 1_610_726}
LSS = {"encoders.camera.vtransform": 224_166}
OBJECT = {"heads.object": 1_034_910}
MAP = {"heads.map": 4_723_718}


@pytest.mark.parametrize(
    ("name", "total", "parts"),
    [
        ("bevfusion_det", 39_803_214, CAMERA | DEPTH_LSS | LIDAR | FUSED | OBJECT),
        ("bevfusion_seg", 42_105_462, CAMERA | LSS | LIDAR | FUSED | MAP),
        ("bevfusion_multitask_fp16", 44_526_932, CAMERA | DEPTH_LSS | LIDAR | FUSED | OBJECT | MAP),
    ],
)
def test_the_counts_are_those_of_the_published_models(
    invoke: Invoke, name: str, total: int, parts: dict[str, int]
) -> None:
    outcome = invoke("memory", name, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["schema"] == "bevctl.memory/1"
    assert document["parameters"] == {"trainable": total, "by_part": parts}


def test_the_table_lists_the_parts_and_their_sum(invoke: Invoke) -> None:
    outcome = invoke("memory", "tiny", "--set", "model.camera=null")
    assert outcome.code == 0
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in outcome.out.splitlines() if "│" in line]
    counts = {name: int(count.replace(",", "")) for name, count in rows}
    assert set(counts) == {"encoders.lidar", "decoder", "heads.object", "heads.map", "total"}
    assert counts.pop("total") == sum(counts.values())


def test_the_weights_of_the_backbone_are_not_needed(invoke: Invoke) -> None:
    outcome = invoke("memory", "tiny", "--set", "model.camera.pretrained=/nowhere/swin.pth", "--json")
    assert outcome.code == 0
    assert "encoders.camera.backbone" in outcome.document["parameters"]["by_part"]


def test_a_config_that_does_not_fit_together_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke("memory", "tiny", "--set", "model.lidar.voxel_size=[0.3, 0.2, 0.2]", "--json")
    assert outcome.code == 2
    assert "model.lidar.voxel_size" in outcome.document["error"]["message"]
