"""Checkpoints of the PETR repository: loaded, continued, written, through files as its programs read and write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.load import to_dict
from bevctl.config.schema import Config
from bevctl.engine.checkpoint import FORMAT, Checkpoint, load_state, read_checkpoint, write_checkpoint
from bevctl.engine.checkpoint_convert import Target, convert_checkpoint
from bevctl.engine.checkpoint_report import inspect_checkpoint
from bevctl.engine.resume import foreign_parameter_states
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from tests.models.nano import nano_config
from tests.models.nano_petrv2 import nano_petrv2_config

BOTH = nano_petrv2_config()
DETECTION = nano_petrv2_config(**{"model.map": None})
SEGMENTATION = nano_petrv2_config(**{"model.object": None})
ONE_TASK = pytest.mark.parametrize("config", [DETECTION, SEGMENTATION], ids=["detection", "segmentation"])


def weights(config: Config, seed: int = 1) -> dict[str, Tensor]:
    """A state in which no two values are equal by chance."""
    torch.manual_seed(seed)
    state = build_model(config).state_dict()
    for value in state.values():
        value.uniform_(0.1, 1.0) if value.is_floating_point() else value.fill_(7)
    return state


def own(state: dict[str, Tensor], config: Config) -> Checkpoint:
    meta = {"format": FORMAT, "version": "0", "epoch": 3, "iter": 30, "config": to_dict(config)}
    return Checkpoint(Path("own.pth"), {"state_dict": state, "meta": meta})


def exported(config: Config, path: Path, **target: Any) -> Checkpoint:
    """The weights of `config` as a file of PETR, written and read again."""
    write_checkpoint(path, convert_checkpoint(own(weights(config), config), Target("petr", **target)).content)
    return read_checkpoint(path)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


@ONE_TASK
def test_export_and_load_give_every_bit_again(tmp_path: Path, config: Config) -> None:
    theirs = exported(config, tmp_path / "petr.pth")
    assert {key.split(".")[0] for key in theirs.state_dict} == {"img_backbone", "img_neck", "pts_bbox_head"}
    assert (theirs.epoch, theirs.iteration, theirs.meta["CLASSES"]) == (3, 30, list(config.data.classes))
    assert inspect_checkpoint(tmp_path / "petr.pth").layout == "petr"
    model = build_model(config)
    report = load_state(model, theirs)
    assert report.layout == "petr"
    assert report.missing == report.unexpected == report.mismatched == []
    assert same(model.state_dict(), weights(config))
    back = convert_checkpoint(theirs, Target("bevctl", config=config))
    assert same(back.content["state_dict"], weights(config))
    assert back.layout == "petr"


def test_a_model_of_both_tasks_is_written_task_by_task(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="The model has two heads, and one of PETR has a single one") as caught:
        exported(BOTH, tmp_path / "petr.pth")
    assert "--task map" in caught.value.hint
    for task, config in (("object", DETECTION), ("map", SEGMENTATION)):
        theirs = exported(BOTH, tmp_path / f"{task}.pth", task=task)
        model = build_model(config)
        load_state(model, theirs).require(share_of_file=1, share_of_model=1)
        state = weights(BOTH)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_counts_are_of_our_entries() -> None:
    done = convert_checkpoint(own(weights(SEGMENTATION), SEGMENTATION), Target("petr"))
    total = len(weights(SEGMENTATION))
    assert sum(part["written"] for part in done.parts.values()) == total
    assert sum(part["left out"] for part in done.parts.values()) == 0
    assert len(done.content["state_dict"]) == total + 3 * 15  # each decoder a second time, for the second layer
    detection = convert_checkpoint(own(weights(DETECTION), DETECTION), Target("petr")).parts
    assert detection["heads.object"]["reshaped"] == 4  # the yaw's weight and bias after each layer
    assert "other" not in detection


def test_families_do_not_mix() -> None:
    with pytest.raises(BevctlError, match="are those of PETRv2, and mit-bevfusion has no model") as caught:
        convert_checkpoint(own(weights(DETECTION), DETECTION), Target("mit"))
    assert caught.value.hint == "Write them with --to petr or bevctl."
    fusion = nano_config(**{"model.map": None})
    with pytest.raises(BevctlError, match="are those of BEVFusion, and PETR has no model") as caught:
        convert_checkpoint(own(weights(fusion), fusion), Target("petr"))
    assert caught.value.hint == "Write them with --to mit or mmdet3d or bevctl."


def test_what_the_conversion_says(tmp_path: Path) -> None:
    theirs = exported(DETECTION, tmp_path / "petr.pth")
    theirs.state_dict["pts_bbox_head.code_weights"][8:] = 0.2
    notes = convert_checkpoint(theirs, Target("bevctl")).notes
    assert notes[0].startswith("Detection head converted from PETR's yaw")
    assert "1, 1, 1, 1, 1, 1, 1, 1, 0.2, 0.2 in its loss" in notes[1]
    with pytest.raises(BevctlError, match="cannot be converted"):
        convert_checkpoint(theirs, Target("bevctl", boxes="lwh"))


@pytest.mark.parametrize(("backbone", "notes"), [("resnet18", 0), ("mobilenetv3_small_050", 1)])
def test_a_resnet_is_written_under_its_own_names(backbone: str, notes: int) -> None:
    pytest.importorskip("timm")
    config = nano_petrv2_config(**{"model.map": None, "model.camera.backbone": backbone})
    state = build_model(config).state_dict()
    done = convert_checkpoint(own(state, config), Target("petr"))
    assert len(done.notes) == notes
    if not notes:
        assert "img_backbone.layer1.0.conv1.weight" in done.content["state_dict"]
        back = convert_checkpoint(Checkpoint(Path("x.pth"), done.content), Target("bevctl", config=config))
        assert same(back.content["state_dict"], state)


def test_an_image_backbone_alone_fits_both_families(tmp_path: Path) -> None:
    theirs = exported(DETECTION, tmp_path / "petr.pth").state_dict
    backbone = {key: value for key, value in theirs.items() if key.startswith("img_backbone.")}
    camera = BOTH.model.camera
    assert camera is not None
    fusion = nano_config(**{"model.camera.backbone": "vovnet", "model.camera.vovnet": camera.vovnet})
    for config in (BOTH, fusion):
        model = build_model(config)
        report = load_state(model, Checkpoint(Path("x.pth"), {"state_dict": backbone}))
        assert report.layout == "vovnet_backbone"
        assert report.share_of_file == 1
        inside = model.get_submodule("encoders.camera.backbone").state_dict()
        expected = weights(DETECTION)
        assert all(torch.equal(value, expected[f"encoders.camera.backbone.{key}"]) for key, value in inside.items())


def their_training_file(config: Config) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A file as mmcv's runner leaves it, a group for each parameter, and the averages of Adam by their names."""
    theirs = convert_checkpoint(own(weights(config), config), Target("petr")).content["state_dict"]
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    first = [key for key in theirs if not key.endswith(buffers) and ".1." not in key.partition("lane_branches_")[2][:7]]
    generator = torch.Generator().manual_seed(0)
    averages = {key: torch.randn(theirs[key].shape, generator=generator) for key in first if "code_weights" not in key}
    states = {
        index: {"step": 5, "exp_avg": averages[key], "exp_avg_sq": averages[key].square()}
        for index, key in enumerate(first)
        if key in averages
    }
    groups = [{"params": [index], "initial_lr": 2e-4} for index in range(len(first))]
    content = {
        "state_dict": theirs,
        "optimizer": {"state": states, "param_groups": groups},
        "meta": {"epoch": 2, "iter": 20, "mmcv_version": "1.4.0"},
    }
    return Checkpoint(Path("x.pth"), content), averages


