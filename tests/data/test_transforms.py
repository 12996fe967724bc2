from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from bevctl.config.schema import Config, DataConfig, ImageAugmentConfig, ModelConfig, SpaceAugmentConfig
from bevctl.data.sample import Sample
from bevctl.data.transforms import (
    ImageChange,
    augment_images,
    augment_space,
    build_transforms,
    change_image,
    crop_to_range,
    draw_space_change,
    move_space,
    padding_mask,
    shuffle_points,
)
from bevctl.geometry import box_corners, invert_rigid, points_in_boxes, project_points, transform_points
from tests.data.samples import random_sample

CHANGES = st.builds(
    ImageChange,
    resize=st.floats(0.3, 0.7),
    crop=st.floats(0.0, 1.0),
    flip=st.booleans(),
    rotate=st.floats(-6.0, 6.0),
)


def _apply(matrix: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    return pixels @ matrix[:2, :2].T + matrix[:2, 3]


@settings(max_examples=60)
@given(
    change=CHANGES,
    target=st.tuples(st.floats(0.2, 0.8), st.floats(0.2, 0.8)),
    size=st.sampled_from([(64, 176), (96, 160), (40, 230)]),
)
def test_a_spot_lands_where_the_matrix_says(
    change: ImageChange, target: tuple[float, float], size: tuple[int, int]
) -> None:
    """A white disc of radius 4 in a 320×180 source; its centroid in the new image against the mapped centre."""
    change = dataclasses.replace(change, resize=change.resize / 2)
    _, matrix = change_image(np.zeros((180, 320, 3), np.uint8), change, size)
    aimed = np.array([[target[0] * size[1], target[1] * size[0]]])
    spot = _apply(np.linalg.inv(matrix), aimed)[0].round()
    assume(10 < spot[0] < 310 and 10 < spot[1] < 170)
    (expected,) = _apply(matrix, spot[None])
    rows, columns = np.mgrid[0:180, 0:320] + 0.5
    disc = (columns - spot[0]) ** 2 + (rows - spot[1]) ** 2 < 16
    image, again = change_image(np.repeat((disc * 255).astype(np.uint8)[..., None], 3, axis=2), change, size)
    np.testing.assert_array_equal(again, matrix)
    assert image.shape == (*size, 3)
    weights = image[..., 0].astype(float)
    v, u = np.mgrid[0 : size[0], 0 : size[1]] + 0.5
    centroid = np.array([(u * weights).sum(), (v * weights).sum()]) / weights.sum()
    np.testing.assert_allclose(centroid, expected, atol=0.75)


@settings(max_examples=40)
@given(change=CHANGES, seed=st.integers(0, 1000))
def test_computing_the_crop_alone_gives_the_same_image(change: ImageChange, seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    plain = dataclasses.replace(change, flip=False, rotate=0.0)
    image, matrix = change_image(source, plain, (30, 60))
    factor = plain.resize * 10
    whole = Image.fromarray(source).resize((round(160 * factor), round(90 * factor)), Image.Resampling.BICUBIC)
    left, top = (-matrix[:2, 3]).round().astype(int)
    expected = np.asarray(whole.crop((left, top, left + 60, top + 30)))
    assert np.abs(image.astype(int) - expected).max() <= 3  # Pillow keeps the crop in single precision


def test_evaluation_of_a_nuscenes_image_crops_at_32_176() -> None:
    _, matrix = change_image(np.zeros((900, 1600, 3), np.uint8), ImageChange(0.48), (256, 704))
    expected = np.diag([0.48, 0.48, 1.0, 1.0])
    expected[:2, 3] = -32, -176
    np.testing.assert_allclose(matrix, expected, atol=1e-12)


def test_a_narrower_source_gives_the_same_view() -> None:
    _, full = change_image(np.zeros((900, 1600, 3), np.uint8), ImageChange(0.48), (256, 704))
    _, half = change_image(np.zeros((450, 800, 3), np.uint8), ImageChange(0.48), (256, 704))
    np.testing.assert_allclose(half @ np.diag([0.5, 0.5, 1.0, 1.0]), full, atol=1e-12)


def test_turning_by_hand() -> None:
    """Positive angles turn counter-clockwise as seen: the right end of the middle row goes up."""
    image = np.zeros((101, 101, 3), np.uint8)
    _, matrix = change_image(image, ImageChange(resize=101 / 1600, crop=0.0, rotate=30.0), (101, 101))
    (end,) = _apply(matrix, np.array([[100.5, 50.5]]))
    assert np.isclose(matrix[0, 0], np.cos(np.pi / 6) * round(101 * (101 / 1600) * 1600 / 101) / 101)
    np.testing.assert_allclose(end, [50.5 + 50 * np.cos(np.pi / 6), 50.5 - 50 * np.sin(np.pi / 6)], atol=1e-9)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_lidar_points_stay_on_what_they_hit(seed: int) -> None:
    """Through lidar2image and image_aug of the augmented frame, a point shows the colour it has in the source."""
    rng = np.random.default_rng(seed)
    sample = random_sample(seed, cameras=1, size=(180, 320), points=200)
    # colours that change slowly, so that half a pixel and the filter do not matter
    v, u = np.mgrid[0:180, 0:320]
    source = np.stack([u * 255 / 320, v * 255 / 180, np.full_like(u, 128)], axis=-1).astype(np.uint8)
    sample = dataclasses.replace(sample, images=(source,))
    config = ImageAugmentConfig(resize=(0.09, 0.13))
    moved = augment_space(SpaceAugmentConfig())(augment_images(config, (96, 192), True)(sample, rng), rng)
    assert moved.images is not None
    assert moved.points is not None
    lidar2image = moved.intrinsics[0] @ invert_rigid(moved.camera2lidar[0])
    raw = transform_points(np.linalg.inv(moved.lidar_aug), moved.points[:, :3])
    pixels, depth = project_points(lidar2image, raw)
    shown = _apply(moved.image_aug[0], pixels)
    margin = 3
    visible = (depth > 1) & (shown > margin).all(axis=1) & (shown < np.array([192, 96]) - margin).all(axis=1)
    visible &= (pixels > margin).all(axis=1) & (pixels < np.array([320, 180]) - margin).all(axis=1)
    assume(visible.any())
    at = np.floor(shown[visible]).astype(int)
    found = moved.images[0][at[:, 1], at[:, 0]].astype(float)
    filled = found[:, 2] > 100  # the corners that a turned image leaves empty are black
    expected = np.stack([pixels[visible, 0] * 255 / 320, pixels[visible, 1] * 255 / 180], axis=1)
    assert filled.mean() > 0.6
    np.testing.assert_allclose(found[filled, :2], expected[filled], atol=6)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_boxes_keep_their_points(seed: int) -> None:
    sample = random_sample(seed)
    moved = augment_space(SpaceAugmentConfig())(sample, np.random.default_rng(seed))
    assert sample.points is not None
    assert moved.points is not None
    before = points_in_boxes(sample.points, sample.boxes, margin=1e-3)
    tight = points_in_boxes(moved.points, moved.boxes, margin=-2e-3)
    wide = points_in_boxes(moved.points, moved.boxes, margin=4e-3)
    assert before.sum() >= 200
    assert not (tight & ~before).any()
    assert not (before & ~wide).any()
    np.testing.assert_array_equal(moved.points[:, 3:], sample.points[:, 3:])


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), dt=st.floats(0.1, 1.0))
def test_boxes_and_velocities_follow_the_matrix(seed: int, dt: float) -> None:
    """Where a box is `dt` later is the same, whether it moves before or after the augmentation."""
    sample = random_sample(seed)
    matrix = draw_space_change(SpaceAugmentConfig(), np.random.default_rng(seed))
    moved = move_space(sample, matrix)
    later = sample.boxes.copy()
    later[:, :2] += dt * later[:, 7:9]
    known = np.isfinite(later[:, 0])
    expected = transform_points(matrix, later[known, :3])
    np.testing.assert_allclose((moved.boxes[:, :2] + dt * moved.boxes[:, 7:9])[known], expected[:, :2], atol=1e-9)
    assert np.isnan(moved.boxes[3, 7:]).all()
    # corners as a set, since a mirrored box lists them the other way round
    for old, new in zip(box_corners(sample.boxes), box_corners(moved.boxes), strict=True):
        distance = np.linalg.norm(transform_points(matrix, old)[:, None] - new[None], axis=-1)
        assert distance.min(axis=0).max() < 1e-9
    np.testing.assert_allclose(moved.lidar_aug, matrix)


