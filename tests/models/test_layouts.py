from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.config.load import load
from bevctl.models.build import build_model
from bevctl.models.layouts import (
    exchange_box_convention,
    match_decoders,
    mmdet3d_name,
    of_task,
    recognise,
    tasks,
    to_mit,
    to_mmdet3d,
    to_ours,
)
from bevctl.models.layouts_swin import match_bias_tables, swin_to_mmdet
from tests.models.keys import empty_state, inventory, needs_keys


@needs_keys
@pytest.mark.parametrize("name", ["mit_det", "mit_seg", "mit_multitask"])
def test_mit_names_pass_unchanged(name: str) -> None:
    state = empty_state(name)
    converted, layout = to_ours(state)
    assert layout == "mit"
    assert converted.keys() == state.keys()


@needs_keys
def test_mmdet3d_inventory_becomes_ours() -> None:
    converted, layout = to_ours(empty_state("mmdet3d"))
    assert layout == "mmdet3d"
    assert {key: tuple(value.shape) for key, value in converted.items()} == {
        key: shape for key, (shape, _) in inventory("mit_det").items()
    }


@needs_keys
def test_to_mmdet3d_is_the_inverse_in_names() -> None:
    assert set(to_mmdet3d(empty_state("mit_det"))) == set(inventory("mmdet3d"))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("encoders.camera.vtransform.depthnet.0.weight", "view_transform.depthnet.0.weight"),
        ("heads.object.decoder.0.multihead_attn.in_proj_bias", "bbox_head.decoder.0.cross_attn.attn.in_proj_bias"),
        ("heads.object.decoder.0.linear2.bias", "bbox_head.decoder.0.ffn.layers.1.bias"),
        ("heads.object.decoder.0.norm3.weight", "bbox_head.decoder.0.norms.2.weight"),
        ("decoder.neck.deblocks.1.0.weight", "pts_neck.deblocks.1.0.weight"),
        ("fuser.1.running_mean", "fusion_layer.1.running_mean"),
    ],
)
def test_names_both_ways(ours: str, theirs: str) -> None:
    assert mmdet3d_name(ours) == theirs
    assert list(to_ours({"img_neck.x": torch.zeros(1), theirs: torch.zeros(1)})[0])[1] == ours


def test_early_view_transform_prefix_and_wrappers() -> None:
    state = {"module.pts_neck.deblocks.0.0.weight": torch.zeros(1), "module.vtransform.dx": torch.ones(3)}
    converted, layout = to_ours(state)
    assert layout == "mmdet3d"
    assert set(converted) == {"decoder.neck.deblocks.0.0.weight", "encoders.camera.vtransform.dx"}


def test_spconv_kernels_are_told_by_shape() -> None:
    kernel = torch.randn(3, 3, 3, 5, 16)
    out_kernel = torch.randn(1, 1, 3, 4, 8)
    ours = {
        "encoders.lidar.backbone.conv_input.0.weight": kernel,
        "encoders.lidar.backbone.conv_out.0.weight": out_kernel,
    }
    theirs = {key: value.permute(4, 0, 1, 2, 3).contiguous() for key, value in ours.items()}
    for state in (ours, theirs):
        converted, _ = to_ours(state)
        assert torch.equal(converted["encoders.lidar.backbone.conv_input.0.weight"], kernel)
        assert torch.equal(converted["encoders.lidar.backbone.conv_out.0.weight"], out_kernel)


def test_input_is_left_alone() -> None:
    state = {"pts_middle_encoder.conv_input.0.weight": torch.randn(16, 3, 3, 3, 5)}
    before = state["pts_middle_encoder.conv_input.0.weight"].clone()
    to_ours(state)
    assert list(state) == ["pts_middle_encoder.conv_input.0.weight"]
    assert torch.equal(state["pts_middle_encoder.conv_input.0.weight"], before)


def test_unknown_names_are_kept_and_said() -> None:
    assert to_ours({"layer1.0.weight": torch.zeros(1)})[1] == "unknown"
    assert recognise(["backbone.layer1.0.conv1.weight", "bbox_head.cls_convs.0.0.conv.weight"]) == "unknown"
    assert recognise([]) == "unknown"


def _original_merging(x: Tensor, norm_weight: Tensor, reduction: Tensor) -> Tensor:
    """Patch merging as the original Swin release defines it, (H, W, C) → (H/2, W/2, 2C)."""
    patches = torch.cat([x[0::2, 0::2], x[1::2, 0::2], x[0::2, 1::2], x[1::2, 1::2]], dim=-1)
    return F.linear(F.layer_norm(patches, patches.shape[-1:], norm_weight), reduction)


