"""Class-balanced grouping and sampling (Zhu et al., 2019, arXiv 1908.09492): rare classes are drawn more often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bevctl.data.info import SampleInfo
from bevctl.errors import BevctlError

Positions = NDArray[np.int64]


def frames_by_class(samples: Sequence[SampleInfo], classes: Sequence[str]) -> dict[str, Positions]:
    """For each class, positions of the samples that show a valid object of it; classes that no sample shows are
    left out."""
    frames: dict[str, list[int]] = {name: [] for name in classes}
    for position, sample in enumerate(samples):
        shown = {name for name, valid in zip(sample.names, sample.valid, strict=True) if valid}
        for name in shown & frames.keys():
            frames[name].append(position)
    return {name: np.array(found, dtype=np.int64) for name, found in frames.items() if found}


def balanced_positions(samples: Sequence[SampleInfo], classes: Sequence[str], seed: int) -> Positions:
    """Positions in `samples` to train on, the same number for each class, drawn with replacement.

    In all they are as many as the frames of all classes together; a frame counts once for each class that it shows.
    `seed` alone decides the draw, so that every rank and every restart has the same. Raises BevctlError (exit 2)
    where no sample shows an object of `classes`.
    """
    frames = frames_by_class(samples, classes)
    if not frames:
        raise BevctlError(
            "data.cbgs: no training sample has an annotated object of data.classes.",
            "Set data.cbgs to false, or give an annotated data.info_train.",
        )
    count = sum(map(len, frames.values())) // len(frames)
    rng = np.random.default_rng([seed, *b"cbgs"])
    return np.concatenate([rng.choice(found, size=count) for found in frames.values()])