@ONE_TASK
def test_their_optimizer_goes_on(config: Config) -> None:
    """Parameters that their files hold once a layer are one; the weights of the box loss are a frozen one."""
    checkpoint, averages = their_training_file(config)
    states = foreign_parameter_states(checkpoint)
    model: nn.Module = build_model(config)
    assert states.keys() == {name for name, _ in model.named_parameters()}
    pairs = {
        "encoders.camera.backbone.stages.3.0.concat.conv.weight": "img_backbone.stage5.OSA5_1.concat."
        "OSA5_1_concat/conv.weight",
        "heads.object.transformer.layers.1.cross_attn.out_proj.bias": "pts_bbox_head.transformer.decoder.layers.1."
        "attentions.1.attn.out_proj.bias",
        "heads.map.lane_branches.vehicle.to_logits.2.bias": "pts_bbox_head.lane_branches_vie.0.to_logits.2.bias",
    }
    compared = [ours for ours, theirs in pairs.items() if ours in states and theirs in averages]
    assert len(compared) == 2
    for ours in compared:
        assert torch.equal(states[ours]["exp_avg"], averages[pairs[ours]])
    if config is DETECTION:
        ours, theirs = "heads.object.reg_branches.0", "pts_bbox_head.reg_branches.0"
        rotation = "task_heads.3.2.weight"
        assert torch.equal(states[f"{ours}.{rotation}"]["exp_avg"], -averages[f"{theirs}.{rotation}"][[1, 0]])
        assert torch.equal(
            states[f"{ours}.{rotation}"]["exp_avg_sq"], averages[f"{theirs}.{rotation}"][[1, 0]].square()
        )
