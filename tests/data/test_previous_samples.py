"""Samples with two moments, from files on disk: order of views, what is equal to before, and what can be missing."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bevctl.batch import CAMERAS
from bevctl.config.load import load
from bevctl.config.schema import Config, PreviousFrameConfig
from bevctl.data.index import read_info
from bevctl.data.info import InfoFile, SampleInfo
from bevctl.data.loader import collate
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.data.sample import Item, Sample
from bevctl.geometry import invert_rigid, project_points, transform_points
from tests.data.sets import write_set

KEYFRAMES = PreviousFrameConfig(source="keyframes", train=(0, 1), eval=0)


def two_moments(config: Config, previous: PreviousFrameConfig | None = KEYFRAMES) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, previous=previous))


@pytest.fixture(scope="module")
def config(synth_root: Path) -> Config:
    """Three keyframes a scene, images of 160×90."""
    return load("tiny", sets=[f"data.root={synth_root}", "data.image.shared=true"]).config


def sample_of(dataset: NuScenesDataset, index: int | tuple[int, int]) -> Sample:
    item = dataset[index]
    assert item.problems == ()
    assert item.sample is not None
    return item.sample


def test_the_keyframes_views_come_first_and_are_what_they_were(config: Config) -> None:
    plain = sample_of(NuScenesDataset(config, "val"), 2)
    both = sample_of(NuScenesDataset(two_moments(config), "val"), 2)
    assert plain.images is not None
    assert both.images is not None
    assert (len(plain.images), len(both.images)) == (6, 12)
    for name in ("intrinsics", "camera2lidar", "image_aug", "times"):
        ours, expected = getattr(both, name), getattr(plain, name)
        assert len(ours) == 12
        np.testing.assert_array_equal(ours[:6], expected)
    for name in ("boxes", "labels", "points", "bev_map"):
        np.testing.assert_array_equal(getattr(both, name), getattr(plain, name))
    for ours, expected in zip(both.images, plain.images, strict=False):
        np.testing.assert_array_equal(ours, expected)


def test_the_earlier_views_are_those_of_the_keyframe_before(config: Config) -> None:
    dataset = NuScenesDataset(two_moments(config), "val")
    earlier, later = sample_of(dataset, 1), sample_of(dataset, 2)
    assert earlier.images is not None
    assert later.images is not None
    for ours, expected in zip(later.images[6:], earlier.images[:6], strict=True):
        np.testing.assert_array_equal(ours, expected)
    np.testing.assert_allclose(later.times[6:] - later.times[:6], 0.5, atol=0.01)


def test_static_objects_project_to_the_same_place_in_the_world(config: Config) -> None:
    """Barriers do not move: the earlier camera sees them where its own keyframe's boxes put them."""
    dataset = NuScenesDataset(two_moments(config), "val")
    earlier, later = dataset.info_at(1), dataset.info_at(2)
    sample = dataset.bare_sample(later)
    sample = dataset.steps(later, 0)["choose previous frame"](sample, np.random.default_rng(0))
    here, there = (dict(_barriers(info, later.lidar2global)) for info in (later, earlier))
    shared = set(here) & set(there)
    assert len(shared) >= 3
    for view, name in enumerate(CAMERAS, start=6):
        camera = earlier.cameras[name]
        for place in shared:
            ours, _ = project_points(invert_rigid(sample.camera2lidar[view]), here[place][None])
            own, depth = project_points(invert_rigid(camera.camera2lidar), _in(earlier, later, there[place]))
            if depth[0] > 1.0:
                np.testing.assert_allclose(ours, own, atol=1e-3)


def _barriers(info: SampleInfo, lidar2global: np.ndarray) -> list[tuple[tuple[float, ...], np.ndarray]]:
    """(place in the world, to half a metre; centre in the LiDAR frame of `lidar2global`) of each barrier."""
    assert info.boxes is not None
    rows = [box[:3] for box, name in zip(info.boxes, info.names, strict=True) if name == "barrier"]
    world = transform_points(info.lidar2global, np.array(rows))
    centres = transform_points(invert_rigid(lidar2global), world)
    return [(tuple((2 * point).round() / 2), centre) for point, centre in zip(world, centres, strict=True)]


