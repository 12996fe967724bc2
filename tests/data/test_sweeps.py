from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from bevctl.data.files import read_image, read_points
from bevctl.data.info import SampleInfo, SweepInfo
from bevctl.data.sweeps import load_points
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import rigid, rotation_z

KEY = np.array([[10, 0, 0, 50, 3], [0.5, 0.5, -1, 20, 9]], dtype=np.float32)
SWEEP = np.array([[20, 0, 0, 60, 4], [-0.9, 0.9, -1, 30, 7], [0.5, 1.5, 0, 40, 1]], dtype=np.float32)


def _info(root: Path, sweeps: int) -> SampleInfo:
    """A keyframe and `sweeps` earlier sweeps, each 0.1 s and one metre further back and a little turned."""
    root.mkdir(exist_ok=True)
    KEY.tofile(root / "key.bin")
    stored = []
    for number in range(1, sweeps + 1):
        SWEEP.tofile(root / f"sweep{number}.bin")
        pose = rigid(rotation_z(0.1 * number), [0.0, -1.0 * number, 0.0])
        stored.append(SweepInfo(f"sweep{number}.bin", pose, 100.0 - 0.1 * number))
    none = np.zeros(0, dtype=np.int64)
    eye = np.eye(4)
    return SampleInfo("t", 100.0, "key.bin", eye, eye, {}, tuple(stored), None, (), none, none, none.astype(bool), None)


def test_a_sweep_moves_exactly_and_carries_its_age(tmp_path: Path) -> None:
    points = load_points(tmp_path, _info(tmp_path, 1), 9, None)
    c, s = np.cos(0.1), np.sin(0.1)
    expected: list[list[float]] = [
        [10, 0, 0, 50, 0],
        [0.5, 0.5, -1, 20, 0],  # near the car: kept in the keyframe
        [20 * c, 20 * s - 1, 0, 60, 0.1],
        [0.5 * c - 1.5 * s, 0.5 * s + 1.5 * c - 1, 0, 40, 0.1],
    ]
    np.testing.assert_allclose(points, expected, atol=1e-5)
    assert points.dtype == np.float32


@pytest.mark.parametrize("number", [1, 2])
def test_a_sweep_moves_as_mmdet3ds_loader_moves_it(tmp_path: Path, number: int) -> None:
    """Its info files hold the map from keyframe to sweep, M; its loader computes p M's rotation - M's translation."""
    info = _info(tmp_path, number)
    stored = np.linalg.inv(info.sweeps[-1].sweep2key)
    expected = SWEEP[[0, 2], :3] @ stored[:3, :3] - stored[:3, 3]
    points = load_points(tmp_path, info, 9, None, "mmdet3d")
    np.testing.assert_allclose(points[-2:, :3], expected, atol=1e-5)
    exact = load_points(tmp_path, info, 9, None)
    shift = np.linalg.norm(points[-2:, :3] - exact[-2:, :3], axis=1)
    np.testing.assert_allclose(shift, 2 * number * np.sin(0.1 * number / 2), atol=1e-5)
    np.testing.assert_array_equal(points[:, 3:], exact[:, 3:])
    np.testing.assert_array_equal(points[: len(KEY)], exact[: len(KEY)])


def test_without_sweeps_the_keyframe_is_repeated(tmp_path: Path) -> None:
    points = load_points(tmp_path, _info(tmp_path, 0), 3, None)
    assert len(points) == 2 + 3 * 1
    np.testing.assert_array_equal(points[2:, :4], np.repeat(KEY[:1, :4], 3, axis=0))
    assert (points[:, 4] == 0).all()


def test_evaluation_takes_the_nearest(tmp_path: Path) -> None:
    points = load_points(tmp_path, _info(tmp_path, 5), 2, None)
    np.testing.assert_allclose(np.unique(points[:, 4]), [0, 0.1, 0.2], atol=1e-6)


def test_training_chooses_among_the_stored(tmp_path: Path) -> None:
    info = _info(tmp_path, 5)
    ages = [np.unique(load_points(tmp_path, info, 2, np.random.default_rng(seed))[:, 4]) for seed in range(40)]
    assert all(len(age) == 3 for age in ages)
    assert {round(float(x), 1) for age in ages for x in age} == {0, 0.1, 0.2, 0.3, 0.4, 0.5}
    again = load_points(tmp_path, info, 2, np.random.default_rng(7))
    np.testing.assert_array_equal(again, load_points(tmp_path, info, 2, np.random.default_rng(7)))


def test_no_sweeps_asked_for(tmp_path: Path) -> None:
    for stored in (0, 3):
        assert len(load_points(tmp_path, _info(tmp_path, stored), 0, None)) == len(KEY)


@pytest.mark.parametrize("size", [0, 7, 21, 39])
def test_a_lidar_file_of_odd_size_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(KEY.tobytes()[:size])
    with pytest.raises(BevctlError, match=rf"a\.bin cannot be read: {size} bytes") as caught:
        read_points(path)
    assert caught.value.code == ExitCode.RUN_FAILED


def test_points_that_are_not_finite_are_dropped_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = KEY.copy()
    broken[0, 1] = np.nan
    path = tmp_path / "a.bin"
    broken.tofile(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_array_equal(read_points(path), KEY[1:])
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: 1 points with non-finite values are left out."
    ]


def test_images_that_cannot_be_read_are_named(tmp_path: Path, jpeg: bytes) -> None:
    cases = {"cut": jpeg[: len(jpeg) // 2], "empty": b"", "text": b"<html>not found</html>"}
    for name, data in cases.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(data)
        with pytest.raises(BevctlError, match=rf"{name}\.jpg cannot be read") as caught:
            read_image(path)
        assert caught.value.code == ExitCode.RUN_FAILED
    with pytest.raises(BevctlError, match="No such file"):
        read_image(tmp_path / "none.jpg")


def test_a_whole_image_is_rgb(tmp_path: Path, jpeg: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg)
    image = read_image(tmp_path / "a.jpg")
    assert image.shape == (36, 64, 3)
    assert image.dtype == np.uint8
