from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bevctl.batch import CAMERAS, OBJECT_CLASSES
from bevctl.config.load import load
from bevctl.config.schema import Config, DataConfig, MapHeadConfig, ModelConfig
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.data.sample import Sample
from bevctl.data.sweeps import load_points
from bevctl.errors import BevctlError, ExitCode
from bevctl.geometry import invert_rigid, points_in_boxes, project_points
from tests.data.sets import config_for, write_set


@pytest.fixture
def config(tmp_path: Path, jpeg: bytes) -> Config:
    return write_set(tmp_path, jpeg)


def _sample(dataset: NuScenesDataset, index: int | tuple[int, int] = 0) -> Sample:
    item = dataset[index]
    assert item.problems == ()
    assert item.sample is not None
    return item.sample


def test_a_sample_in_evaluation(config: Config) -> None:
    sample = _sample(NuScenesDataset(config, "val"))
    assert sample.token == "sample-0"
    assert sample.images is not None
    assert [image.shape for image in sample.images] == [(32, 64, 3)] * 2
    assert sample.points is not None
    assert sample.points.shape[1] == 5
    # the barrier has no point on it
    np.testing.assert_array_equal(sample.labels, [OBJECT_CLASSES.index("car"), OBJECT_CLASSES.index("pedestrian")])
    assert sample.boxes.shape == (2, 9)
    assert sample.has_boxes
    assert sample.bev_map is None


def test_training_takes_the_next_sample_in_place_of_a_skipped_one(config: Config) -> None:
    tokens = [sample.token for sample in NuScenesDataset(config, "val").info.samples]

    def skipping(*skipped: str) -> Config:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, skip_samples=skipped))

    dataset = NuScenesDataset(skipping(tokens[-1]), "train")
    assert len(dataset) == len(tokens)
    assert _sample(dataset, (0, len(tokens) - 1)).token == tokens[0]
    assert _equal(_sample(dataset, (3, 0)), _sample(NuScenesDataset(config, "train"), (3, 0)))
    assert _sample(NuScenesDataset(skipping(tokens[-1]), "val"), len(tokens) - 1).token == tokens[-1]
    with pytest.raises(BevctlError, match="no sample elsewhere"):
        NuScenesDataset(skipping("elsewhere"), "train")
    with pytest.raises(BevctlError, match="leaves no sample"):
        NuScenesDataset(skipping(*tokens), "train")


def test_labels_follow_the_order_of_the_config(config: Config) -> None:
    data = dataclasses.replace(config.data, classes=("pedestrian", "car"))
    sample = _sample(NuScenesDataset(dataclasses.replace(config, data=data), "val"))
    np.testing.assert_array_equal(sample.labels, [1, 0])


def test_other_classes_are_left_out(config: Config) -> None:
    data = dataclasses.replace(config.data, classes=("bus",))
    sample = _sample(NuScenesDataset(dataclasses.replace(config, data=data), "val"))
    assert sample.boxes.shape == (0, 9)
    assert sample.has_boxes