def test_space_change_by_hand() -> None:
    """Rotate by 90°, shift by nothing, scale by 2, no flip: (1, 0, 1) → (0, 2, 2)."""
    config = SpaceAugmentConfig(rotate=(np.pi / 2, np.pi / 2), translate=0.0, scale=(2.0, 2.0), flip=False)
    matrix = draw_space_change(config, np.random.default_rng(0))
    np.testing.assert_allclose(transform_points(matrix, [[1.0, 0.0, 1.0]]), [[0.0, 2.0, 2.0]], atol=1e-12)


def test_translation_comes_before_scale_and_flips() -> None:
    config = SpaceAugmentConfig(rotate=(0.0, 0.0), translate=1.0, scale=(3.0, 3.0))
    linear, shift = set(), []
    for seed in range(40):
        matrix = draw_space_change(config, np.random.default_rng(seed))
        linear.add(tuple(np.sign(np.diag(matrix[:2, :2]))))
        shift.append(matrix[:3, 3] @ np.linalg.inv(matrix[:3, :3]).T)
    assert linear == {(1, 1), (1, -1), (-1, 1), (-1, -1)}
    assert 0.7 < np.std(shift) < 1.3


def test_range_filter_is_open_and_ignores_height_for_boxes() -> None:
    sample = random_sample()
    points = np.array([[0, 0, 0, 1, 0], [10, 0, 0, 1, 0], [0, 0, 2, 1, 0], [9.9, -9.9, 1.9, 1, 0]], dtype=np.float32)
    boxes = np.zeros((3, 9))
    boxes[:, 0] = 0.0, 9.9, 10.0
    boxes[0, 2] = 50.0
    sample = dataclasses.replace(sample, points=points, boxes=boxes, labels=np.array([0, 1, 2]))
    kept = crop_to_range((-10, -10, -2, 10, 10, 2))(sample, np.random.default_rng(0))
    assert kept.points is not None
    np.testing.assert_array_equal(kept.points, points[[0, 3]])
    np.testing.assert_array_equal(kept.labels, [0, 1])
    np.testing.assert_array_equal(kept.boxes, boxes[:2])


