from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from bevctl.batch import OBJECT_CLASSES
from bevctl.data.gt_database import GtDatabase, read_gt_database, write_gt_database
from bevctl.data.index import read_info
from bevctl.data.info import InfoFile, SampleInfo, SweepInfo
from bevctl.data.sweeps import load_points
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import points_in_boxes, rigid, rotation_z

CAR = np.array([10.0, 2.0, -1.0, 4.0, 2.0, 1.5, 0.5, 3.0, 1.0])
CONE = np.array([-5.0, 1.0, -1.5, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0])
LONELY = np.array([30.0, 0.0, -1.0, 4.0, 2.0, 1.5, 0.0, 0.0, 0.0])


def _cloud(*places: np.ndarray) -> np.ndarray:
    points = np.zeros((len(places), 5), dtype=np.float32)
    points[:, :3] = np.stack(places)
    points[:, 3] = np.arange(len(places)) + 1
    return points


def _write(root: Path, sweeps: int = 2) -> InfoFile:
    """Two points on the car and one on the cone in the keyframe, one on the car in each sweep, one elsewhere."""
    nowhere = np.array([0.0, 20.0, 0.0])
    _cloud(CAR[:3], CONE[:3] + 0.1, CAR[:3] + 0.2, nowhere).tofile(root / "key.bin")
    shift = rigid(rotation_z(0.3), [1.0, 0.0, 0.0])
    stored = []
    for number in range(1, sweeps + 1):
        there = np.linalg.inv(shift) @ [*CAR[:2] + 0.1 * number, CAR[2], 1.0]
        _cloud(there[:3], nowhere).tofile(root / f"{number}.bin")
        stored.append(SweepInfo(f"{number}.bin", shift, 10.0 - 0.05 * number))
    points = np.array([3, 1, 0])
    sample = SampleInfo(
        "one", 10.0, "key.bin", np.eye(4), np.eye(4), {}, tuple(stored),
        np.stack([CAR, CONE, LONELY]), ("car", "traffic_cone", "car"), points, points * 0, points > 0,
    )  # fmt: skip
    return InfoFile(root / "infos.pkl", "mmdet3d-1.1", "v1.0-mini", (sample,))


@pytest.fixture
def database(tmp_path: Path) -> GtDatabase:
    written = write_gt_database(tmp_path / "gt.npz", _write(tmp_path), tmp_path, OBJECT_CLASSES)
    assert (written.objects, written.points, written.problems) == (2, 5, ())
    assert written.per_class == {"car": 1, "traffic_cone": 1}
    return read_gt_database(tmp_path / "gt.npz")


def test_objects_keep_box_and_points(database: GtDatabase) -> None:
    assert database.names.tolist() == ["car", "traffic_cone"]
    np.testing.assert_array_equal(database.boxes, [CAR, CONE])
    np.testing.assert_array_equal(database.counts, [[2, 3, 4], [1, 1, 1]])
    np.testing.assert_allclose(database.points(1, 9), [[*CONE[:3] + 0.1, 2, 0]], rtol=1e-6)


def test_points_are_those_of_the_sweeps_that_are_used(database: GtDatabase) -> None:
    for sweeps in (0, 1, 2, 9):
        points = database.points(0, sweeps)
        used = min(sweeps, 2)
        np.testing.assert_allclose(points[:2, :3], [CAR[:3], CAR[:3] + 0.2], atol=1e-5)
        expected = [[*CAR[:2] + 0.1 * n, CAR[2], 1, 0.05 * n] for n in range(1, used + 1)]
        np.testing.assert_allclose(points[2:], np.reshape(expected, (-1, 5)), atol=1e-5)
        assert points.dtype == np.float32


def test_points_lie_relative_to_the_box_in_the_file(database: GtDatabase) -> None:
    assert np.abs(database.rows[:, :3]).max() < 0.5


def test_classes_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    written = write_gt_database(tmp_path / "gt.npz", _write(tmp_path), tmp_path, ("car",))
    assert written.per_class == {"car": 1}


def test_an_unreadable_sample_is_left_out_and_said(tmp_path: Path) -> None:
    info = _write(tmp_path)
    other = dataclasses.replace(info.samples[0], token="two", lidar_path="gone.bin")
    both = dataclasses.replace(info, samples=(other, *info.samples))
    seen: list[tuple[int, int, str]] = []
    written = write_gt_database(
        tmp_path / "gt.npz", both, tmp_path, OBJECT_CLASSES, lambda *report: seen.append(report)
    )
    (problem,) = written.problems
    assert problem.startswith("Sample two: ")
    assert "gone.bin" in problem
    assert written.objects == 2
    assert seen == [(1, 2, "gt.npz"), (2, 2, "gt.npz")]


def test_samples_with_different_numbers_of_sweeps(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    info, other = _write(tmp_path), _write(tmp_path / "b", sweeps=0)
    moved = dataclasses.replace(other.samples[0], lidar_path="b/key.bin")
    write_gt_database(
        tmp_path / "gt.npz", dataclasses.replace(info, samples=(moved, *info.samples)), tmp_path, OBJECT_CLASSES
    )
    database = read_gt_database(tmp_path / "gt.npz")
    np.testing.assert_array_equal(database.counts, [[2, 2, 2], [1, 1, 1], [2, 3, 4], [1, 1, 1]])
    np.testing.assert_allclose(database.points(3, 2), [[*CONE[:3] + 0.1, 2, 0]], rtol=1e-6)


def test_nothing_to_store(tmp_path: Path) -> None:
    write_gt_database(tmp_path / "gt.npz", _write(tmp_path), tmp_path, ())
    assert len(read_gt_database(tmp_path / "gt.npz").names) == 0


@pytest.mark.parametrize("broken", ["gt.npz", "gt.bin"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_damaged_database_is_named(tmp_path: Path, database: GtDatabase, broken: str, how: str) -> None:
    assert len(database.names) == 2
    path = tmp_path / broken
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BevctlError, match=r"gt\.(npz|bin)") as caught:
        read_gt_database(tmp_path / "gt.npz")
    assert caught.value.code == ExitCode.USAGE
    assert "data prepare --gt-database" in caught.value.hint


def test_a_database_of_mmdet3d_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "nuscenes_dbinfos_train.pkl"
    path.write_bytes(pickle.dumps({"car": [{"name": "car", "path": "car_0.bin"}]}))
    with pytest.raises(BevctlError, match=r"nuscenes_dbinfos_train\.pkl cannot be read: it is no \.npz file") as caught:
        read_gt_database(path)
    assert "dbinfos" in caught.value.hint


def test_objects_of_the_synthetic_set_hold_the_points_that_lie_on_them(synth_root: Path, tmp_path: Path) -> None:
    info = read_info(synth_root / "synth_infos_train.pkl")
    write_gt_database(tmp_path / "gt.npz", info, synth_root, OBJECT_CLASSES)
    database = read_gt_database(tmp_path / "gt.npz")
    sample = info.samples[-1]
    assert sample.boxes is not None
    cloud = load_points(synth_root, sample, 3, None)
    checked = 0
    for box, name, valid in zip(sample.boxes, sample.names, sample.valid, strict=True):
        inside = points_in_boxes(cloud, box[None])[0]
        found = np.flatnonzero((database.boxes[:, :7] == box[:7]).all(axis=1))
        if valid and inside.any():
            (index,) = found
            assert database.names[index] == name
            np.testing.assert_allclose(database.points(index, 3), cloud[inside], atol=1e-4)
            checked += 1
    assert checked > 10
