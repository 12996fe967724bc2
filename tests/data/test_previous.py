"""Images of an earlier moment: exactly where they were taken from, and which moment that is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.config.schema import PreviousFrameConfig
from bevctl.data.index import read_info
from bevctl.data.info import CameraInfo, InfoFile, SampleInfo
from bevctl.data.previous import PreviousFrames
from bevctl.errors import BevctlError
from bevctl.geometry import Array, invert_rigid
from tests.data import infos as made
from tests.data.drive import CAMERAS, Drive

EVALUATION = PreviousFrameConfig()
NEAREST_KEYFRAME = PreviousFrameConfig(source="keyframes", eval=0)
NO_CHOICE = np.random.default_rng(0)


def petr_info(drive: Drive, folder: Path) -> InfoFile:
    return read_info(made.write(folder / "petr.pkl", drive.petr()))


def chosen(info: InfoFile, keyframe: int, config: PreviousFrameConfig = EVALUATION) -> dict[str, CameraInfo]:
    return PreviousFrames(info, config, train=False).images(info.samples[keyframe], CAMERAS, NO_CHOICE)


def seen(image: CameraInfo, sample: SampleInfo, point: Array) -> Array:
    """Homogeneous pixel of a (3,) point of the world, by way of the keyframe's LiDAR frame."""
    in_lidar = invert_rigid(sample.lidar2global) @ [*point, 1.0]
    pixel: Array = image.intrinsics @ (invert_rigid(image.camera2lidar) @ in_lidar)[:3]
    return pixel


def number_of(image: CameraInfo) -> int:
    return int(Path(image.path).stem)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    keyframe=st.integers(1, 3),
    place=st.integers(0, 20),
    point=st.tuples(*[st.floats(-60, 60)] * 3),
)
def test_what_stands_still_in_the_world_stands_still_in_the_lidar_frame(
    tmp_path_factory: pytest.TempPathFactory, seed: int, keyframe: int, place: int, point: tuple[float, ...]
) -> None:
    """Both sources: a point of the world lands where the camera saw it at the image's own time."""
    drive = Drive(seed)
    world = drive.lidar2global(keyframe)[:3, 3] + point
    folder = tmp_path_factory.mktemp("petr")
    for info, config in (
        (petr_info(drive, folder), PreviousFrameConfig(eval=place)),
        (drive.info(), PreviousFrameConfig(source="keyframes", eval=place)),
    ):
        images = chosen(info, keyframe, config)
        assert tuple(images) == CAMERAS
        for camera, image in images.items():
            expected = drive.project(camera, number_of(image), world)
            np.testing.assert_allclose(seen(image, info.samples[keyframe], world), expected, atol=1e-5)


def test_without_the_motion_of_the_car_it_would_be_metres_off() -> None:
    """The alignment matters: the pose that the camera has on the car puts the world elsewhere."""
    drive = Drive(4)
    image, key = chosen(drive.info(), 2, NEAREST_KEYFRAME)["CAM_FRONT"], drive.sample(2)
    assert np.linalg.norm(image.camera2lidar[:3, 3] - key.cameras["CAM_FRONT"].camera2lidar[:3, 3]) > 5.0


def test_places_count_back_in_time(tmp_path: Path) -> None:
    info = petr_info(Drive(), tmp_path)
    for place, number in ((0, 17), (5, 12), (14, 3), (17, 0), (18, 0), (400, 0)):
        images = chosen(info, 3, PreviousFrameConfig(eval=place))
        assert {number_of(image) for image in images.values()} == {number}
    keyframes = {place: chosen(info, 3, PreviousFrameConfig(source="keyframes", eval=place)) for place in range(4)}
    assert [number_of(images["CAM_FRONT"]) for images in keyframes.values()] == [12, 6, 0, 0]
    asked = (PreviousFrameConfig(), PreviousFrameConfig(source="keyframes"))
    assert [PreviousFrames(info, config, train=False).reads_sweeps for config in asked] == [True, False]


def test_the_same_image_is_the_same_in_every_sample(tmp_path: Path) -> None:
    """The table holds each image once, although the file repeats it with other matrices."""
    info = petr_info(Drive(), tmp_path)
    assert info.format == "petr"
    assert info.camera_sweeps is not None
    assert len(info.camera_sweeps.paths) == 2 * 18
    assert [len(sample.camera_sweeps) for sample in info.samples] == [0, 6, 12, 18]
    assert info.samples[3].sweeps == ()
    first, second = (chosen(info, keyframe, PreviousFrameConfig(eval=6 * keyframe - 1)) for keyframe in (1, 3))
    assert first["CAM_BACK"].path == second["CAM_BACK"].path
    assert first["CAM_BACK"].timestamp == second["CAM_BACK"].timestamp


def test_training_draws_every_place_of_the_range_and_no_other(tmp_path: Path) -> None:
    info = petr_info(Drive(keyframes=4), tmp_path)
    frames = PreviousFrames(info, PreviousFrameConfig(train=(3, 8)), train=True)
    drawn = [
        number_of(frames.images(info.samples[3], CAMERAS, np.random.default_rng(seed))["CAM_FRONT"])
        for seed in range(200)
    ]
    assert set(drawn) == {17 - place for place in range(3, 9)}


@pytest.mark.parametrize(
    ("choice", "train", "varies"),
    [("auto", True, True), ("auto", False, False), ("fixed", True, False), ("random", False, True)],
)
def test_what_is_random(tmp_path: Path, choice: str, train: bool, varies: bool) -> None:
    info = petr_info(Drive(), tmp_path)
    frames = PreviousFrames(info, PreviousFrameConfig(choice=choice, train=(0, 9), eval=2), train=train)
    drawn = {frames.images(info.samples[3], CAMERAS, np.random.default_rng(s))["CAM_BACK"].path for s in range(30)}
    assert (len(drawn) > 1) == varies