def test_shuffling_keeps_every_point() -> None:
    sample = random_sample()
    assert sample.points is not None
    shuffled = shuffle_points(sample, np.random.default_rng(0)).points
    assert shuffled is not None
    assert not np.array_equal(shuffled, sample.points)
    np.testing.assert_array_equal(np.sort(shuffled, axis=0), np.sort(sample.points, axis=0))


def _run(sample: Sample, config: Config, train: bool, seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    for transform in build_transforms(config, train).values():
        sample = transform(sample, rng)
    return sample


def test_evaluation_uses_no_randomness_and_training_repeats_itself() -> None:
    sample, config = random_sample(), Config()
    first, second = _run(sample, config, False, 0), _run(sample, config, False, 1)
    np.testing.assert_array_equal(first.images, second.images)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first.points, second.points)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first.lidar_aug, np.eye(4))
    again, other = _run(sample, config, True, 0), _run(sample, config, True, 1)
    np.testing.assert_array_equal(_run(sample, config, True, 0).points, again.points)  # type: ignore[arg-type]
    assert not np.array_equal(again.lidar_aug, other.lidar_aug)
    assert not np.array_equal(again.image_aug[0], again.image_aug[1])


def test_augmentation_can_be_switched_off() -> None:
    sample = random_sample()
    plain = _run(sample, Config(data=DataConfig(augment=False)), True, 0)
    fixed = _run(sample, Config(), False, 0)
    np.testing.assert_array_equal(plain.image_aug, fixed.image_aug)
    np.testing.assert_array_equal(plain.lidar_aug, np.eye(4))


