"""What a config of PETRv2 may not say, in one sentence each."""

from __future__ import annotations

import pytest

from bevctl.config.load import load
from bevctl.errors import BevctlError


@pytest.mark.parametrize(
    ("base", "sets", "message"),
    [
        ("petrv2", ["model.lidar={}"], "model.lidar is given, but petrv2 sees with cameras alone."),
        (
            "petrv2",
            ["model.camera=null", "model.lidar={}"],
            "model.lidar is given, but petrv2 sees with cameras alone.",
        ),
        ("petrv2", ["model.camera.view={}"], "model.camera.view is given, but petrv2 has no view transform."),
        ("petrv2", ["model.camera.backbone=swin"], "which gives a map of stride 8 that petrv2 does not read."),
        ("petrv2", ["model.petr=null"], "model.type is petrv2, but model.petr is null."),
        ("petrv2", ["model.petr.attention_heads=7"], "model.petr: 7 attention heads do not divide hidden 256."),
        ("petrv2", ["model.petr.hidden=258", "model.petr.attention_heads=2"], "model.petr.hidden is 258; half of it"),
        ("petrv2", ["model.petr.depth_start=70"], "model.petr.depth_start is 70.0, beyond position_range at 61.2."),
        ("petrv2", ["model.petr.position_range=[1, 0, 0, 0, 1, 1]"], "position_range is empty in x: 1.0 to 0.0."),
        ("petrv2", ["model.object.hidden=64"], "model.object.hidden is 64, but only bevfusion has it."),
        ("petrv2", ["model.object.box_z=top"], "model.object.box_z is top, but only bevfusion has it."),
        ("petrv2", ["model.object=null"], "model.object and model.map are both null."),
        ("petrv2_seg", ["model.map.xbound=[-50, 50, 1.0]"], "gives 100 cells, and 25 queries make 200."),
        ("petrv2_seg", ["model.map.class_weights=[1, 2]"], "model.map.class_weights has 2 values for 3 map classes."),
        ("bevfusion_det", ["model.petr={}"], "model.petr is given, but model.type is bevfusion."),
        ("bevfusion_det", ["model.camera.view=null"], "model.camera.view is null, but bevfusion lifts images"),
        ("bevfusion_det", ["data.previous={}"], "data.previous is given, but bevfusion sees one moment."),
    ],
)
def test_a_broken_rule_names_the_values(base: str, sets: list[str], message: str) -> None:
    with pytest.raises(BevctlError) as caught:
        load(base, sets=sets)
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("base", "sets"),
    [
        ("petrv2", ["data.previous=null"]),
        ("petrv2", ["model.checkpointing=[camera, decoder]"]),
        ("petrv2", ["model.camera.backbone=resnet50"]),
        ("petrv2_seg", ["model.map.xbound=[-40, 40, 1.0]", "model.petr.map_queries=[10, 25]"]),
        ("bevfusion_seg", ["model.map.class_weights=[1, 2, 3, 4, 5, 6]", "model.map.focal_alpha=0.25"]),
    ],
)
def test_what_is_allowed(base: str, sets: list[str]) -> None:
    assert load(base, sets=sets).notes == []
