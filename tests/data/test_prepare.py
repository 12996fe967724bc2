from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bevctl.batch import CAMERAS, OBJECT_CLASSES
from bevctl.data.check import check_info
from bevctl.data.index import IGNORED, read_info, resolve
from bevctl.data.info import InfoFile
from bevctl.data.prepare import open_tables, prepare
from bevctl.data.sweeps import LIDAR, load_points
from bevctl.data.unpickle import load_pickle
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import points_in_boxes, rigid, transform_points


@pytest.fixture(scope="module")
def tables(synth_root: Path) -> Any:
    return open_tables(synth_root, "v1.0-mini")


@pytest.fixture(scope="module")
def info(synth_root: Path) -> InfoFile:
    return read_info(synth_root / "synth_infos_train.pkl")


def test_the_splits_are_the_devkits(synth_root: Path, tables: Any, info: InfoFile) -> None:
    held_out = read_info(synth_root / "synth_infos_val.pkl")
    scenes = {
        split: {tables.get("scene", tables.get("sample", s.token)["scene_token"])["name"] for s in file.samples}
        for split, file in (("train", info), ("val", held_out))
    }
    assert scenes == {"train": {"scene-0061", "scene-0553"}, "val": {"scene-0103"}}
    assert (len(info.samples), len(held_out.samples)) == (6, 3)
    assert not {s.location for s in info.samples} & {s.location for s in held_out.samples}


def test_boxes_are_the_devkits(tables: Any, info: InfoFile) -> None:
    from pyquaternion import Quaternion

    for sample in info.samples:
        record = tables.get("sample", sample.token)
        _, boxes, _ = tables.get_sample_data(record["data"][LIDAR])
        assert sample.boxes is not None
        assert len(boxes) == len(sample.boxes) > 20
        lidar2global = sample.ego2global @ sample.lidar2ego
        for row, box, lidar, valid in zip(sample.boxes, boxes, sample.num_lidar_pts, sample.valid, strict=True):
            width, length, height = box.wlh
            np.testing.assert_allclose(row[:6], [*box.center, length, width, height], atol=1e-6)
            heading = Quaternion(axis=[0, 0, 1], angle=row[6]).rotation_matrix[:, 0]
            np.testing.assert_allclose(heading, box.orientation.rotation_matrix[:, 0], atol=2e-2)
            annotation = tables.get("sample_annotation", box.token)
            assert lidar == annotation["num_lidar_pts"]
            assert valid == (annotation["num_lidar_pts"] + annotation["num_radar_pts"] > 0)
            velocity = lidar2global[:3, :3] @ [*row[7:], 0.0]
            np.testing.assert_allclose(velocity[:2], tables.box_velocity(box.token)[:2], atol=0.05)


def test_names_locations_and_attributes(tables: Any, info: InfoFile) -> None:
    names = {name for sample in info.samples for name in sample.names}
    assert names <= {*OBJECT_CLASSES, IGNORED}
    assert set(OBJECT_CLASSES) <= names
    for sample in info.samples:
        scene = tables.get("scene", tables.get("sample", sample.token)["scene_token"])
        assert sample.location == tables.get("log", scene["log_token"])["location"]
        assert len(sample.attributes) == len(sample.names)
        moving = {"vehicle.moving", "vehicle.stopped", "vehicle.parked"}
        assert {a for a, name in zip(sample.attributes, sample.names, strict=True) if name == "car"} <= moving


def test_sweeps_are_the_devkits(synth_root: Path, tables: Any, info: InfoFile) -> None:
    """The accumulated cloud of `from_file_multisweep`, which goes through the global frame."""
    from nuscenes.utils.data_classes import LidarPointCloud

    sample = info.samples[2]
    assert len(sample.sweeps) == 10
    record = tables.get("sample", sample.token)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cloud, ages = LidarPointCloud.from_file_multisweep(tables, record, LIDAR, LIDAR, nsweeps=6, min_distance=1.0)
    ours = load_points(synth_root, sample, 5, None)
    near = (np.abs(ours[:, :2]) < 1.0).all(axis=1) & (ours[:, 4] == 0)
    ours = ours[~near]  # the devkit removes them from the keyframe too
    assert ours.shape == (cloud.points.shape[1], 5)
    np.testing.assert_allclose(ours[:, :4], cloud.points.T, atol=1e-3)
    np.testing.assert_allclose(ours[:, 4], ages[0], atol=1e-5)
    ages_seen = np.unique(ours[:, 4])
    assert len(ages_seen) == 6
    np.testing.assert_allclose(np.diff(ages_seen), 0.05, atol=0.01)


