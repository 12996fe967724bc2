from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.engine.checkpoint import FORMAT, Checkpoint, load_state, read_checkpoint
from bevctl.engine.load_report import LoadReport, by_prefix
from bevctl.engine.run import MIN_LOADED, MIN_RESUMED
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from bevctl.models.layouts import to_mmdet3d
from tests.models.nano import nano_config

CAMERA_ALONE = {"model.camera.view.kind": "lss"}
CONFIG = nano_config(**{"model.map": None})
BACKBONE = "encoders.camera.backbone."
COUNTERS = ("num_batches_tracked", "relative_position_index", ".dx", ".bx", ".nx", ".frustum")


def report(**changes: Any) -> LoadReport:
    found = LoadReport("x.pth", "mit", ["fuser.0.weight", "decoder.neck.a"], [], [], [], [], [])
    return dataclasses.replace(found, **changes)


def of_nano(seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return build_model(CONFIG).state_dict()


def loaded_from(state: dict[str, Tensor], config: Any = CONFIG) -> LoadReport:
    return load_state(build_model(config), Checkpoint(Path("x.pth"), {"state_dict": state}))


def test_shares_are_of_the_file_and_of_the_model() -> None:
    found = report(missing=["heads.map.a"], unexpected=["x"] * 3, mismatched=["fuser.1.bias"])
    assert found.share_of_file == pytest.approx(2 / 6)
    assert found.share_of_model == pytest.approx(2 / 4)


def test_parts_are_counted_by_what_became_of_their_entries() -> None:
    found = report(reshaped=["fuser.0.weight"], missing=["heads.map.a"], unexpected=["img_head.b", "heads.map.z"])
    counts = found.by_part()
    assert list(counts) == ["fuser", "decoder", "heads.map", "other"]
    assert counts["fuser"] == {"loaded": 1, "reshaped": 1, "missing": 0, "unexpected": 0, "mismatched": 0}
    assert counts["heads.map"] == {"loaded": 0, "reshaped": 0, "missing": 1, "unexpected": 1, "mismatched": 0}
    assert counts["other"]["unexpected"] == 1
    assert "fuser 1 of 1, decoder 1 of 1, heads.map 0 of 1" in found.sentences()[0]


def test_too_little_is_refused_with_the_number_that_would_do() -> None:
    found = report(missing=["heads.map.a"])
    found.require(share_of_file=1.0, share_of_model=0.66)
    with pytest.raises(BevctlError, match=r"Only 66.6 % of this model's entries are in the file, 90 % .*: x.pth") as e:
        found.require(share_of_model=0.9)
    assert "1 missing: heads.map (1)" in e.value.hint
    found.require(share_of_model=float(e.value.hint.rpartition("--min-loaded ")[2].rstrip(".")))


def test_a_part_of_which_the_file_has_nothing_is_refused_where_every_part_is_asked_for() -> None:
    entries = [f"decoder.neck.{i}" for i in range(30)]
    found = report(loaded=entries, missing=["heads.map.a", "decoder.neck.b"])
    found.require(share_of_model=0.9)
    with pytest.raises(BevctlError, match=r"x\.pth has nothing of heads\.map, which this model has") as e:
        found.require(share_of_model=0.9, every_part=True)
    assert "--load-from x.pth" in e.value.hint
    assert "--min-loaded 0.93" in e.value.hint
    report(loaded=entries, missing=["decoder.neck.b"]).require(share_of_model=0.9, every_part=True)
    reshaped = report(loaded=entries, mismatched=["heads.object.a"])
    with pytest.raises(BevctlError, match=r"nothing of heads\.object"):
        reshaped.require(every_part=True)


def test_long_lists_say_how_much_they_leave_out() -> None:
    assert by_prefix([f"p{i}.0.weight" for i in range(11)]).endswith("and 3 more")


def test_weights_of_every_layout_are_accounted_for() -> None:
    ours = of_nano()
    learned = {key for key in ours if not key.endswith(COUNTERS[1:])}
    for state in (ours, {f"module.{k}": v for k, v in ours.items()}, to_mmdet3d(ours)):
        found = loaded_from(state)
        assert set(found.loaded) == learned
        assert found.missing == found.unexpected == found.mismatched == []
        assert found.notes == [] or "Detection head" in found.notes[0]


def test_kernels_of_spconv_2_are_reshaped() -> None:
    ours = of_nano()
    theirs = {
        key: value.permute(4, 0, 1, 2, 3).contiguous() if value.dim() == 5 else value
        for key, value in to_mmdet3d(ours).items()
    }
    model = build_model(CONFIG)
    found = load_state(model, Checkpoint(Path("x.pth"), {"state_dict": theirs}))
    assert set(found.reshaped) == {key for key, value in ours.items() if value.dim() == 5}
    assert all(torch.equal(value, ours[key]) for key, value in model.state_dict().items())


def test_old_files_without_counters_miss_nothing() -> None:
    found = loaded_from({key: value for key, value in of_nano().items() if not key.endswith(COUNTERS)})
    assert found.missing == []
    assert found.share_of_model == 1
    without_norm = {key: value for key, value in of_nano().items() if not key.startswith("fuser.1.")}
    assert len(loaded_from(without_norm).missing) == 5


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_a_backbone_for_a_larger_window_has_its_tables_resized(prefix: str) -> None:
    wide = nano_config(**{"model.map": None, "model.camera.swin.window": 5})
    backbone = {
        prefix + key.removeprefix(BACKBONE): value
        for key, value in build_model(wide).state_dict().items()
        if key.startswith(BACKBONE)
    }
    found = loaded_from(backbone)
    assert found.layout == "mmdet_backbone"
    assert found.mismatched == found.unexpected == []
    assert {key.rpartition(".")[2] for key in found.reshaped} == {"relative_position_bias_table"}
    assert found.share_of_file == 1
    assert found.share_of_model < MIN_RESUMED


def test_the_two_stage_start_leaves_the_fuser_and_the_view_transform_alone() -> None:
    """A LiDAR model, then an image backbone: what is left is what the second stage learns first."""
    torch.manual_seed(1)
    lidar = build_model(nano_config(**{"model.map": None, "model.camera": None}))
    camera = {key.removeprefix(BACKBONE): v for key, v in of_nano(2).items() if key.startswith(BACKBONE)}
    model = build_model(CONFIG)
    missing = []
    # The decoder reads 32 channels of LiDAR alone, or 16 fused: its first convolution is another in so small a model.
    for state in (lidar.state_dict(), camera):
        found = load_state(model, Checkpoint(Path("x.pth"), {"state_dict": state}))
        found.require(share_of_file=MIN_LOADED)
        missing.append(set(found.missing) | set(found.mismatched))
    left = set.intersection(*missing)
    prefixes = ("encoders.camera.neck.", "encoders.camera.vtransform.", "fuser.", "decoder.backbone.blocks.0.0.")
    assert left
    assert all(key.startswith(prefixes) for key in left)
    now = model.state_dict()
    assert all(torch.equal(now[BACKBONE + key], value) for key, value in camera.items())
    encoder = {key: value for key, value in lidar.state_dict().items() if key.startswith("encoders.lidar.")}
    assert all(torch.equal(now[key], value) for key, value in encoder.items())


def test_a_shared_decoder_fills_both() -> None:
    separate = nano_config(**{"model.shared_decoder": False})
    torch.manual_seed(1)
    shared = build_model(nano_config()).state_dict()
    model = build_model(separate)
    found = load_state(model, Checkpoint(Path("x.pth"), {"state_dict": shared, "meta": {"format": FORMAT}}))
    assert found.layout == "bevctl"
    assert found.missing == found.unexpected == []
    now = model.state_dict()
    for key, value in shared.items():
        inside = key.removeprefix("decoder.")
        for name in [key] if inside == key else [f"decoder.{task}.{inside}" for task in ("object", "map")]:
            assert torch.equal(now[name], value), name


def test_petr_is_named(tmp_path: Path) -> None:
    state = {"img_backbone.stem.a": torch.ones(1), "pts_bbox_head.transformer.b": torch.ones(1)}
    torch.save({"state_dict": state}, tmp_path / "petr.pth")
    with pytest.raises(BevctlError, match="layout: petr"):
        load_state(build_model(CONFIG), read_checkpoint(tmp_path / "petr.pth"))


@pytest.mark.parametrize(("backbone", "prefix"), [("resnet18", ""), ("resnet18", "backbone."), ("convnext_atto", "")])
def test_weights_that_torchvision_and_timm_release(backbone: str, prefix: str) -> None:
    timm = pytest.importorskip("timm")
    theirs = {prefix + key: value for key, value in timm.create_model(backbone).state_dict().items()}
    model = build_model(nano_config(**{"model.camera.backbone": backbone, "model.lidar": None, **CAMERA_ALONE}))
    found = load_state(model, Checkpoint(Path("x.pth"), {"state_dict": theirs}))
    assert found.layout == "timm_backbone"
    fates = found.by_part()["encoders.camera.backbone"]
    assert (fates["missing"], fates["mismatched"]) == (0, 0)
    assert all(name.split(".")[len(prefix) > 0] in ("fc", "head") for name in found.unexpected)
    loaded = model.state_dict()
    assert all(torch.equal(theirs[key], loaded[name]) for key, name in zip(theirs, found.loaded, strict=False))
