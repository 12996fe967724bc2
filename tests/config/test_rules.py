"""What must hold between values: a sentence that names the value, its file and line, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.config import rules
from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.errors import BevctlError


def test_the_defaults_hold() -> None:
    assert list(rules.problems(Config())) == []


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.camera=null", "model.lidar=null"], "model.camera and model.lidar are both null."),
        (["model.object=null"], "model.object and model.map are both null."),
        (["model.lidar=null"], "model.camera.view.kind is depth_lss, which reads LiDAR points"),
        (["model.checkpointing=[camera, fuser]"], "model.checkpointing holds 'fuser'."),
        (["model.point_cloud_range=[54, -54, -5, -54, 54, 3]"], "range is empty in x: 54.0 to -54.0."),
        (["model.lidar.voxel_size=[0.07, 0.075, 0.2]"], "-54.0 to 54.0 m in x is no whole number of voxels of 0.07 m."),
        (["model.lidar.voxel_size=[0.1, 0.075, 0.2]"], "in x is 1080 voxels, no multiple of the network's stride 16."),
        (["model.lidar.voxel_size=[0.075, 0.075, 0.8]"], "-5.0 to 3.0 m in z is 10 voxels, too few"),
        (["model.camera.view.xbound=[-54, 54, 0.6]"], "The camera's grid in x (-54 to 54 m, cell 1.2) is not that of"),
        (["model.camera.view.ybound=[-51.2, 51.2, 0.4]"], "The camera's grid in y (-51.2 to 51.2 m, cell 0.8)"),
        (["model.camera.view.xbound=[54, -54, 0.3]"], "model.camera.view.xbound is [54.0, -54.0, 0.3]."),
        (["model.camera.view.xbound=[-54, 54, 0]"], "model.camera.view.xbound is [-54.0, 54.0, 0.0]."),
        (["model.camera.view.dbound=[1, 60, 0.7]"], "1.0 to 60.0 is no whole number of steps of 0.7."),
        (["model.camera.view.zbound=[-10, 10, 5]"], "model.camera.view.zbound gives 4 cells; the view is flat."),
        (["model.camera.view.dbound=[0, 60, 0.5]"], "model.camera.view.dbound starts at no depth."),
        (["model.camera.image_size=[256, 700]"], "is [256, 700]; both must be multiples of 32."),
        (["model.camera.swin.depths=[2, 2]"], "model.camera.swin has 2 depths and 4 heads."),
        (["model.camera.swin.heads=[5, 6, 12, 24]"], "5 heads do not divide the 96 channels of stage 1."),
        (["model.object.attention_heads=7"], "7 attention heads do not divide hidden 128."),
        (["model.object.nms_kernel=2"], "model.object.nms_kernel is 2."),
        (["model.map.xbound=[-50, 50, 0.3]"], "model.map.xbound: -50.0 to 50.0 is no whole number of steps of 0.3."),
        (["model.map.xbound=[-50, 50, 1e-320]"], "is no whole number of steps of 1e-320."),
        (["data.classes=[car, van]"], "data.classes holds 'van', which is no nuScenes class."),
        (["data.classes=[car, bus, car]"], "data.classes holds 'car' twice."),
        (["data.map_classes=[]"], "data.map_classes is empty."),
        (["data.previous={train: [9, 3]}"], "data.previous.train is [9, 3]: the low end comes first."),
        (["data.previous={}"], "data.previous is given, but bevfusion sees one moment."),
        (["data.image.pad=true"], "data.image.pad is true, but bevfusion would look at the padding."),
        (["data.image.resize=[0.6, 0.4]"], "data.image.resize is [0.6, 0.4]: the low end comes first."),
        (["data.space.rotate=[1, -1]"], "data.space.rotate is [1.0, -1.0]: the low end comes first."),
        (["optim.lr_scaling=sqrt"], "optim.lr_scaling is sqrt, but optim.base_batch or optim.base_lr is not given."),
        (["optim.groups=[{lr: 0.1}]"], "A group of optim.groups has no match."),
        (["train.best=mAPs"], "train.best is 'mAPs'."),
        (["name=a/b"], "name must be usable as a folder name, not 'a/b'."),
        (["expect.loss=3"], "expect.loss must be low:high, not '3'."),
        (["expect.loss=3:2"], "expect.loss must be low:high, not '3:2'."),
        (["expect.loss=a:b"], "expect.loss must be low:high, not 'a:b'."),
        (["expect.loss=':'"], "expect.loss must be low:high, not ':'."),
        (["expect.loss=[2.8, 2.5]"], "expect.loss must be low:high, not '2.8:2.5'."),
        (["expect.loss=[1, 2, 3]"], "expect.loss must be low:high, not '1:2:3'."),
        (["expect.loss=1:2@9"], "expect.loss must be low:high, not '1:2@9'."),
    ],
)
def test_a_broken_rule_names_the_values(sets: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 0")
    with pytest.raises(BevctlError) as caught:
        load(path, sets=sets)
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "sets",
    [
        ["model.camera=null"],
        ["model.lidar=null", "model.camera.view.kind=lss"],
        ["model.object=null", "model.map={}"],
        ["model.map={}", "data.map_classes=[drivable_area, vehicle]"],
        ["expect.loss=2.5:", "expect.mAP=':0.9'"],
        ["expect.loss=[2.5, null]", "expect.iter_time_s=1.8:2.0@500:9000"],
        ["optim.lr_scaling=linear", "optim.base_batch=8", "optim.base_lr=2e-5"],
        ["model.camera.backbone=resnet50", "model.camera.swin.heads=[5, 5]"],
    ],
)
def test_what_is_allowed(sets: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 0")
    assert load(path, sets=sets).config.name == "plain"


def test_the_message_opens_with_where_the_value_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("model:\n  object:\n    attention_heads: 7\n")
    with pytest.raises(BevctlError, match=r"^my\.yaml:3: model\.object: 7 attention heads"):
        load("my.yaml")
    with pytest.raises(BevctlError, match=r"^--set train\.best=x: train\.best is 'x'"):
        load("tiny", sets=["train.best=x"])
