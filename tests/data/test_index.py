from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bevctl.data import layout_data_list
from bevctl.data.conventions import detect_convention
from bevctl.data.index import IGNORED, locate, missing_files, read_info, resolve
from bevctl.data.info import SampleInfo
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import transform_points
from tests.data import infos as made

LAYOUTS = {
    "mmdet3d-1.1": made.data_list(),
    "mmdet3d-1.1-early": made.early(),
    "mmdet3d-1.0": made.infos(),
    "mmdet3d-0.x": made.infos(made.legacy(made.BOXES)),
    "mit-bevfusion": made.mit_bevfusion(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same(tmp_path: Path, layout: str) -> None:
    info = read_info(made.write(tmp_path / "a.pkl", LAYOUTS[layout]))
    assert info.format == layout
    assert info.version == ("v1.0-mini" if layout == "mmdet3d-1.1" else "v1.0-trainval")
    assert info.notes == ()
    (sample,) = info.samples
    assert sample.boxes is not None
    np.testing.assert_allclose(sample.boxes[:, :7], made.BOXES, atol=1e-9)
    np.testing.assert_array_equal(sample.boxes[:, 7:], made.VELOCITY)
    assert sample.names == made.NAMES
    assert sample.token == "sample-0"
    assert sample.location == ("boston-seaport" if layout == "mit-bevfusion" else None)
    np.testing.assert_array_equal(sample.num_lidar_pts, made.LIDAR_POINTS)
    np.testing.assert_array_equal(sample.num_radar_pts, made.RADAR_POINTS)
    np.testing.assert_array_equal(sample.valid, [True, False, True])
    np.testing.assert_allclose(sample.lidar2ego, made.LIDAR2EGO, atol=1e-9)
    np.testing.assert_allclose(sample.ego2global, made.EGO2GLOBAL, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sensors_and_times_are_exact(tmp_path: Path, layout: str) -> None:
    (sample,) = read_info(made.write(tmp_path / "a.pkl", LAYOUTS[layout])).samples
    camera = sample.cameras["CAM_FRONT"]
    np.testing.assert_allclose(camera.camera2lidar, made.CAMERA2LIDAR, atol=1e-9)
    np.testing.assert_array_equal(camera.intrinsics, made.INTRINSICS)
    (sweep,) = sample.sweeps
    # by hand: turned clockwise by ten degrees, then shifted; the usual slip is 0.87 m off here
    turn = np.deg2rad(10.0)
    expected = [[np.cos(turn) + 0.3, -np.sin(turn) - 5.0, 0.1]]
    np.testing.assert_allclose(transform_points(sweep.sweep2key, [[1.0, 0.0, 0.0]]), expected, atol=1e-9)
    assert sample.timestamp - sweep.timestamp == pytest.approx(0.050422, abs=1e-6)
    assert sample.timestamp - camera.timestamp == pytest.approx(0.036236, abs=1e-6)
    assert sample.timestamp == pytest.approx(1_533_201_470.448696, abs=1e-6)


def test_classes_go_by_name_whatever_their_number(tmp_path: Path) -> None:
    document = made.data_list()
    order = made.MODERN_ORDER[::-1]
    document["metainfo"]["categories"] = {name: label for label, name in enumerate(order)}
    for instance, name in zip(document["data_list"][0]["instances"], made.NAMES, strict=True):
        instance["bbox_label_3d"] = instance["bbox_label"] = order.index(name)
    assert read_info(made.write(tmp_path / "a.pkl", document)).samples[0].names == made.NAMES


def test_label_minus_one_is_ignored(tmp_path: Path) -> None:
    document = made.data_list()
    document["data_list"][0]["instances"][2]["bbox_label_3d"] = -1
    assert read_info(made.write(tmp_path / "a.pkl", document)).samples[0].names == ("car", "barrier", IGNORED)


def test_numbered_classes_without_names_are_refused(tmp_path: Path) -> None:
    document = made.data_list()
    del document["metainfo"]["categories"]
    with pytest.raises(BevctlError, match="neither categories nor classes"):
        read_info(made.write(tmp_path / "a.pkl", document))


def test_the_convention_can_be_forced(tmp_path: Path) -> None:
    path = made.write(tmp_path / "a.pkl", made.infos())
    info = read_info(path, "wlh")
    assert info.samples[0].boxes is not None
    np.testing.assert_allclose(info.samples[0].boxes[:, :7], made.legacy(made.BOXES), atol=1e-9)
    assert "as asked" in info.notes[0]


@pytest.mark.parametrize(("document", "assumed"), [(made.data_list(), "lwh"), (made.infos(), "wlh")])
def test_an_undecidable_convention_is_assumed_aloud(tmp_path: Path, document: dict[str, Any], assumed: str) -> None:
    document = copy.deepcopy(document)
    sample = (document.get("data_list") or document.get("infos") or [])[0]
    if "instances" in sample:
        sample["instances"] = sample["instances"][2:]
    else:
        sample["gt_names"] = np.array(["pedestrian"] * 3)
    info = read_info(made.write(tmp_path / "a.pkl", document))
    assert info.box_convention == assumed
    assert f"{assumed} is assumed" in info.notes[0]


def test_a_box_that_is_not_finite_has_no_vote_on_the_convention() -> None:
    car, broken = [0.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0], [0.0, 0.0, 0.0, np.inf, np.nan, 1.5, 0.0]
    assert detect_convention([(np.array([car, broken]), ("car", "car"))]) == "lwh"
    assert detect_convention([(np.array([broken]), ("car",))]) is None


def test_radar_files_of_newer_mit_code(tmp_path: Path) -> None:
    document = made.infos(made.legacy(made.BOXES), radars={"RADAR_FRONT": []}, prev_token="")
    info = read_info(made.write(tmp_path / "a.pkl", document))
    assert (info.format, info.samples[0].location) == ("mit-bevfusion", None)


def test_a_test_split_has_no_boxes_and_an_empty_sample_has_none_to_show(tmp_path: Path) -> None:
    document = made.data_list()
    bare = {key: value for key, value in document["data_list"][0].items() if key != "instances"}
    document["data_list"].append(bare)
    both = read_info(made.write(tmp_path / "a.pkl", document)).samples
    assert both[1].boxes is not None
    assert both[1].boxes.shape == (0, 9)
    document["data_list"] = [bare]
    assert read_info(made.write(tmp_path / "a.pkl", document)).samples[0].boxes is None


def test_velocity_may_be_absent(tmp_path: Path) -> None:
    document = made.infos()
    del document["infos"][0]["gt_velocity"]
    boxes = read_info(made.write(tmp_path / "a.pkl", document)).samples[0].boxes
    assert boxes is not None
    assert np.isnan(boxes[:, 7:]).all()


BROKEN = [(0, np.nan), (2, np.inf), (3, 0.0), (4, -2.0), (5, np.nan), (6, -np.inf)]


@pytest.mark.parametrize(("column", "value"), BROKEN)
@pytest.mark.parametrize("layout", [made.data_list, made.infos])
def test_a_box_that_cannot_be_is_left_out_and_said(
    tmp_path: Path, layout: Callable[[], dict[str, Any]], column: int, value: float
) -> None:
    """One that is NaN somewhere, or without size, would make a loss NaN, and stop the evaluation."""
    document = layout()
    (sample,) = document["infos"] if "infos" in document else document["data_list"]
    if "infos" in document:
        sample["gt_boxes"] = made.BOXES.copy()
        sample["gt_boxes"][1, column] = value
    else:
        sample["instances"][1]["bbox_3d"][column] = value
        for instance in sample["instances"]:
            instance["attribute"] = "standing"
    info = read_info(made.write(tmp_path / "a.pkl", document))
    (read,) = info.samples
    assert read.boxes is not None
    np.testing.assert_allclose(read.boxes[:, :7], made.BOXES[[0, 2]])
    assert read.names == (made.NAMES[0], made.NAMES[2])
    np.testing.assert_array_equal(read.num_lidar_pts, [25, 4])
    np.testing.assert_array_equal(read.valid, [True, True])
    assert len(read.attributes) in (0, 2)
    assert info.notes[-1].startswith("1 annotated box is left out")


@pytest.mark.parametrize("velocity", [None, [], np.array([3.0, -1.0]), (3.0, -1.0)])
def test_velocity_in_any_form(tmp_path: Path, velocity: Any) -> None:
    document = made.data_list()
    document["data_list"][0]["instances"][0]["velocity"] = velocity
    boxes = read_info(made.write(tmp_path / "a.pkl", document)).samples[0].boxes
    assert boxes is not None
    known = velocity is not None and len(velocity)
    np.testing.assert_array_equal(boxes[0, 7:], [3.0, -1.0] if known else [np.nan, np.nan])


def test_a_speed_that_is_not_finite_is_unknown(tmp_path: Path) -> None:
    document = made.infos(gt_velocity=np.array([[np.inf, 1.0], [np.nan, np.nan], [0.5, 1.0]]))
    info = read_info(made.write(tmp_path / "a.pkl", document))
    assert info.samples[0].boxes is not None
    assert not np.isinf(info.samples[0].boxes).any()
    assert np.isnan(info.samples[0].boxes[0, 7])
    assert info.notes == ()


def test_boxes_without_a_name_each_are_refused(tmp_path: Path) -> None:
    document = made.infos(gt_names=np.array(made.NAMES[:2]))
    with pytest.raises(BevctlError, match=r"Sample 0 of .*3 boxes have 2 names"):
        read_info(made.write(tmp_path / "a.pkl", document))


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "a dict with the keys (none)"),
        ({"annotations": [], "images": []}, "'annotations', 'images'"),
        ([1, 2], "a list"),
        ({"data_list": []}, "'data_list'"),
    ],
)
def test_other_pickles_are_refused_with_what_they_hold(tmp_path: Path, document: object, told: str) -> None:
    with pytest.raises(BevctlError) as caught:
        read_info(made.write(tmp_path / "a.pkl", document))
    assert told in caught.value.message
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_while_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    during: list[bool] = []
    read = layout_data_list.read_sample

    def watched(*given: Any) -> SampleInfo:
        during.append(gc.isenabled())
        return read(*given)

    monkeypatch.setattr(layout_data_list, "read_sample", watched)
    path, broken = made.write(tmp_path / "a.pkl", made.data_list()), made.write(tmp_path / "b.pkl", {})
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        read_info(path)
        assert gc.isenabled() is enabled
        with pytest.raises(BevctlError):
            read_info(broken)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert during == [False]


