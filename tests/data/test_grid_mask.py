from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.schema import Config, DataConfig, ImageAugmentConfig
from bevctl.data.grid_mask import FILL, draw_grid, mask_images
from bevctl.data.transforms import build_transforms
from tests.data.samples import random_sample


class Fixed(np.random.Generator):
    """A generator whose whole numbers are given: the period first, then the two offsets."""

    def __init__(self, period: int, down: int, across: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.answers: list[object] = [period, np.array([down, across])]

    def integers(self, *_: object, **__: object) -> object:  # type: ignore[override]
        return self.answers.pop(0)


def test_a_grid_by_hand() -> None:
    """Period 4, stripes of 2, rows shifted by one: rows 1 and 2 and columns 2 and 3 cross in a hole."""
    kept = draw_grid((5, 6), 0.5, Fixed(4, 1, 0))
    shown = ["".join(map(str, row.astype(int))) for row in kept]
    assert shown == ["111111", "110011", "110011", "111111", "111111"]


@given(height=st.integers(2, 60), width=st.integers(2, 60), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 2**32 - 1))
def test_holes_are_rectangles_between_stripes(height: int, width: int, ratio: float, seed: int) -> None:
    kept = draw_grid((height, width), ratio, np.random.default_rng(seed))
    assert kept.shape == (height, width)
    rows, columns = kept.all(axis=1), kept.all(axis=0)
    if not kept.all():
        np.testing.assert_array_equal(kept, rows[:, None] | columns[None, :])


def test_half_of_the_period_leaves_three_quarters_on_average() -> None:
    shares = [draw_grid((256, 704), 0.5, np.random.default_rng(seed)).mean() for seed in range(300)]
    assert np.mean(shares) == pytest.approx(0.75, abs=0.02)


def test_all_images_of_a_sample_share_a_grid_and_holes_are_of_the_mean_colour() -> None:
    sample = random_sample(cameras=3)
    masked = mask_images(1.0, 0.5)(sample, np.random.default_rng(5)).images
    assert masked is not None
    assert sample.images is not None
    kept = draw_grid((90, 160), 0.5, _after_one_number(5))
    for image, source in zip(masked, sample.images, strict=True):
        np.testing.assert_array_equal(image[kept], source[kept])
        assert (image[~kept] == FILL).all()
    mean, deviation = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
    assert np.abs((FILL - mean) / deviation).max() < 0.01


def _after_one_number(seed: int) -> np.random.Generator:
    rng = np.random.default_rng(seed)
    rng.random()
    return rng


def test_the_probability_is_kept() -> None:
    sample = random_sample(cameras=1)
    step = mask_images(0.3, 0.5)
    changed = [step(sample, np.random.default_rng(seed)) is not sample for seed in range(400)]
    assert np.mean(changed) == pytest.approx(0.3, abs=0.07)
    without = dataclasses.replace(sample, images=None)
    assert mask_images(1.0, 0.5)(without, np.random.default_rng(0)) is without


def test_only_training_with_augmentation_has_a_mask() -> None:
    masked = DataConfig(image=ImageAugmentConfig(grid_mask=0.7))
    assert "grid mask" in build_transforms(Config(data=masked), True)
    assert "grid mask" not in build_transforms(Config(data=masked), False)
    assert "grid mask" not in build_transforms(Config(data=dataclasses.replace(masked, augment=False)), True)
    assert "grid mask" not in build_transforms(Config(), True)