def test_cameras_are_the_devkits(synth_root: Path, tables: Any, info: InfoFile) -> None:
    sample = info.samples[0]
    assert tuple(sample.cameras) == CAMERAS
    record = tables.get("sample", sample.token)
    for name, camera in sample.cameras.items():
        path, boxes, intrinsics = tables.get_sample_data(record["data"][name], box_vis_level=0)
        assert resolve(synth_root, camera.path, name) == Path(path)
        np.testing.assert_allclose(camera.intrinsics, intrinsics)
        assert sample.boxes is not None
        centres = np.array([box.center for box in boxes])
        moved = transform_points(camera.camera2lidar, centres)
        distance = np.linalg.norm(moved[:, None] - sample.boxes[None, :, :3], axis=-1)
        assert distance.min(axis=1).max() < 1e-6


def test_boxes_hold_the_points_they_claim(synth_root: Path, info: InfoFile) -> None:
    for sample in info.samples:
        keyframe = load_points(synth_root, sample, 0, None)
        assert sample.boxes is not None
        counted = points_in_boxes(keyframe, sample.boxes, margin=0.005).sum(axis=1)
        np.testing.assert_allclose(counted, sample.num_lidar_pts, atol=4, rtol=0.15)


def test_the_layout_is_the_one_mmdet3d_reads(synth_root: Path) -> None:
    document = load_pickle(synth_root / "synth_infos_train.pkl")
    assert document["metainfo"]["info_version"] == "1.1"
    assert document["metainfo"]["categories"]["trailer"] == 2
    sample = document["data_list"][2]
    image = sample["images"]["CAM_BACK"]
    assert "/" not in image["img_path"]
    assert {np.shape(image[key]) for key in ("cam2ego", "lidar2cam")} == {(4, 4)}
    assert "/" not in sample["lidar_points"]["lidar_path"]
    sweep = sample["lidar_sweeps"][0]["lidar_points"]
    assert sweep["lidar_path"].split("/")[0] in ("samples", "sweeps")
    assert np.shape(sweep["lidar2sensor"]) == (4, 4)
    labels = {i["name"]: i["bbox_label_3d"] for i in sample["instances"]}
    assert all(document["metainfo"]["categories"].get(name, -1) == label for name, label in labels.items())


def test_everything_it_names_is_there(synth_root: Path) -> None:
    checked = check_info(synth_root / "synth_infos_train.pkl", synth_root)
    assert checked.complete
    assert checked.samples == 6
    assert checked.files == 6 * 7 + checked.sweeps


def test_an_object_that_does_not_turn_keeps_its_heading_in_the_world(info: InfoFile) -> None:
    """Yaw through the pose, independent of the devkit: barriers stand still."""
    headings: dict[tuple[float, ...], list[float]] = {}
    for sample in info.samples[:3]:
        lidar2global = sample.ego2global @ sample.lidar2ego
        assert sample.boxes is not None
        for row, name in zip(sample.boxes, sample.names, strict=True):
            if name == "barrier":
                place = transform_points(lidar2global, row[None, :3])[0].round(1)
                turn = lidar2global[:3, :3] @ rigid(np.eye(3), row[:3])[:3, :3]
                x, y = (turn @ [np.cos(row[6]), np.sin(row[6]), 0.0])[:2]
                headings.setdefault(tuple(place[:2]), []).append(float(np.arctan2(y, x)))
    repeated = [values for values in headings.values() if len(values) > 1]
    assert repeated
    assert max(np.ptp(np.unwrap(values)) for values in repeated) < 0.03


def test_progress_and_prefix(synth_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "linked"
    root.mkdir()
    for name in ("v1.0-mini", "samples", "sweeps", "maps"):
        (root / name).symlink_to(synth_root / name)
    seen: list[tuple[int, int, str]] = []
    written = prepare(root, "v1.0-mini", prefix="mine", max_sweeps=2, progress=lambda *report: seen.append(report))
    assert [file.path.name for file in written] == ["mine_infos_train.pkl", "mine_infos_val.pkl"]
    assert seen[0] == (1, 6, "mine_infos_train.pkl")
    assert seen[-1] == (3, 3, "mine_infos_val.pkl")
    assert max(len(sample.sweeps) for sample in read_info(written[0].path).samples) == 2


def test_missing_or_broken_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="Unknown nuScenes version 'v9'") as caught:
        prepare(tmp_path, "v9")
    assert caught.value.code == ExitCode.USAGE
    with pytest.raises(BevctlError, match="no tables"):
        prepare(tmp_path, "v1.0-mini")
    (tmp_path / "v1.0-mini").mkdir()
    (tmp_path / "v1.0-mini" / "category.json").write_text("[")
    with pytest.raises(BevctlError, match="cannot be opened"):
        prepare(tmp_path, "v1.0-mini")
    assert not list(tmp_path.glob("*.pkl"))