def _in(earlier: SampleInfo, later: SampleInfo, centre: np.ndarray) -> np.ndarray:
    """A centre in the later LiDAR frame → in the earlier one, (1, 3)."""
    moved = invert_rigid(earlier.lidar2global) @ later.lidar2global
    return transform_points(moved, centre[None])


def test_a_batch_has_the_views_of_both_moments(config: Config) -> None:
    dataset = NuScenesDataset(two_moments(config), "train")
    batch = collate([dataset[(0, index)] for index in range(3)])
    assert batch.images is not None
    assert batch.images.shape == (3, 12, 3, 96, 256)
    assert batch.calibration.times.shape == (3, 12)
    assert batch.calibration.lidar2image.shape == (3, 12, 4, 4)
    assert batch.padding is None
    assert (batch.calibration.times[:, 6:] - batch.calibration.times[:, :6] > 0.4).all()
    assert (batch.calibration.image_aug == batch.calibration.image_aug[:, :1]).all(), "shared by all views"


def test_padding_reaches_the_batch(config: Config) -> None:
    image = dataclasses.replace(config.data.image, pad=True, resize_eval=0.12)
    padded = dataclasses.replace(config, data=dataclasses.replace(config.data, image=image, previous=KEYFRAMES))
    batch = collate([NuScenesDataset(padded, "val")[0]])
    assert batch.images is not None
    assert batch.padding is not None
    assert batch.padding.shape == (1, 12, 96, 256)
    assert batch.padding[..., 192:].all()
    assert not batch.padding[..., :96, :192].any()
    assert (batch.images[batch.padding[:, :, None].expand_as(batch.images)] == 0).all()


def test_the_choice_depends_on_seed_epoch_and_index_only(config: Config) -> None:
    dataset = NuScenesDataset(two_moments(config), "train")
    ages = {(e, i): sample_of(dataset, (e, i)).times for e in range(6) for i in (2, 5)}
    again = NuScenesDataset(two_moments(config), "train")
    for index in sorted(ages, reverse=True):
        np.testing.assert_array_equal(sample_of(again, index).times, ages[index])
    drawn = {float(np.round(times[6], 1)) for times in ages.values()}
    assert drawn == {0.5, 1.0}


def test_an_info_file_without_sweeps_is_said_once(config: Config) -> None:
    dataset = NuScenesDataset(two_moments(config, PreviousFrameConfig()), "val")
    assert len([note for note in dataset.notes if "camera sweeps" in note]) == 1
    assert "1 of 3 samples of synth_infos_val.pkl have no earlier images; they see their own twice." in dataset.notes
    assert not any("earlier" in note for note in NuScenesDataset(config, "val").notes)