@pytest.mark.parametrize("train", [False, True])
def test_the_input_is_left_alone(train: bool) -> None:
    sample = random_sample()
    before = copy.deepcopy(sample)
    _run(sample, Config(), train, 0)
    for field in dataclasses.fields(Sample):
        np.testing.assert_array_equal(getattr(sample, field.name), getattr(before, field.name))


@pytest.mark.parametrize("train", [False, True])
def test_a_sensor_that_is_not_used_stays_absent(train: bool) -> None:
    sample = dataclasses.replace(random_sample(), images=None, points=None)
    done = _run(sample, Config(model=ModelConfig()), train, 0)
    assert done.images is None
    assert done.points is None


@pytest.mark.parametrize(
    ("source", "size", "rows", "columns"),
    [
        ((900, 1600), (928, 1600), slice(900, None), slice(0, 0)),
        ((900, 1600), (928, 1632), slice(900, None), slice(1600, None)),
        ((450, 800), (928, 1600), slice(900, None), slice(0, 0)),
        ((800, 1600), (928, 1600), slice(800, None), slice(0, 0)),
    ],
    ids=["nuScenes", "narrower too", "half the size", "another shape"],
)
def test_padding_lies_below_and_to_the_right(
    source: tuple[int, int], size: tuple[int, int], rows: slice, columns: slice
) -> None:
    sample = dataclasses.replace(random_sample(cameras=1), images=(np.full((*source, 3), 255, np.uint8),))
    padded = augment_images(ImageAugmentConfig(resize_eval=1.0, pad=True), size, False)(sample, np.random.default_rng())
    assert padded.padding is not None
    assert padded.images is not None
    expected = np.zeros(size, dtype=bool)
    expected[rows] = expected[:, columns] = True
    np.testing.assert_array_equal(padded.padding[0], expected)
    np.testing.assert_array_equal(padded.images[0] == 0, np.repeat(expected[..., None], 3, axis=2))
    np.testing.assert_array_equal(padded.image_aug[0, :2, 3], [0, 0])


def test_without_padding_an_image_lies_at_the_bottom() -> None:
    sample = dataclasses.replace(random_sample(cameras=1), images=(np.full((900, 1600, 3), 255, np.uint8),))
    plain = augment_images(ImageAugmentConfig(resize_eval=1.0), (928, 1600), False)(sample, np.random.default_rng())
    assert plain.padding is None
    assert plain.images is not None
    assert (plain.images[0][:28] == 0).all()
    assert (plain.images[0][28:] == 255).all()


@settings(max_examples=40, deadline=None)
@given(change=CHANGES, size=st.sampled_from([(64, 176), (96, 160), (120, 230)]))
def test_padding_is_what_shows_nothing_of_a_white_source(change: ImageChange, size: tuple[int, int]) -> None:
    """Flipped too; a pixel on the edge may go either way."""
    change = dataclasses.replace(change, pad=True, rotate=0.0, resize=change.resize / 5)
    image, matrix = change_image(np.full((180, 320, 3), 255, np.uint8), change, size)
    padding = padding_mask(matrix, (320, 180), size)
    wrong = padding != (image[..., 0] == 0)
    assert not np.lib.stride_tricks.sliding_window_view(wrong, (2, 2)).all(axis=(2, 3)).any()


def test_views_of_a_sample_may_share_one_change() -> None:
    sample = random_sample(cameras=4)
    config = ImageAugmentConfig(shared=True)
    alike = augment_images(config, (32, 64), True)(sample, np.random.default_rng(3)).image_aug
    assert (alike == alike[0]).all()
    alone = augment_images(dataclasses.replace(config, shared=False), (32, 64), True)(sample, np.random.default_rng(3))
    assert len(np.unique(alone.image_aug[:, 0, 3])) == 4
    np.testing.assert_array_equal(alone.image_aug[0], alike[0])
