"""Camera sweeps of `bevctl data prepare`: the images before each keyframe, and where they were taken from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bevctl.batch import CAMERAS
from bevctl.config.schema import PreviousFrameConfig
from bevctl.data.index import read_info, resolve
from bevctl.data.prepare import open_tables, prepare
from bevctl.data.prepare_sweeps import EarlierImages, has_sweeps
from bevctl.data.previous import PreviousFrames
from bevctl.data.synth import SynthOptions, make_dataset
from bevctl.data.unpickle import load_pickle
from bevctl.errors import BevctlError
from bevctl.geometry import invert_rigid, quaternion_to_rotation, rigid
from tests.data import infos as made

RATE = 5
"""Images of a synthetic camera from one keyframe to the next."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene of three keyframes with images between them."""
    root = tmp_path_factory.mktemp("synth")
    options = SynthOptions(
        train_scenes=1, val_scenes=0, keyframes=3, image_scale=0.05, sweeps=False, camera_sweeps=True, processes=1
    )
    make_dataset(root, options)
    prepare(root, options.version, prefix="synth", camera_sweeps=7)
    return root


@pytest.fixture(scope="module")
def tables(root: Path) -> Any:
    return open_tables(root, "v1.0-mini")


def test_every_sample_looks_back_on_what_there_is(root: Path) -> None:
    samples = read_info(root / "synth_infos_train.pkl").samples
    assert [sample.camera_sweeps.shape for sample in samples] == [(0, 6), (RATE, 6), (7, 6)]
    assert all((sample.camera_sweeps >= 0).all() for sample in samples)


def test_images_are_those_before_in_the_tables_and_exactly_placed(root: Path, tables: Any) -> None:
    """Camera to world through the poses of the tables at the image's own time."""
    info = read_info(root / "synth_infos_train.pkl")
    sample = info.samples[2]
    keys = tables.get("sample", sample.token)["data"]
    for place in range(7):
        frames = PreviousFrames(info, PreviousFrameConfig(eval=place), train=False)
        images = frames.images(sample, CAMERAS, np.random.default_rng(0))
        for name, image in images.items():
            record = tables.get("sample_data", keys[name])
            for _ in range(place + 1):
                record = tables.get("sample_data", record["prev"])
            assert image.path == record["filename"]
            assert resolve(root, image.path, name).is_file()
            assert image.timestamp == pytest.approx(record["timestamp"] * 1e-6, abs=1e-6)
            sensor = tables.get("calibrated_sensor", record["calibrated_sensor_token"])
            ego = tables.get("ego_pose", record["ego_pose_token"])
            camera2global = _pose(ego) @ _pose(sensor)
            np.testing.assert_allclose(sample.lidar2global @ image.camera2lidar, camera2global, atol=1e-6)
            np.testing.assert_array_equal(image.intrinsics, sensor["camera_intrinsic"])


def _pose(record: Any) -> np.ndarray:
    return rigid(quaternion_to_rotation(record["rotation"]), record["translation"])


def test_each_image_is_stored_once(root: Path) -> None:
    stored = load_pickle(root / "synth_infos_train.pkl")["camera_sweeps"]
    assert len(stored["path"]) == len(set(stored["path"].tolist())) == 6 * 2 * RATE
    assert stored["cam2img"].shape == (6, 3, 3)


def test_sets_with_images_of_keyframes_alone_have_no_sweeps(synth_root: Path) -> None:
    """Their places would count half seconds."""
    assert not has_sweeps(open_tables(synth_root, "v1.0-mini"))
    info = read_info(synth_root / "synth_infos_train.pkl")
    assert all(len(sample.camera_sweeps) == 0 for sample in info.samples)
    notes = list(PreviousFrames(info, PreviousFrameConfig(), train=False).notes())
    assert "holds no camera sweeps" in notes[0]


class _Tables:
    """Chains of two cameras at given times (ms); the last image of each is the keyframe's."""

    def __init__(self, **times: list[int]) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        for camera, instants in times.items():
            for number, instant in enumerate(instants):
                token = f"{camera}/{number}"
                before = f"{camera}/{number - 1}" if number else ""
                self.records[token] = {"token": token, "prev": before, "timestamp": instant * 1000}
                self.records[token] |= {"calibrated_sensor_token": camera, "filename": token}
        self.sample = {"data": {camera: f"{camera}/{len(instants) - 1}" for camera, instants in times.items()}}

    def get(self, table: str, token: str) -> dict[str, Any]:
        assert table == "sample_data"
        return self.records[token]


def test_images_of_a_moment_belong_together_although_one_was_dropped() -> None:
    """The back camera fires 40 ms later and lost an image: that moment has none, the others keep theirs."""
    tables = _Tables(CAM_FRONT=[0, 83, 167, 250, 333], CAM_BACK=[42, 122, 292, 373])
    rows = EarlierImages(tables, 30).of(tables.sample)
    back = CAMERAS.index("CAM_BACK")
    assert [int(row[0] >= 0) for row in rows] == [1, 1, 1, 1]
    assert [int(row[back] >= 0) for row in rows] == [1, 0, 1, 1]
    assert (rows[:, [1, 2, 4, 5]] == -1).all()


def test_a_sample_without_cameras_looks_back_on_nothing() -> None:
    assert EarlierImages(_Tables(), 30).of({"data": {}}).shape == (0, 6)


@pytest.mark.parametrize("damage", ["row", "columns", "times", "key"])
def test_a_table_that_does_not_fit_is_refused(root: Path, tmp_path: Path, damage: str) -> None:
    document = load_pickle(root / "synth_infos_train.pkl")
    stored, entry = document["camera_sweeps"], document["data_list"][1]
    if damage == "row":
        entry["camera_sweeps"][0, 0] = 10_000
    elif damage == "columns":
        entry["camera_sweeps"] = entry["camera_sweeps"][:, :5]
    elif damage == "times":
        stored["timestamp"] = stored["timestamp"][:-1]
    else:
        del stored["cam2ego_rotation"]
    with pytest.raises(BevctlError, match=r"The camera sweeps of .*a\.pkl cannot be read: ") as caught:
        read_info(made.write(tmp_path / "a.pkl", document))
    assert "data prepare" in caught.value.hint


def test_the_car_moved_in_between(root: Path) -> None:
    """Synthetic streets are driven through at 4.5 to 7.5 m/s; one image earlier is a tenth of a second."""
    info = read_info(root / "synth_infos_train.pkl")
    sample = info.samples[2]
    frames = PreviousFrames(info, PreviousFrameConfig(eval=0), train=False)
    image = frames.images(sample, CAMERAS, np.random.default_rng(0))["CAM_FRONT"]
    way = invert_rigid(sample.cameras["CAM_FRONT"].camera2lidar) @ image.camera2lidar
    assert 0.4 < np.linalg.norm(way[:3, 3]) < 0.8
    assert way[2, 3] < 0, "it was further back along the viewing direction"
