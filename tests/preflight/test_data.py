"""Checks of the data, on a small synthetic set that is complete, and on copies of it that are not."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.foreign import read_foreign
from bevctl.data.gt_database import write_gt_database
from bevctl.data.index import read_info
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.finding import CheckStatus
from bevctl.preflight import data
from bevctl.preflight.checks import Context, Outcome
from tests.data import infos as made

from .conftest import MakeContext

Of = Callable[..., Context]
TRAIN, VAL = "synth_infos_train.pkl", "synth_infos_val.pkl"


def judge(context: Context, id: str) -> Outcome:
    (spec,) = [spec for spec in data.CHECKS if spec.id == id]
    return spec.function(context)


@pytest.fixture
def complete(synth_root: Path) -> Path:
    """Six training and three held-out samples; read only."""
    return synth_root


@pytest.fixture
def root(complete: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(complete, tmp_path / "data", symlinks=True)


@pytest.fixture
def of(make_context: MakeContext) -> Of:
    def make(root: Path, *sets: str, **options: Any) -> Context:
        return make_context(f"data.root={root}", "device=cpu", *sets, **options)

    return make


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites an info file after `change` was applied to its document."""
    document = pickle.loads(path.read_bytes())
    change(document)
    path.write_bytes(pickle.dumps(document))


def samples(path: Path) -> Iterator[dict[str, Any]]:
    yield from pickle.loads(path.read_bytes())["data_list"]


def test_a_complete_set_passes(complete: Path, of: Of) -> None:
    context = of(complete, "optim.warmup=0", "model.map={}")
    outcomes = {spec.id: spec.function(context) for spec in data.CHECKS}
    not_asked_for = {"DATA008", "DATA009", "DATA010"}
    assert {id for id, outcome in outcomes.items() if outcome.status != CheckStatus.PASS} == not_asked_for
    assert "train: 6 samples, mmdet3d-1.1, v1.0-mini; val: 3 samples" in outcomes["DATA002"].found
    assert "6 samples / (batch 2 x 1 GPU) = 3 iterations" in outcomes["DATA007"].found


def test_without_a_config_nothing_is_known(of: Of, complete: Path) -> None:
    context = dataclasses.replace(of(complete), config=None)
    assert {spec.function(context).status for spec in data.CHECKS} == {CheckStatus.SKIP}