def test_patch_merging_of_the_original_swin_computes_the_same() -> None:
    channels = 3
    x = torch.randn(4, 6, channels)
    original = {
        "layers.0.downsample.norm.weight": torch.randn(4 * channels),
        "layers.0.downsample.reduction.weight": torch.randn(2 * channels, 4 * channels),
    }
    converted = swin_to_mmdet(original)
    unfolded = nn.Unfold(2, stride=2)(x.permute(2, 0, 1)[None])[0].T.view(2, 3, 4 * channels)
    ours = F.linear(
        F.layer_norm(unfolded, unfolded.shape[-1:], converted["stages.0.downsample.norm.weight"]),
        converted["stages.0.downsample.reduction.weight"],
    )
    torch.testing.assert_close(ours, _original_merging(x, *original.values()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "backbone.", "module.backbone."])
def test_original_swin_names(prefix: str) -> None:
    names = [
        "patch_embed.proj.weight",
        "layers.1.blocks.0.attn.qkv.weight",
        "layers.1.blocks.0.attn.relative_position_bias_table",
        "layers.1.blocks.0.mlp.fc1.bias",
        "layers.1.blocks.1.attn_mask",
        "norm.weight",
        "head.weight",
    ]
    converted, layout = to_ours({prefix + name: torch.zeros(1) for name in names})
    assert layout == "swin_backbone"
    assert list(converted) == [
        "encoders.camera.backbone.patch_embed.projection.weight",
        "encoders.camera.backbone.stages.1.blocks.0.attn.w_msa.qkv.weight",
        "encoders.camera.backbone.stages.1.blocks.0.attn.w_msa.relative_position_bias_table",
        "encoders.camera.backbone.stages.1.blocks.0.ffn.layers.0.0.bias",
    ]


@pytest.mark.parametrize("head", ["roi_head.bbox_head.0.fc_cls.weight", "bbox_head.retina_cls.weight"])
def test_a_detector_gives_its_mmdet_backbone_only(head: str) -> None:
    names = ["backbone.stages.0.blocks.0.attn.w_msa.qkv.bias", "neck.conv.weight", head]
    state = {name: torch.zeros(1) for name in names}
    converted, layout = to_ours(state)
    assert layout == "mmdet_backbone"
    assert list(converted) == ["encoders.camera.backbone.stages.0.blocks.0.attn.w_msa.qkv.bias"]


def test_bias_tables_follow_the_window() -> None:
    name = "encoders.camera.backbone.stages.0.blocks.0.attn.w_msa.relative_position_bias_table"
    constant = torch.tensor([[1.0, -2.0]]).expand(49, 2)
    matched = match_bias_tables({name: constant, "other": torch.ones(1)}, {name: torch.zeros(169, 2)})
    torch.testing.assert_close(matched[name], torch.tensor([[1.0, -2.0]]).expand(169, 2))
    same = match_bias_tables({name: constant}, {name: torch.zeros(49, 2)})
    assert same[name] is constant
    other_heads = match_bias_tables({name: constant}, {name: torch.zeros(169, 3)})
    assert other_heads[name] is constant


def test_legacy_head_predicts_our_boxes() -> None:
    prefix = "heads.object.prediction_heads.0."
    width, length, legacy_yaw = 1.5, 4.0, 0.3
    state = {
        prefix + "dim.1.bias": torch.tensor([width, length, 2.0]).log(),
        prefix + "center.1.bias": torch.tensor([1.0, 2.0]),
    }
    state[prefix + "rot.1.bias"] = torch.stack([torch.tensor(legacy_yaw).sin(), torch.tensor(legacy_yaw).cos()])
    converted = exchange_box_convention(state)
    torch.testing.assert_close(converted[prefix + "dim.1.bias"].exp(), torch.tensor([length, width, 2.0]))
    sine, cosine = converted[prefix + "rot.1.bias"]
    expected = torch.tensor(-legacy_yaw - torch.pi / 2)
    torch.testing.assert_close(torch.stack([sine, cosine]), torch.stack([expected.sin(), expected.cos()]))
    assert converted[prefix + "center.1.bias"] is state[prefix + "center.1.bias"]