def _equal(first: Sample, second: Sample) -> bool:
    return all(np.array_equal(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(Sample))


def test_a_sample_depends_on_seed_epoch_and_index_only(config: Config) -> None:
    dataset = NuScenesDataset(config, "train")
    first = _sample(dataset, (3, 1))
    _sample(dataset, (3, 2))
    assert _equal(_sample(dataset, (3, 1)), first)
    assert _equal(_sample(NuScenesDataset(config, "train"), (3, 1)), first)
    assert not _equal(_sample(dataset, (4, 1)), first)
    other = NuScenesDataset(dataclasses.replace(config, seed=1), "train")
    assert not _equal(_sample(other, (3, 1)), first)


def test_evaluation_does_not_depend_on_them(config: Config) -> None:
    other = NuScenesDataset(dataclasses.replace(config, seed=5), "val")
    assert _equal(_sample(NuScenesDataset(config, "val"), (0, 1)), _sample(other, (9, 1)))


@pytest.mark.parametrize(
    ("choice", "split", "random"),
    [
        ("auto", "train", True),
        ("auto", "val", False),
        ("nearest", "train", False),
        ("nearest", "val", False),
        ("random", "train", True),
        ("random", "val", True),
    ],
)
def test_which_sweeps_are_taken(synth_root: Path, choice: str, split: str, random: bool) -> None:
    sets = [f"data.root={synth_root}", "data.sweeps=2", f"data.sweep_choice={choice}", "model.camera=null"]
    dataset = NuScenesDataset(load("tiny", sets=[*sets, "model.map=null"]).config, split)
    last = len(dataset) - 1
    assert len(dataset.info_at(last).sweeps) > 4

    def ages(epoch: int) -> tuple[float, ...]:
        points = _sample(dataset, (epoch, last)).points
        assert points is not None
        return tuple(np.unique(points[:, 4].round(3)))

    drawn = {ages(epoch) for epoch in range(6)}
    assert (len(drawn) > 1) == random
    assert ages(0) == ages(0)
    if not random:
        (nearest,) = drawn
        key, sweeps = dataset.info_at(last).timestamp, dataset.info_at(last).sweeps
        np.testing.assert_allclose(nearest, [0.0, *(key - sweep.timestamp for sweep in sweeps[:2])], atol=2e-3)


def test_how_sweeps_are_moved(synth_root: Path) -> None:
    sets = [f"data.root={synth_root}", "data.sweeps=2", "data.augment=false", "model.camera=null", "model.map=null"]
    for pose in ("exact", "mmdet3d"):
        dataset = NuScenesDataset(load("tiny", sets=[*sets, f"data.sweep_pose={pose}"]).config, "val")
        info = dataset.info_at(len(dataset) - 1)
        points = dataset.steps(info, 0)["read points"](dataset.bare_sample(info), np.random.default_rng(0)).points
        assert points is not None
        np.testing.assert_array_equal(points, load_points(synth_root, info, 2, None, pose))


def test_what_is_absent_is_said_once(config: Config) -> None:
    assert NuScenesDataset(config, "train").notes == (
        "6 of 6 samples have no CAM_FRONT_RIGHT; the model sees nothing there.",
        "6 of 6 samples have no CAM_FRONT_LEFT; the model sees nothing there.",
        "6 of 6 samples have no CAM_BACK_LEFT; the model sees nothing there.",
        "6 of 6 samples have no CAM_BACK_RIGHT; the model sees nothing there.",
        "6 of 6 samples of infos.pkl name no map location; they are left out of the map loss (`bevctl data prepare` "
        "writes it).",
    )
    model = dataclasses.replace(config.model, camera=None, map=None)
    assert NuScenesDataset(dataclasses.replace(config, model=model), "train").notes == ()


def test_a_missing_map_file_is_said(tmp_path: Path, jpeg: bytes) -> None:
    dataset = NuScenesDataset(write_set(tmp_path, jpeg, location="boston-seaport"), "val")
    (note,) = [note for note in dataset.notes if "boston-seaport" in note]
    assert "maps/expansion/boston-seaport.json; the 6 samples" in note
    assert _sample(dataset).bev_map is None


def test_a_test_split_has_no_boxes(tmp_path: Path, jpeg: bytes) -> None:
    config = write_set(tmp_path, jpeg)
    _edit(tmp_path, lambda entry: entry.pop("instances"))
    dataset = NuScenesDataset(config, "val")
    assert dataset.notes[0] == "6 of 6 samples have no boxes; they are left out of the detection loss."
    sample = _sample(dataset)
    assert not sample.has_boxes
    assert sample.boxes.shape == (0, 9)


def _edit(root: Path, change: Any, which: slice = slice(None)) -> None:
    path = root / "infos.pkl"
    document = pickle.loads(path.read_bytes())
    for entry in document["data_list"][which]:
        change(entry)
    path.write_bytes(pickle.dumps(document))


def test_a_camera_that_one_sample_lacks_sees_no_point(tmp_path: Path, jpeg: bytes) -> None:
    config = write_set(tmp_path, jpeg)
    _edit(tmp_path, lambda entry: entry["images"].pop("CAM_BACK"), slice(0, 1))
    dataset = NuScenesDataset(config, "val")
    assert dataset.cameras == ("CAM_FRONT", "CAM_BACK")
    assert "1 of 6 samples have no CAM_BACK; the model sees nothing there." in dataset.notes
    sample = _sample(dataset)
    assert sample.images is not None
    assert sample.points is not None
    assert not np.array_equal(sample.images[0], sample.images[1])
    lidar2image = sample.intrinsics[1] @ invert_rigid(sample.camera2lidar[1])
    _, depth = project_points(lidar2image, sample.points[:, :3])
    assert (depth < -1000).all()
    # and what it might show lies outside any grid
    seen = sample.camera2lidar[1] @ np.array([3.0, 2.0, 60.0, 1.0])
    assert seen[2] < -1000


def test_sensors_are_read_only_when_used(tmp_path: Path, jpeg: bytes) -> None:
    config = write_set(tmp_path, jpeg)
    no_camera = dataclasses.replace(config.model, camera=None)
    assert _sample(NuScenesDataset(dataclasses.replace(config, model=no_camera), "val")).images is None
    assert config.model.camera is not None
    assert config.model.camera.view is not None
    for kind, read in (("depth_lss", True), ("lss", False)):
        view = dataclasses.replace(config.model.camera.view, kind=kind)
        camera = dataclasses.replace(config.model.camera, view=view)
        model = dataclasses.replace(config.model, camera=camera, lidar=None)
        sample = _sample(NuScenesDataset(dataclasses.replace(config, model=model), "val"))
        assert (sample.points is not None) == read


@pytest.mark.parametrize(
    "broken", ["samples/CAM_BACK/1.jpg", "samples/LIDAR_TOP/1.bin", "sweeps/LIDAR_TOP/sweep-1.bin"]
)
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_an_unreadable_file(tmp_path: Path, jpeg: bytes, broken: str, how: str) -> None:
    """Evaluation leaves its sample out, training takes another, always the same one; both name it."""
    config = write_set(tmp_path, jpeg)
    path = tmp_path / broken
    if how == "cut":
        path.write_bytes(path.read_bytes()[:333])
    else:
        path.unlink()
    left_out = NuScenesDataset(config, "val")[1]
    assert left_out.sample is None
    (problem,) = left_out.problems
    assert problem.startswith("Sample sample-1: ")
    assert ("1.jpg" if "CAM" in broken else "1.bin") in problem
    dataset = NuScenesDataset(config, "train")
    replaced = dataset[(2, 1)]
    assert replaced.sample is not None
    assert replaced.sample.token != "sample-1"
    assert replaced.problems[0] == problem
    again = dataset[(2, 1)].sample
    assert again is not None
    assert _equal(again, replaced.sample)
    assert dataset[(2, 0)].problems == ()


def test_training_gives_up_after_ten_unreadable_samples(tmp_path: Path, jpeg: bytes) -> None:
    config = write_set(tmp_path, jpeg)
    for path in (tmp_path / "samples" / "CAM_FRONT").iterdir():
        path.unlink()
    item = NuScenesDataset(config, "train")[0]
    assert item.sample is None
    assert len(item.problems) == 10


def test_a_missing_root_says_how_to_get_data(tmp_path: Path) -> None:
    config = config_for(tmp_path / "none", "infos.pkl")
    with pytest.raises(BevctlError, match="none does not exist") as caught:
        NuScenesDataset(config, "train")
    assert caught.value.code == ExitCode.USAGE
    assert f"bevctl data synth {tmp_path / 'none'}" in caught.value.hint


def test_a_missing_or_empty_info_file_is_named(tmp_path: Path, jpeg: bytes) -> None:
    config = write_set(tmp_path, jpeg, count=0)
    with pytest.raises(BevctlError, match="holds no samples"):
        NuScenesDataset(config, "val")
    (tmp_path / "infos.pkl").unlink()
    with pytest.raises(BevctlError, match=r"no info file .*infos\.pkl") as caught:
        NuScenesDataset(config, "val")
    assert "data prepare" in caught.value.hint


@pytest.fixture(scope="module")
def frame(shared: Path) -> NuScenesDataset:
    root = shared / "nuscenes_frame"
    (info,) = root.glob("*.pkl")
    data = DataConfig(root=str(root), info_train=info.name, info_val=info.name)
    return NuScenesDataset(Config(data=data, model=ModelConfig(map=MapHeadConfig())), "val")


def test_the_real_frame(frame: NuScenesDataset) -> None:
    assert frame.cameras == CAMERAS
    info = frame.info.samples[0]
    assert info.boxes is not None
    assert len(info.boxes) == 69
    near = (np.abs(info.boxes[:, :2]) < 54).all(axis=1) & np.isin(info.names, OBJECT_CLASSES)
    assert (near & (info.num_lidar_pts >= 5)).sum() == 26
    sample = _sample(frame)
    assert sample.images is not None
    assert sample.points is not None
    assert [image.shape for image in sample.images] == [(256, 704, 3)] * 6
    points = np.fromfile(frame.root / info.lidar_path, dtype=np.float32).reshape(-1, 5)
    assert len(points) == 34_688
    # one sweep in range, and nine copies without the echoes of the car
    ego = (np.abs(points[:, :2]) < 1).all(axis=1)
    low, high = np.array(frame.config.model.point_cloud_range).reshape(2, 3)
    in_range = ((points[:, :3] > low) & (points[:, :3] < high)).all(axis=1)
    assert in_range.sum() == 32_330
    assert len(sample.points) == 32_330 + 9 * (in_range & ~ego).sum()


def test_the_real_frames_boxes_hold_the_points_they_claim(frame: NuScenesDataset) -> None:
    info = frame.info.samples[0]
    points = np.fromfile(frame.root / info.lidar_path, dtype=np.float32).reshape(-1, 5)
    assert info.boxes is not None
    counted = points_in_boxes(points, info.boxes).sum(axis=1)
    assert (counted == info.num_lidar_pts).sum() >= 60
    np.testing.assert_allclose(counted, info.num_lidar_pts, atol=2, rtol=0.12)


def test_the_real_frames_boxes_project_onto_the_pixels_they_claim(frame: NuScenesDataset) -> None:
    """Centres against `center_2d` of the file's own image annotations."""
    document = pickle.loads(frame.info.path.read_bytes())["data_list"][0]
    info = frame.info.samples[0]
    assert info.boxes is not None
    checked = 0
    for name, instances in document["cam_instances"].items():
        camera = info.cameras[name]
        intrinsics = np.eye(4)
        intrinsics[:3, :3] = camera.intrinsics
        pixels, depth = project_points(intrinsics @ invert_rigid(camera.camera2lidar), info.boxes[:, :3])
        for instance in instances:
            distance = np.linalg.norm(pixels - instance["center_2d"], axis=1)
            best = int(np.argmin(np.where(depth > 0, distance, np.inf)))
            assert distance[best] < 1.5
            assert depth[best] == pytest.approx(instance["depth"], abs=0.05)
            checked += 1
    assert checked >= 70