def test_the_first_sample_of_a_scene_has_its_own_images_twice(config: Config) -> None:
    sample = sample_of(NuScenesDataset(two_moments(config), "val"), 0)
    assert sample.images is not None
    for first, second in zip(sample.images[:6], sample.images[6:], strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(sample.camera2lidar[:6], sample.camera2lidar[6:])
    np.testing.assert_allclose(sample.times[6:] - sample.times[:6], 0.5)


def _without(info: InfoFile, index: int, camera: str) -> InfoFile:
    samples = list(info.samples)
    cameras = {name: image for name, image in samples[index].cameras.items() if name != camera}
    samples[index] = dataclasses.replace(samples[index], cameras=cameras)
    return dataclasses.replace(info, samples=tuple(samples))


def test_a_camera_that_is_missing_earlier_shows_an_older_image_or_nothing(config: Config) -> None:
    info = read_info(Path(config.data.root) / config.data.info_val)
    older = sample_of(NuScenesDataset(two_moments(config), "val", _without(info, 1, "CAM_BACK")), 2)
    back = CAMERAS.index("CAM_BACK")
    assert older.times[6 + back] == pytest.approx(1.0, abs=0.01)
    np.testing.assert_allclose(np.delete(older.times[6:], back), 0.5, atol=0.01)
    never = NuScenesDataset(two_moments(config), "val", _without(_without(info, 1, "CAM_BACK"), 0, "CAM_BACK"))
    nothing = sample_of(never, 2)
    assert nothing.images is not None
    assert not nothing.images[6 + back].any()
    assert nothing.camera2lidar[6 + back, 2, 3] < -1000, "far away: it sees no point of the scene"
    assert nothing.times[6 + back] == pytest.approx(np.delete(nothing.times[6:], back).mean())
    assert any("CAM_BACK" in note for note in never.notes)


def test_images_of_another_size_are_brought_to_the_networks(config: Config, tmp_path: Path) -> None:
    """Half as large, with intrinsics to match: the same view, and the matrix of the map says so."""
    root = tmp_path / "set"
    shutil.copytree(config.data.root, root)
    info = read_info(root / config.data.info_val)
    samples = list(info.samples)
    cameras = {}
    for name, image in samples[1].cameras.items():
        path = root / "samples" / name / Path(image.path).name
        with Image.open(path) as opened:
            opened.resize((80, 45)).save(path)
        intrinsics = np.diag([0.5, 0.5, 1.0]) @ image.intrinsics
        cameras[name] = dataclasses.replace(image, path=path.name, intrinsics=intrinsics)
    samples[1] = dataclasses.replace(samples[1], cameras=cameras)
    smaller = two_moments(dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(root))))
    odd = sample_of(NuScenesDataset(smaller, "val", dataclasses.replace(info, samples=tuple(samples))), 2)
    plain = sample_of(NuScenesDataset(two_moments(config), "val"), 2)
    assert odd.images is not None
    assert {image.shape for image in odd.images} == {(96, 256, 3)}
    ours = odd.image_aug[6:, :3, :3] @ odd.intrinsics[6:, :3, :3]
    np.testing.assert_allclose(ours, plain.image_aug[6:, :3, :3] @ plain.intrinsics[6:, :3, :3], atol=0.6)


def test_an_earlier_image_that_cannot_be_read_is_named(tmp_path: Path, jpeg: bytes) -> None:
    config = two_moments(write_set(tmp_path, jpeg, scene_token="scene"))
    info = read_info(tmp_path / "infos.pkl")
    timed = [dataclasses.replace(sample, timestamp=100.0 + 0.5 * i) for i, sample in enumerate(info.samples)]
    (tmp_path / "samples" / "CAM_BACK" / "0.jpg").unlink()
    dataset = NuScenesDataset(config, "val", dataclasses.replace(info, samples=tuple(timed)))
    item = dataset[1]
    assert item.sample is None
    assert len(item.problems) == 1
    assert "Sample sample-1: CAM_BACK file '0.jpg' is not in" in item.problems[0]
    assert dataset[2].sample is not None


def test_without_a_camera_branch_nothing_is_looked_for(config: Config) -> None:
    blind = dataclasses.replace(two_moments(config), model=dataclasses.replace(config.model, camera=None, map=None))
    dataset = NuScenesDataset(blind, "val")
    assert "choose previous frame" not in dataset.steps(dataset.info_at(0), 0)
    assert isinstance(dataset[0], Item)


def test_a_real_frame_without_a_past_sees_itself_twice(shared: Path) -> None:
    folder = shared / "nuscenes_frame"
    name = next(folder.glob("*.pkl")).name
    config = load("petrv2", sets=[f"data.root={folder}", f"data.info_train={name}", f"data.info_val={name}"]).config
    dataset = NuScenesDataset(config, "val")
    sample = sample_of(dataset, 0)
    assert sample.images is not None
    assert [image.shape for image in sample.images] == [(320, 800, 3)] * 12
    assert "1 of 1 samples" in "".join(dataset.notes)
    np.testing.assert_allclose(sample.times[6:] - sample.times[:6], 1.25)
    assert (np.abs(sample.times[:6]) < 0.06).all()