FULL_SIZE = {
    "mit_det": "bevfusion_det",
    "mit_seg": "bevfusion_seg",
    "mit_multitask": "bevfusion_multitask_fp16",
}
"""The packaged config of each recorded model."""


@functools.cache
def full_size_model(inventory_name: str) -> nn.Module:
    """The model without storage: only names, shapes, types and order."""
    with torch.device("meta"):
        return build_model(load(FULL_SIZE[inventory_name]).config)


@needs_keys
@pytest.mark.parametrize("name", FULL_SIZE)
def test_every_recorded_entry_of_mit_is_ours_and_is_exported_in_its_order(name: str) -> None:
    model, recorded = full_size_model(name), inventory(name)
    exported = to_mit(model.state_dict())
    assert [(key, tuple(value.shape)) for key, value in exported.items()] == [
        (key, shape) for key, (shape, _) in recorded.items()
    ]
    trained = {key for key, (_, kind) in recorded.items() if kind == "param"}
    assert {key for key, parameter in model.named_parameters() if parameter.requires_grad} == trained
    for key, value in exported.items():
        whole = key.endswith(("num_batches_tracked", "relative_position_index", ".nx"))
        assert value.dtype == (torch.int64 if whole else torch.float32), key


@needs_keys
def test_every_recorded_entry_of_mmdet3d_is_exported_in_its_order() -> None:
    """Kernels apart: the record has spconv 2's order of axes, and mmdet3d turns ours into it."""
    exported = to_mmdet3d(full_size_model("mit_det").state_dict())
    recorded = inventory("mmdet3d")
    assert list(exported) == list(recorded)
    for key, value in exported.items():
        shape = recorded[key][0]
        is_kernel = key.startswith("pts_middle_encoder.") and len(shape) == 5
        assert tuple(value.shape) == ((*shape[1:], shape[0]) if is_kernel else shape), key


def test_the_map_head_has_no_place_in_mmdet3d() -> None:
    state = {"fuser.0.weight": torch.zeros(1), "heads.map.classifier.0.weight": torch.zeros(1)}
    assert list(to_mmdet3d(state)) == ["fusion_layer.0.weight"]


def test_export_keeps_the_input() -> None:
    prefix = "heads.object.prediction_heads.0."
    state = {prefix + "dim.1.bias": torch.arange(3.0), prefix + "rot.1.bias": torch.tensor([1.0, 2.0])}
    exported = to_mit(state)
    assert exported[prefix + "dim.1.bias"].tolist() == [1, 0, 2]
    assert exported[prefix + "rot.1.bias"].tolist() == [-2, -1]
    assert state[prefix + "dim.1.bias"].tolist() == [0, 1, 2]
    back = exchange_box_convention(exported)
    assert all(torch.equal(back[key], value) for key, value in state.items())


def _with_two_decoders() -> dict[str, Tensor]:
    names = [
        "encoders.lidar.backbone.conv_out.1.bias",
        "decoder.object.backbone.blocks.0.0.weight",
        "decoder.map.backbone.blocks.0.0.weight",
        "heads.object.shared_conv.bias",
        "heads.map.classifier.6.bias",
    ]
    return {name: torch.full((1,), float(i)) for i, name in enumerate(names)}


def test_a_task_of_two_decoders_becomes_a_model_of_its_own() -> None:
    state = _with_two_decoders()
    assert tasks(state) == ["object", "map"]
    assert tasks(of_task(state, "map")) == []
    assert {key: float(value) for key, value in of_task(state, "map").items()} == {
        "encoders.lidar.backbone.conv_out.1.bias": 0.0,
        "decoder.backbone.blocks.0.0.weight": 2.0,
        "heads.map.classifier.6.bias": 4.0,
    }


@pytest.mark.parametrize("export", [to_mit, to_mmdet3d])
def test_two_decoders_have_no_place_elsewhere(export: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match="one decoder"):
        export(_with_two_decoders())


def test_one_decoder_is_given_to_each_task() -> None:
    state = {"decoder.neck.deblocks.0.0.weight": torch.ones(2), "fuser.1.bias": torch.zeros(1)}
    model = ["fuser.1.bias", *(f"decoder.{task}.neck.deblocks.0.0.weight" for task in ("object", "map"))]
    matched = match_decoders(state, model)
    assert set(matched) == set(model)
    assert all(matched[name] is state["decoder.neck.deblocks.0.0.weight"] for name in model[1:])
    assert match_decoders(state, state) == state
    both = _with_two_decoders()
    assert match_decoders(both, both) == both