@pytest.mark.parametrize("spoil", ["missing", "empty", "folder", "truncated", "noise", "code", "a list", "no samples"])
def test_a_broken_info_file(root: Path, of: Of, tmp_path: Path, spoil: str) -> None:
    path, mark = root / TRAIN, tmp_path / "mark"
    whole = path.read_bytes()
    path.unlink()
    if spoil == "folder":
        path.mkdir()
    elif spoil == "code":
        path.write_bytes(b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    elif spoil != "missing":
        empty = {**pickle.loads(whole), "data_list": []}
        content = {"empty": b"", "truncated": whole[:1000], "noise": bytes(range(256)), "a list": pickle.dumps([1])}
        path.write_bytes(content.get(spoil, pickle.dumps(empty)))
    context = of(root)
    there = spoil not in ("missing", "empty", "folder")
    assert judge(context, "DATA001").status == (CheckStatus.PASS if there else CheckStatus.FAIL)
    assert judge(context, "DATA002").status == (CheckStatus.FAIL if there else CheckStatus.PASS)  # of the other split
    if spoil != "no samples":
        assert judge(context, "DATA003").status == judge(context, "DATA006").status == CheckStatus.SKIP
    assert not mark.exists()


def test_permission_denied(root: Path, of: Of, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    context = of(root)
    monkeypatch.setattr(Path, "open", refuse)
    outcome = judge(context, "DATA001")
    assert outcome.status == CheckStatus.FAIL
    assert "Permission denied" in outcome.found
    assert judge(context, "DATA002").status == CheckStatus.SKIP


def test_files_of_two_versions(root: Path, of: Of) -> None:
    changed(root / VAL, lambda document: document["metainfo"].update(version="v1.0-trainval"))
    outcome = judge(of(root), "DATA002")
    assert outcome.status == CheckStatus.WARN
    assert "different versions" in outcome.found


# classes


def test_classes_that_the_data_does_not_have(root: Path, of: Of) -> None:
    def rename(document: dict[str, Any]) -> None:
        categories = document["metainfo"]["categories"]
        document["metainfo"]["categories"] = {f"my_{name}": label for name, label in categories.items()}

    def only_cars(document: dict[str, Any]) -> None:
        car = document["metainfo"]["categories"]["car"]
        for sample in document["data_list"]:
            sample["instances"] = [i for i in sample["instances"] if i["bbox_label_3d"] == car]

    changed(root / TRAIN, only_cars)
    outcome = judge(of(root, "data.classes=[car, bus]"), "DATA003")
    assert outcome.status == CheckStatus.WARN
    assert "no box of bus" in outcome.found
    changed(root / TRAIN, rename)
    outcome = judge(of(root, "data.classes=[car, bus]"), "DATA003")
    assert outcome.status == CheckStatus.FAIL
    assert "my_car" in outcome.fix


@pytest.mark.parametrize("meta", [{"CLASSES": ("bus", "car")}, {"dataset_meta": {"classes": ["bus", "car"]}}])
def test_classes_in_another_order_than_the_checkpoint(
    complete: Path, of: Of, tmp_path: Path, meta: dict[str, Any]
) -> None:
    path = tmp_path / "x.pth"
    torch.save({"state_dict": {"a": torch.ones(1)}, "meta": meta}, path)
    outcome = judge(of(complete, "data.classes=[car, bus]", resume=str(path)), "DATA003")
    assert outcome.status == CheckStatus.FAIL
    assert "bus, car" in outcome.found
    assert judge(of(complete, "data.classes=[bus, car]", resume=str(path)), "DATA003").status == CheckStatus.PASS


# files


def first(root: Path, folder: str) -> Path:
    """The file of the first training sample in a sensor's folder."""
    sample = next(samples(root / TRAIN))
    if folder == "CAM_FRONT":
        return root / "samples" / folder / Path(sample["images"][folder]["img_path"]).name
    return root / "samples" / folder / Path(sample["lidar_points"]["lidar_path"]).name


@pytest.mark.parametrize(
    ("folder", "spoil", "words"),
    [
        ("CAM_FRONT", None, "is not in"),
        ("CAM_FRONT", lambda _: b"", "not an image"),
        ("CAM_FRONT", lambda data: data[: len(data) // 2], "cannot be read"),
        ("CAM_FRONT", lambda _: b"<html>", "not an image"),
        ("LIDAR_TOP", None, "is not in"),
        ("LIDAR_TOP", lambda _: b"", "is empty"),
        ("LIDAR_TOP", lambda data: data[:-3], "no whole number of points"),
        ("LIDAR_TOP", lambda data: data[4:] + data[:4], "are no points of 5 values"),
        ("LIDAR_TOP", lambda data: b"\xff" * len(data), "not finite"),
    ],
)
def test_a_file_that_does_not_open(
    root: Path, of: Of, folder: str, spoil: Callable[[bytes], bytes] | None, words: str
) -> None:
    path = first(root, folder)
    content = path.read_bytes()
    path.unlink()
    if spoil is not None:
        path.write_bytes(spoil(content))
    outcome = judge(of(root), "DATA004")
    assert outcome.status == CheckStatus.FAIL
    assert words in outcome.found


def test_sweeps_that_are_missing(root: Path, of: Of) -> None:
    shutil.rmtree(root / "sweeps")
    assert judge(of(root), "DATA004").status == CheckStatus.FAIL


def test_sensors_that_are_not_used_are_not_looked_at(root: Path, of: Of) -> None:
    shutil.rmtree(root / "samples" / "CAM_FRONT")
    assert judge(of(root), "DATA004").status == CheckStatus.FAIL
    assert judge(of(root, "model.camera=null"), "DATA004").status == CheckStatus.PASS


# maps


@pytest.mark.parametrize("spoil", ["missing", "cut", "empty"])
def test_maps_that_are_missing_or_cut_off(root: Path, of: Of, spoil: str) -> None:
    path = next((root / "maps" / "expansion").glob("*.json"))
    content = path.read_bytes()
    path.unlink()
    if spoil != "missing":
        path.write_bytes(content[: len(content) // 2] if spoil == "cut" else b"")
    outcome = judge(of(root, "model.map={}"), "DATA005")
    assert outcome.status == CheckStatus.FAIL
    assert path.stem in outcome.found
    assert judge(of(root, "model.map=null"), "DATA005").status == CheckStatus.SKIP


def test_samples_without_a_location(root: Path, of: Of) -> None:
    for location in data.MAP_LOCATIONS:
        (root / "maps" / "expansion" / f"{location}.json").write_text("{}")

    def forget(document: dict[str, Any]) -> None:
        for sample in document["data_list"]:
            sample.pop("location", None)

    for name in (TRAIN, VAL):
        changed(root / name, forget)
    outcome = judge(of(root, "model.map={}"), "DATA005")
    assert outcome.status == CheckStatus.FAIL
    assert "do not say on which map" in outcome.found


# calibration


def each_camera(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        for sample in document["data_list"]:
            for camera in sample["images"].values():
                change(camera)

    return apply


def looking_away(camera: dict[str, Any]) -> None:
    """The camera looks at the sky."""
    camera["lidar2cam"] = np.eye(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (looking_away, "boxes land in an image"),
        (lambda camera: camera.update(lidar2cam=2 * np.asarray(camera["lidar2cam"])), "no rigid transform"),
        (lambda camera: camera.update(cam2img=-np.asarray(camera["cam2img"])), "no positive focal length"),
    ],
)
def test_calibration_that_is_wrong(root: Path, of: Of, change: Callable[[dict[str, Any]], None], words: str) -> None:
    changed(root / TRAIN, each_camera(change))
    outcome = judge(of(root), "DATA006")
    assert outcome.status == CheckStatus.FAIL
    assert words in outcome.found


def test_the_real_frame_is_calibrated(shared: Path, of: Of) -> None:
    folder = shared / "nuscenes_frame"
    name = next(folder.glob("*.pkl")).name
    context = of(folder, f"data.info_train={name}", f"data.info_val={name}")
    for id in ("DATA002", "DATA004", "DATA006"):
        assert judge(context, id).status == CheckStatus.PASS, judge(context, id).found


# length


def test_an_epoch_without_a_step(complete: Path, of: Of) -> None:
    assert judge(of(complete, "train.batch=4", gpus=2), "DATA007").status == CheckStatus.FAIL
    assert judge(of(complete, "train.accumulate=4"), "DATA007").status == CheckStatus.FAIL


def test_a_warm_up_longer_than_the_run(complete: Path, of: Of) -> None:
    outcome = judge(of(complete, "optim.warmup=1000", "train.schedule_iters=null"), "DATA007")
    assert outcome.status == CheckStatus.WARN
    assert "warm-up alone takes 1,000" in outcome.found


# other projects


def foreign(of: Of, complete: Path, tmp_path: Path, text: str) -> Context:
    path = tmp_path / "config.py"
    path.write_text(text)
    return dataclasses.replace(of(complete), config=None, foreign=read_foreign(path))


def test_an_epoch_of_class_balanced_draws(complete: Path, of: Of) -> None:
    config = of(complete, "data.cbgs=true", "train.batch=1").config
    assert config is not None
    draws = len(NuScenesDataset(config, "train"))
    assert draws > 6
    found = judge(of(complete, "data.cbgs=true", "train.batch=1", "optim.warmup=0"), "DATA007").found
    assert f"{draws} samples / (batch 1 x 1 GPU) = {draws} iterations" in found


def test_nothing_to_draw_from(root: Path, of: Of) -> None:
    def strip(document: dict[str, Any]) -> None:
        for sample in document["data_list"]:
            del sample["instances"]

    changed(root / TRAIN, strip)
    outcome = judge(of(root, "data.cbgs=true"), "DATA007")
    assert outcome.status == CheckStatus.FAIL
    assert "no training sample has an annotated object" in outcome.found


def test_the_database_of_objects_to_paste(root: Path, of: Of) -> None:
    pasting = of(root, "data.paste.database=gt.npz", "data.paste.min_points=1")
    missing = judge(pasting, "DATA009")
    assert missing.status == CheckStatus.FAIL
    assert "data prepare --gt-database" in missing.fix
    write_gt_database(root / "gt.npz", read_info(root / TRAIN), root, OBJECT_CLASSES)
    assert judge(pasting, "DATA009").status == CheckStatus.PASS
    write_gt_database(root / "gt.npz", read_info(root / TRAIN), root, ("car", "bus"))
    some = judge(pasting, "DATA009")
    assert some.status == CheckStatus.WARN
    assert "none of truck, construction_vehicle" in some.found
    (root / "gt.bin").write_bytes(b"")
    assert judge(pasting, "DATA009").status == CheckStatus.FAIL
    assert judge(of(root), "DATA009").status == CheckStatus.SKIP


MMENGINE = (
    "root = {root!r}\n"
    "train_dataloader = dict(dataset=dict(type='CBGSDataset', dataset=dict(\n"
    "    type='NuScenesDataset', data_root=root, ann_file='synth_infos_train.pkl')))\n"
    "val_dataloader = dict(dataset=dict(data_root=root, ann_file='synth_infos_val.pkl'))\n"
    "train_pipeline = [dict(type='LoadPointsFromFile', load_dim={width})]\n"
)


def test_the_data_of_an_mmengine_config(complete: Path, of: Of, tmp_path: Path) -> None:
    context = foreign(of, complete, tmp_path, MMENGINE.format(root=str(complete), width=5))
    for id in ("DATA001", "DATA002", "DATA004", "DATA006"):
        assert judge(context, id).status == CheckStatus.PASS, judge(context, id).found
    assert "CBGS" in judge(context, "DATA007").found
    narrow_points = foreign(of, complete, tmp_path, MMENGINE.format(root=str(complete), width=7))
    assert judge(narrow_points, "DATA004").status == CheckStatus.FAIL


@pytest.mark.parametrize(("document", "status"), [(made.infos(), "pass"), (made.data_list(), "fail")])
def test_an_info_file_of_the_other_generation(
    complete: Path, of: Of, tmp_path: Path, document: dict[str, Any], status: str
) -> None:
    path = made.write(tmp_path / "infos.pkl", document)
    text = f"data = dict(train=dict(ann_file={str(path)!r}), val=dict(ann_file={str(path)!r}))\n"
    outcome = judge(foreign(of, complete, tmp_path, text), "DATA002")
    assert outcome.status == status
    if status == "fail":
        assert "which this program does not read" in outcome.found


def test_tables_for_the_evaluation_of_another_project(root: Path, of: Of, tmp_path: Path) -> None:
    context = foreign(of, root, tmp_path, MMENGINE.format(root=str(root), width=5))
    (root / "maps" / "mask.png").touch()
    assert judge(context, "DATA008").status == CheckStatus.PASS
    shutil.rmtree(root / "v1.0-mini")
    outcome = judge(context, "DATA008")
    assert outcome.status == CheckStatus.WARN
    assert "v1.0-mini" in outcome.found
