from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.config.load import load, to_dict
from bevctl.engine.checkpoint import Checkpoint
from bevctl.engine.checkpoint_convert import Target, convert_checkpoint
from bevctl.engine.class_order import check_class_order, classes_of
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from bevctl.models.layouts import to_mmdet3d
from tests.models.nano import nano_config, with_value

CONFIG = nano_config(**{"model.map": None})
NAMES = list(CONFIG.data.classes)
TURNED = NAMES[::-1]


def file_with(meta: dict[str, Any], *names: str) -> Checkpoint:
    return Checkpoint(Path("x.pth"), {"meta": meta, "state_dict": {name: torch.zeros(1) for name in names}})


def own_meta(key: str, names: list[str]) -> dict[str, Any]:
    return {"config": to_dict(with_value(CONFIG, f"data.{key}", tuple(names)))}


@pytest.mark.parametrize(
    ("meta", "names"),
    [
        ({"CLASSES": TURNED}, ["heads.object.shared_conv.bias"]),
        ({"dataset_meta": {"classes": tuple(TURNED)}}, ["bbox_head.shared_conv.bias", "pts_neck.deblocks.0.0.weight"]),
        ({"CLASSES": TURNED}, ["module.bbox_head.shared_conv.bias", "module.pts_neck.deblocks.0.0.weight"]),
        ({"CLASSES": TURNED}, ["pts_bbox_head.cls_branches.0.0.bias", "pts_bbox_head.transformer.a"]),
        (own_meta("classes", TURNED), ["heads.object.shared_conv.bias"]),
    ],
)
def test_the_same_classes_in_another_order_are_refused(meta: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(BevctlError, match=r"x\.pth was trained with data\.classes in another order: traffic_cone") as e:
        check_class_order(file_with(meta, *names), CONFIG)
    setting = e.value.hint.partition("Set ")[2].removesuffix(".")
    check_class_order(file_with(meta, *names), load("bevfusion_det", sets=[setting]).config)


def test_map_classes_of_our_own_files_have_an_order_too() -> None:
    names = list(CONFIG.data.map_classes)
    check_class_order(file_with(own_meta("map_classes", names), "heads.map.classifier.6.bias"), CONFIG)
    with pytest.raises(BevctlError, match=r"data\.map_classes in another order"):
        check_class_order(file_with(own_meta("map_classes", names[::-1]), "heads.map.classifier.6.bias"), CONFIG)


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ({}, "heads.object.shared_conv.bias"),
        ({"CLASSES": NAMES}, "heads.object.shared_conv.bias"),
        ({"CLASSES": TURNED}, "encoders.lidar.backbone.conv_out.1.bias"),
        ({"CLASSES": TURNED}, "bbox_head.cls_convs.0.0.conv.weight"),  # of FCOS3D, whose backbone is taken alone
        ({"CLASSES": ["car", "person"]}, "heads.object.shared_conv.bias"),
        ({"CLASSES": None, "dataset_meta": 3, "config": "text"}, "heads.object.shared_conv.bias"),
    ],
)
def test_nothing_else_is(meta: dict[str, Any], name: str) -> None:
    check_class_order(file_with(meta, name, "backbone.layer1.0.conv1.weight"), CONFIG)


def test_only_names_are_classes() -> None:
    assert classes_of({"CLASSES": [1, 2]}) == ()
    assert classes_of({"CLASSES": "car"}) == ()


def test_a_conversion_for_a_config_asks() -> None:
    state = to_mmdet3d(build_model(CONFIG).state_dict())
    theirs = Checkpoint(Path("x.pth"), {"meta": {"dataset_meta": {"classes": TURNED}}, "state_dict": state})
    assert convert_checkpoint(theirs, Target("bevctl")).layout == "mmdet3d"
    with pytest.raises(BevctlError, match="in another order"):
        convert_checkpoint(theirs, Target("bevctl", config=CONFIG))