@pytest.mark.parametrize("key", ["lidar_points", "token", "timestamp", "ego2global"])
def test_a_sample_that_lacks_something_is_named(tmp_path: Path, key: str) -> None:
    document = made.data_list()
    del document["data_list"][0][key]
    with pytest.raises(BevctlError, match=f"Sample 0 of .*{key}"):
        read_info(made.write(tmp_path / "a.pkl", document))


def test_reading_leaves_the_real_frame_as_it_is(shared: Path) -> None:
    (path,) = (shared / "nuscenes_frame").glob("*.pkl")
    info = read_info(path)
    assert (info.format, info.version, info.box_convention) == ("mmdet3d-1.1", "v1.0-mini", "lwh")
    names = info.samples[0].names
    counts = {name: names.count(name) for name in set(names)}
    assert counts == {
        "pedestrian": 30,
        "barrier": 22,
        "car": 8,
        "traffic_cone": 3,
        "truck": 2,
        "bicycle": 1,
        "bus": 1,
        "construction_vehicle": 1,
        IGNORED: 1,
    }


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("stored", "lies"),
    [
        ("a.bin", "a.bin"),
        ("a.bin", "samples/LIDAR_TOP/a.bin"),
        ("a.bin", "sweeps/LIDAR_TOP/a.bin"),
        ("samples/LIDAR_TOP/a.bin", "samples/LIDAR_TOP/a.bin"),
        ("./data/nuscenes/samples/LIDAR_TOP/a.bin", "samples/LIDAR_TOP/a.bin"),
        ("/mnt/samples/nuscenes/sweeps/LIDAR_TOP/a.bin", "sweeps/LIDAR_TOP/a.bin"),
    ],
)
def test_files_are_found(tmp_path: Path, stored: str, lies: str) -> None:
    path = _touch(tmp_path / lies)
    assert resolve(tmp_path, stored, "LIDAR_TOP") == path


