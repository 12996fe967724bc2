"""A street made in memory is a sample like those of a data set."""

from __future__ import annotations

import numpy as np

from bevctl.config.load import load
from bevctl.data.synth.street import street_sample
from bevctl.geometry import points_in_boxes, project_points

CONFIG = load("bevfusion_multitask_fp16", sets=["data.sweeps=1"]).config


def test_it_has_the_size_of_the_real_thing() -> None:
    sample = street_sample(CONFIG, 0)
    assert sample.images is not None
    assert [image.shape for image in sample.images] == [(900, 1600, 3)] * 6
    assert sample.points is not None
    assert sample.points.dtype == np.float32
    assert 40_000 < len(sample.points) <= 2 * 32 * 1084
    assert set(np.unique(sample.points[:, 4])) == {np.float32(0.0), np.float32(0.05)}
    assert sample.bev_map is not None
    assert sample.bev_map.shape == (6, 200, 200)


def test_the_images_of_an_earlier_moment_were_taken_further_back() -> None:
    """1.25 s at 4.5 to 7.5 m/s, on a road that bends a little; the car looks along LiDAR y."""
    sample = street_sample(load("petrv2", sets=["data.sweeps=0"]).config, 0)
    assert sample.images is not None
    assert sample.points is None, "petrv2 does not read them"
    assert len(sample.images) == len(sample.camera2lidar) == len(sample.intrinsics) == len(sample.image_aug) == 12
    np.testing.assert_allclose(sample.times, [0.0] * 6 + [1.25] * 6)
    way = sample.camera2lidar[6:, :3, 3] - sample.camera2lidar[:6, :3, 3]
    assert ((way[:, 1] < -4.5 * 1.25 * 0.95) & (way[:, 1] > -7.5 * 1.25 * 1.05)).all()


def test_its_boxes_hold_points_and_its_cameras_see_them() -> None:
    sample = street_sample(CONFIG, 1)
    assert sample.points is not None
    near = np.linalg.norm(sample.boxes[:, :2], axis=1) < 30
    filled = points_in_boxes(sample.points, sample.boxes).sum(axis=1) > 0
    assert near.sum() >= 5
    assert filled[near].mean() > 0.8
    assert ((sample.labels >= 0) & (sample.labels < 10)).all()
    lidar2image = sample.intrinsics[0] @ np.linalg.inv(sample.camera2lidar[0])
    _, depth = project_points(lidar2image, np.array([[0.0, 10.0, 0.0], [0.0, -10.0, 0.0]]))
    assert depth[0] > 0 > depth[1]  # the first camera looks along LiDAR y


def test_a_seed_gives_one_sample_and_another_seed_another() -> None:
    first, again, other = (street_sample(CONFIG, seed) for seed in (2, 2, 3))
    assert first.points is not None
    assert other.points is not None
    assert np.array_equal(first.boxes, again.boxes)
    assert np.array_equal(first.points, again.points)  # type: ignore[arg-type]
    assert len(first.boxes) != len(other.boxes) or not np.array_equal(first.boxes, other.boxes)
