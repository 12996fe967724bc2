"""A sample and its ground truth are augmented together: what a box projects to stays what it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.data.info import SampleInfo
from bevctl.data.loader import collate
from bevctl.data.maps import load_map, map_masks
from bevctl.data.nuscenes import Item, NuScenesDataset
from bevctl.data.sample import Sample
from bevctl.data.transforms import ImageChange, change_image, move_space
from bevctl.geometry import Array, box_corners, invert_rigid, transform_points, wrap_angle
from tests.data.samples import random_sample

PIXELS, METRES = 1e-4, 1e-4
BOUND = (-50.0, 50.0, 0.5)
FLIPS = [np.diag([-1.0, 1.0, 1.0, 1.0]), np.diag([1.0, -1.0, 1.0, 1.0]), np.diag([-1.0, -1.0, 1.0, 1.0])]


@pytest.fixture(scope="module")
def config(synth_root: Path) -> Config:
    """Strong augmentation, and no range that boxes could leave."""
    sets = [
        f"data.root={synth_root}",
        "data.sweeps=2",
        "data.space.rotate=[-3.1, 3.1]",
        "data.space.scale=[0.8, 1.2]",
        "data.space.translate=1.0",
        "data.image.rotate=[-8, 8]",
    ]
    config = load("tiny", sets=sets).config
    wide = (-409.6, -409.6, -50.0, 409.6, 409.6, 50.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, point_cloud_range=wide))


def _augmented(dataset: NuScenesDataset, index: int, epoch: int) -> tuple[SampleInfo, Sample, Sample]:
    """What the files say, the bare sample, and the sample that training gets."""
    info = dataset.info_at(index)
    done = dataset[(epoch, index)].sample
    assert done is not None
    return info, dataset.bare_sample(info), done


def _pixels(sample: Sample, camera: int, points: Array) -> tuple[Array, Array]:
    """Pixels of `images` and depth of points in the *original* LiDAR frame, from intrinsics on."""
    seen = transform_points(invert_rigid(sample.camera2lidar[camera]), points)
    source = seen @ sample.intrinsics[camera, :3, :3].T
    flat = source[:, :2] / np.where(np.abs(seen[:, 2:]) < 1e-6, 1e-6, seen[:, 2:])
    return flat @ sample.image_aug[camera, :2, :2].T + sample.image_aug[camera, :2, 3], seen[:, 2]


@pytest.mark.parametrize("epoch", range(4))
def test_boxes_project_into_the_images_as_before(config: Config, epoch: int) -> None:
    """Corners of augmented boxes through the inverse of lidar_aug, against corners of the annotated boxes."""
    dataset = NuScenesDataset(config, "train")
    checked = 0
    for index in range(3):
        _, bare, done = _augmented(dataset, index, epoch)
        assert len(done.boxes) == len(bare.boxes)
        back = np.linalg.inv(done.lidar_aug)
        for camera in range(len(dataset.cameras)):
            for old, new in zip(box_corners(bare.boxes), box_corners(done.boxes), strict=True):
                expected, depth = _pixels(done, camera, old)
                found, _ = _pixels(done, camera, transform_points(back, new))
                if (depth > 1).all():  # a mirrored box lists its corners the other way round
                    distance = np.linalg.norm(found[:, None] - expected[None], axis=-1)
                    assert distance.min(axis=0).max() < PIXELS
                    assert distance.min(axis=1).max() < PIXELS
                    checked += 1
    assert checked > 50


@pytest.mark.parametrize("epoch", range(4))
def test_boxes_and_velocities_lie_in_the_view_from_above_as_before(config: Config, epoch: int) -> None:
    dataset = NuScenesDataset(config, "train")
    for index in range(3):
        _, bare, done = _augmented(dataset, index, epoch)
        matrix = done.lidar_aug
        heads = [
            b[:, :2] + b[:, 3:4] / 2 * np.stack([np.cos(b[:, 6]), np.sin(b[:, 6])], 1) for b in (bare.boxes, done.boxes)
        ]
        level = np.column_stack([heads[0], bare.boxes[:, 2]])
        np.testing.assert_allclose(heads[1], transform_points(matrix, level)[:, :2], atol=METRES)
        known = np.isfinite(bare.boxes[:, 7])
        later = bare.boxes[known, :3] + np.column_stack([bare.boxes[known, 7:9], np.zeros(known.sum())])
        ours = done.boxes[known, :2] + done.boxes[known, 7:9]
        np.testing.assert_allclose(ours, transform_points(matrix, later)[:, :2], atol=METRES)


def test_the_batch_says_the_same_in_single_precision(config: Config) -> None:
    dataset = NuScenesDataset(config, "train")
    _, bare, done = _augmented(dataset, 1, 0)
    calibration = collate([Item(done)]).calibration
    near = bare.boxes[np.abs(bare.boxes[:, :2]).max(axis=1) < 40]
    for camera in range(len(dataset.cameras)):
        expected, depth = _pixels(done, camera, near[:, :3])
        points = np.column_stack([near[:, :3], np.ones(len(near))])
        seen = points @ calibration.lidar2image[0, camera].numpy().T
        flat = np.column_stack([seen[:, :2] / seen[:, 2:3], np.zeros(len(seen)), np.ones(len(seen))])
        found = (flat @ calibration.image_aug[0, camera].numpy().T)[:, :2]
        np.testing.assert_allclose(found[depth > 1], expected[depth > 1], atol=2e-2)


@pytest.mark.parametrize("matrix", FLIPS)
def test_flipping_twice_changes_nothing(matrix: Array) -> None:
    sample = random_sample()
    once = move_space(sample, matrix)
    assert not np.array_equal(once.boxes, sample.boxes)
    twice = move_space(once, matrix)
    np.testing.assert_array_equal(twice.points, sample.points)  # type: ignore[arg-type]
    np.testing.assert_array_equal(twice.lidar_aug, np.eye(4))
    np.testing.assert_array_equal(np.delete(twice.boxes, 6, axis=1), np.delete(sample.boxes, 6, axis=1))
    assert np.abs(wrap_angle(twice.boxes[:, 6] - sample.boxes[:, 6])).max() < 1e-12


def test_flipping_an_image_twice_changes_nothing() -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    change = ImageChange(resize=160 / 1600, flip=True)
    once, first = change_image(image, change, (90, 160))
    np.testing.assert_array_equal(once, np.asarray(Image.fromarray(image).transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    twice, second = change_image(once, change, (90, 160))
    np.testing.assert_array_equal(twice, image)
    np.testing.assert_allclose(second @ first, np.eye(4), atol=1e-12)


@pytest.mark.parametrize("matrix", FLIPS)
def test_a_flipped_map_is_the_mirror_image(synth_root: Path, config: Config, matrix: Array) -> None:
    info = NuScenesDataset(config, "train").info_at(1)
    layers = load_map(str(synth_root), str(info.location))
    pose = info.ego2global @ info.lidar2ego
    plain, flipped = (
        map_masks(layers, ("drivable_area", "divider"), pose, m, BOUND, BOUND) for m in (np.eye(4), matrix)
    )
    mirrored = plain[:, :: int(matrix[0, 0]), :: int(matrix[1, 1])]
    assert plain.any()
    # corners are rounded to whole cells, which mirroring may turn the other way: away from edges
    assert (flipped[_eroded(mirrored)] == 1).all()
    assert (flipped[_eroded(1 - mirrored)] == 0).all()
    assert _eroded(mirrored).sum() > 100


def _eroded(mask: np.ndarray) -> np.ndarray:
    """Cells whose neighbours up to two away are all set."""
    padded = np.pad(mask.astype(bool), ((0, 0), (2, 2), (2, 2)), mode="edge")
    shifted = [padded[:, x : x + mask.shape[1], y : y + mask.shape[2]] for x in range(5) for y in range(5)]
    return np.logical_and.reduce(shifted)


def test_labels_are_bevctls_whatever_the_order_of_the_file(config: Config) -> None:
    """`bevctl data prepare` numbers classes as mmdet3d does; the network's outputs follow data.classes."""
    dataset = NuScenesDataset(config, "train")
    info, bare, _ = _augmented(dataset, 0, 0)
    names = [name for name, valid in zip(info.names, info.valid, strict=True) if valid and name in OBJECT_CLASSES]
    assert [OBJECT_CLASSES[label] for label in bare.labels] == names
    backwards = dataclasses.replace(config, data=dataclasses.replace(config.data, classes=OBJECT_CLASSES[::-1]))
    turned = NuScenesDataset(backwards, "train").bare_sample(info)
    np.testing.assert_array_equal(turned.labels, 9 - bare.labels)
