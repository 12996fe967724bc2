from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.errors import BevctlError
from bevctl.models.build import build_model, trainable_parameters
from bevctl.models.layouts import distinct, family, our_name, recognise, to_ours, to_petr
from bevctl.models.layouts_petr import CODE_WEIGHTS, MAP_CLASSES, from_petr, unequal_code_weights
from bevctl.models.layouts_vovnet import from_vovnet_name, to_vovnet_name
from tests.models.keys import inventory, needs_keys
from tests.models.nano_petrv2 import nano_petrv2_config

NAMES = ["petrv2_det", "petrv2_seg"]
CONFIGS = {"petrv2_det": "petrv2", "petrv2_seg": "petrv2_seg"}
PARAMETERS = {"petrv2_det": 85_116_740, "petrv2_seg": 84_860_739}


@functools.cache
def full_size_model(name: str) -> nn.Module:
    """The model of the packaged config without storage: only names, shapes and types."""
    with torch.device("meta"):
        return build_model(load(CONFIGS[name]).config)


def recorded(name: str) -> dict[str, Tensor]:
    """The entries of the recorded file, all zero, in next to no memory."""
    return {key: torch.zeros(()).expand(shape) for key, (shape, _) in inventory(name).items()}


@needs_keys
@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_entry_has_its_place(name: str) -> None:
    converted, layout = to_ours(recorded(name))
    assert layout == "petr"
    assert {key: tuple(value.shape) for key, value in converted.items()} == {
        key: tuple(value.shape) for key, value in full_size_model(name).state_dict().items()
    }


@needs_keys
@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_entry_is_exported(name: str) -> None:
    state = {key: torch.zeros(()).expand(value.shape) for key, value in full_size_model(name).state_dict().items()}
    assert {key: tuple(value.shape) for key, value in to_petr(state).items()} == {
        key: shape for key, (shape, _) in inventory(name).items()
    }


@needs_keys
@pytest.mark.parametrize("name", NAMES)
def test_what_learns_and_how_much(name: str) -> None:
    model, kinds = full_size_model(name), {key: kind for key, (_, kind) in inventory(name).items()}
    assert sum(trainable_parameters(model).values()) == PARAMETERS[name]
    learned = {our_name(key, "petr") for key, kind in kinds.items() if kind.startswith("param")}
    assert {key for key, parameter in model.named_parameters() if parameter.requires_grad} == learned


def trained(config: Config, seed: int = 1) -> dict[str, Tensor]:
    """A state in which no two values are equal by chance."""
    torch.manual_seed(seed)
    state = build_model(config).state_dict()
    for value in state.values():
        value.uniform_(0.1, 1.0) if value.is_floating_point() else value.fill_(7)
    return state


def of_one_task(task: str) -> Config:
    other = "map" if task == "object" else "object"
    return nano_petrv2_config(**{f"model.{other}": None})


def test_tasks_there_and_back() -> None:
    for task in ("object", "map"):
        state = trained(of_one_task(task))
        theirs = to_petr(state)
        assert not any(key.startswith(("encoders.", "heads.")) for key in theirs)
        back = from_petr(theirs)
        assert back.keys() == state.keys()
        moved = [key for key, value in back.items() if not torch.equal(value, state[key])]
        assert all(".task_heads.3.2." in key for key in moved)
        assert len(moved) == (4 if task == "object" else 0)


def test_yaw_and_nothing_else_of_a_box_changes() -> None:
    """PETR's code names width before length too; its yaw is -yaw - pi / 2 of ours."""
    state = trained(of_one_task("object"))
    yaw = torch.tensor(0.3)
    branch = "heads.object.reg_branches.1.task_heads"
    state[f"{branch}.3.2.bias"] = torch.stack([yaw.sin(), yaw.cos()])
    theirs = to_petr(state)
    sine, cosine = theirs["pts_bbox_head.reg_branches.1.task_heads.3.2.bias"]
    expected = -yaw - torch.pi / 2
    torch.testing.assert_close(torch.stack([sine, cosine]), torch.stack([expected.sin(), expected.cos()]))
    for head in (0, 1, 2, 4):
        assert theirs[f"pts_bbox_head.reg_branches.1.task_heads.{head}.2.bias"] is state[f"{branch}.{head}.2.bias"]


def test_a_map_decoder_is_stored_for_each_layer() -> None:
    state = trained(of_one_task("map"))
    theirs = to_petr(state)
    for short, ours in MAP_CLASSES.items():
        stored = [key for key in theirs if f"lane_branches_{short}." in key and key.endswith("to_logits.2.bias")]
        assert stored == [f"pts_bbox_head.lane_branches_{short}.{layer}.to_logits.2.bias" for layer in range(2)]
        assert all(theirs[key] is state[f"heads.map.lane_branches.{ours}.to_logits.2.bias"] for key in stored)
    assert any(key.startswith("pts_bbox_head.se.") for key in theirs)
    assert distinct(theirs) == [
        key for key in theirs if "_dri.1" not in key and "_lan.1" not in key and "_vie.1" not in key
    ]