@pytest.mark.parametrize("config", [EVALUATION, NEAREST_KEYFRAME])
def test_the_first_sample_of_a_scene_sees_itself_from_the_same_place(
    tmp_path: Path, config: PreviousFrameConfig
) -> None:
    info = petr_info(Drive(), tmp_path)
    images = chosen(info, 0, config)
    usual = 15 / 12 if config is EVALUATION else 0.5
    for camera, own in info.samples[0].cameras.items():
        assert images[camera].path == own.path
        np.testing.assert_array_equal(images[camera].camera2lidar, own.camera2lidar)
        assert own.timestamp - images[camera].timestamp == pytest.approx(usual)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), keyframe=st.integers(0, 3), keyframes=st.booleans())
def test_time_has_always_passed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, keyframe: int, keyframes: bool
) -> None:
    """Velocity divides by it."""
    info = petr_info(Drive(seed), tmp_path_factory.mktemp("petr"))
    config = PreviousFrameConfig(source="keyframes" if keyframes else "sweeps", train=(0, 26))
    sample = info.samples[keyframe]
    images = PreviousFrames(info, config, train=True).images(sample, CAMERAS, np.random.default_rng(seed))
    passed = [sample.cameras[camera].timestamp - image.timestamp for camera, image in images.items()]
    assert min(passed) > 0.05


def test_a_missing_camera_gives_its_nearest_image(tmp_path: Path) -> None:
    """As near as possible to the chosen moment; of two as near, the later one."""
    for missing, front, back in (
        ({("CAM_BACK", 3)}, 3, 4),
        ({("CAM_FRONT", 3), ("CAM_BACK", 3)}, 4, 4),
        ({("CAM_FRONT", 3), ("CAM_FRONT", 4), ("CAM_BACK", 3)}, 2, 4),
    ):
        images = chosen(petr_info(Drive(missing=frozenset(missing)), tmp_path), 3)
        assert {camera: number_of(image) for camera, image in images.items()} == {"CAM_FRONT": front, "CAM_BACK": back}
    never = frozenset(("CAM_BACK", number) for number in range(18))
    assert set(chosen(petr_info(Drive(missing=never), tmp_path), 3)) == {"CAM_FRONT"}


def test_moments_without_any_image_are_no_past(tmp_path: Path) -> None:
    document = Drive(keyframes=2).petr()
    document["infos"][1]["sweeps"] = [{}] * 4
    document["infos"].append(Drive(keyframes=3).petr()["infos"][2])
    info = read_info(made.write(tmp_path / "petr.pkl", document))
    assert [len(sample.camera_sweeps) for sample in info.samples] == [0, 0, 12]


def test_keyframes_stand_in_for_sweeps_that_a_file_lacks() -> None:
    """Aloud, and at about the same time: place 14 is 1.25 s back, the third keyframe before is 1.5."""
    info = Drive(keyframes=6).info()
    (told,) = [note for note in PreviousFrames(info, EVALUATION, train=False).notes() if "sweeps" in note]
    assert "infos.pkl holds no camera sweeps; earlier keyframes stand in" in told
    numbers = [number_of(chosen(info, 5, PreviousFrameConfig(eval=place))["CAM_FRONT"]) for place in (0, 5, 6, 14, 99)]
    assert numbers == [24, 24, 18, 12, 0]
    assert not [n for n in PreviousFrames(info, NEAREST_KEYFRAME, train=False).notes() if "sweeps" in n]


def test_samples_without_a_past_are_counted(tmp_path: Path) -> None:
    notes = list(PreviousFrames(petr_info(Drive(), tmp_path), EVALUATION, train=False).notes())
    assert notes == ["1 of 4 samples of petr.pkl have no earlier images; they see their own twice."]


def test_scenes_end_where_the_file_says() -> None:
    samples = list(Drive(keyframes=4).info().samples)
    samples[2:] = [dataclasses.replace(sample, scene="other") for sample in samples[2:]]
    info = dataclasses.replace(Drive().info(), samples=tuple(samples[::-1]))
    frames = PreviousFrames(info, NEAREST_KEYFRAME, train=False)
    assert [len(frames.moments(sample)) for sample in samples] == [0, 1, 0, 1]


def test_without_scenes_the_drive_and_a_pause_tell_them_apart() -> None:
    """The first part of nuScenes' file names is the car and the start of its drive."""
    samples = [
        dataclasses.replace(sample, timestamp=sample.timestamp + (20.0 if number >= 3 else 0.0))
        for number, sample in enumerate(Drive(keyframes=5).info(scene=None).samples)
    ]
    samples[2] = dataclasses.replace(samples[2], lidar_path="n008-2018__LIDAR_TOP__1.bin")
    info = dataclasses.replace(Drive().info(), samples=tuple(samples))
    frames = PreviousFrames(info, NEAREST_KEYFRAME, train=False)
    assert [len(frames.moments(sample)) for sample in samples] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("damage", ["no intrinsics", "no matrix", "singular"])
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path, damage: str) -> None:
    document = Drive(keyframes=2).petr()
    image = document["infos"][1]["sweeps"][0]["CAM_FRONT"]
    if damage == "no intrinsics":
        del image["intrinsics"]
    elif damage == "no matrix":
        image["lidar2img"] = "none"
    else:
        image["intrinsics"] = np.zeros((4, 4))
    with pytest.raises(BevctlError, match=r"The camera sweeps of .*petr\.pkl cannot be read: ") as caught:
        read_info(made.write(tmp_path / "petr.pkl", document))
    assert "data prepare" in caught.value.hint
