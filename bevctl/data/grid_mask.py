"""GridMask: a grid of square holes cut into the images of a sample (Chen et al., 2020, arXiv 2001.04086)."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from bevctl.data.sample import Sample, Transform

FILL = np.array([124, 116, 104], dtype=np.uint8)
"""RGB that image normalisation brings to zero, as nearly as whole numbers can."""


def draw_grid(size: tuple[int, int], ratio: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(height, width) True where the image stays: horizontal and vertical stripes with square holes between them.

    Their period is a whole number of pixels from 2 to the height, their width `ratio` of it, at least one pixel and
    less than the period.
    """
    height, width = size
    period = int(rng.integers(2, max(3, height)))
    stripe = min(max(round(period * ratio), 1), period - 1)
    down, across = rng.integers(0, period, size=2)
    rows = (np.arange(height) + down) % period < stripe
    columns = (np.arange(width) + across) % period < stripe
    return rows[:, None] | columns[None, :]


def mask_images(probability: float, ratio: float) -> Transform:
    """With `probability`, one grid for all images of a sample; holes get the mean colour."""

    def transform(sample: Sample, rng: np.random.Generator) -> Sample:
        if not sample.images or rng.random() >= probability:
            return sample
        height, width = sample.images[0].shape[:2]
        kept = draw_grid((height, width), ratio, rng)[..., None]
        return dataclasses.replace(sample, images=tuple(np.where(kept, image, FILL) for image in sample.images))

    return transform