def test_map_decoders_that_differ_are_refused() -> None:
    theirs = to_petr(trained(of_one_task("map")))
    key = "pts_bbox_head.lane_branches_lan.1.layers.0.up.bias"
    theirs[key] = theirs[key].clone()
    from_petr(theirs)
    theirs[key] += 1
    with pytest.raises(BevctlError, match=r"lane_branches_lan\.0\.layers\.0\.up\.bias and .*lan\.1.* differ"):
        from_petr(theirs)
    theirs[key] = theirs[key].new_full(theirs[key].shape, torch.nan)
    for layer in range(2):
        theirs[f"pts_bbox_head.lane_branches_lan.{layer}.layers.0.up.bias"] = theirs[key].clone()
    from_petr(theirs)


def test_two_heads_are_no_model_of_petr() -> None:
    with pytest.raises(ValueError, match="one head"):
        to_petr(trained(nano_petrv2_config()))


def test_weights_of_the_box_loss_are_told_where_they_differ() -> None:
    theirs = to_petr(trained(of_one_task("object")))
    assert theirs[CODE_WEIGHTS].tolist() == [1.0] * 10
    assert unequal_code_weights(theirs) is None
    assert unequal_code_weights({}) is None
    assert unequal_code_weights({f"module.{CODE_WEIGHTS}": torch.tensor([1.0, 0.5])}) == [1.0, 0.5]


@pytest.mark.parametrize("prefix", ["", "img_backbone.", "backbone.bottom_up.", "module.img_backbone."])
def test_a_file_of_the_backbone_alone(prefix: str) -> None:
    model = build_model(nano_petrv2_config()).get_submodule("encoders.camera.backbone")
    theirs = {prefix + str(to_vovnet_name(key)): value for key, value in model.state_dict().items()}
    converted, layout = to_ours({**theirs, "head.weight": torch.zeros(1)})
    assert layout == "vovnet_backbone"
    assert list(converted) == [f"encoders.camera.backbone.{key}" for key in model.state_dict()]
    assert family(converted) == ""


def test_a_backbone_of_another_kind_is_timms() -> None:
    theirs = "img_backbone.layer1.0.conv1.weight"
    assert our_name(theirs, "petr") == "encoders.camera.backbone.model.layer1.0.conv1.weight"
    state = {our_name(theirs, "petr"): torch.zeros(1), "encoders.camera.position.fpe.x": torch.zeros(1)}
    assert theirs in to_petr(state)


def test_a_bare_state_of_ours_is_told_from_others() -> None:
    state = trained(of_one_task("object"))
    converted, layout = to_ours(state)
    assert layout == "bevctl"
    assert all(converted[key] is value for key, value in state.items())
    assert recognise(["encoders.camera.neck.lateral_convs.0.conv.weight"]) == "mit"


def test_unknown_entries_keep_their_names() -> None:
    names = ["pts_bbox_head.memory.0", "img_neck.x", "pts_bbox_head.transformer.decoder.layers.0.gate.weight"]
    assert our_name(names[0], "petr") == names[0]
    assert our_name(names[1], "petr") == names[1]
    assert our_name(names[2], "petr") == "heads.object.transformer.layers.0.gate.weight"
    assert from_vovnet_name("stage3.OSA3_2.layers.1.OSA3_2_0/conv.weight") is None
    assert to_vovnet_name("stages.0.0.other.weight") is None


@given(
    place=st.sampled_from(["stem", "layer", "concat", "ese"]),
    stage=st.integers(2, 5),
    block=st.integers(1, 12),
    layer=st.integers(0, 9),
    part=st.sampled_from(["conv.weight", "norm.weight", "norm.num_batches_tracked"]),
)
def test_vovnet_names_both_ways(place: str, stage: int, block: int, layer: int, part: str) -> None:
    own = f"OSA{stage}_{block}"
    theirs = {
        "stem": f"stem.stem_{block}/{part}",
        "layer": f"stage{stage}.{own}.layers.{layer}.{own}_{layer}/{part}",
        "concat": f"stage{stage}.{own}.concat.{own}_concat/{part}",
        "ese": f"stage{stage}.{own}.ese.fc.bias",
    }[place]
    ours = from_vovnet_name(theirs)
    assert ours is not None
    assert "/" not in ours
    assert to_vovnet_name(ours) == theirs