def test_an_absolute_path_stands(tmp_path: Path) -> None:
    path = _touch(tmp_path / "elsewhere" / "a.bin")
    assert resolve(tmp_path / "root", str(path), "LIDAR_TOP") == path


def test_what_is_nowhere_is_named(tmp_path: Path) -> None:
    assert locate(tmp_path, "a.bin", "LIDAR_TOP") is None
    with pytest.raises(BevctlError, match=r"LIDAR_TOP file 'a\.bin'"):
        resolve(tmp_path, "a.bin", "LIDAR_TOP")


@pytest.mark.parametrize("given", ["a.jpg", "samples/CAM_FRONT/a.jpg", "./data/nuscenes/samples/CAM_FRONT/a.jpg"])
def test_many_files_are_looked_for_where_one_is(tmp_path: Path, given: str) -> None:
    (tmp_path / "samples" / "CAM_FRONT").mkdir(parents=True)
    (tmp_path / "samples" / "CAM_FRONT" / "a.jpg").touch()
    gone = given.replace("a.jpg", "b.jpg")
    assert locate(tmp_path, given, "CAM_FRONT") is not None
    assert missing_files(tmp_path, [given, gone, given], "CAM_FRONT") == [gone]
    assert missing_files(tmp_path / "none", [given], "CAM_FRONT") == [given]
