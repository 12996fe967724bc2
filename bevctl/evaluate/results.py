"""What a model said about a sample, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Objects:
    """The objects that a model sees in one sample."""

    boxes: NDArray[np.float32]
    """(n, 9) as in `bevctl.batch`, LiDAR frame."""
    scores: NDArray[np.float32]
    """(n,) in 0..1."""
    labels: NDArray[np.int64]
    """(n,) index into the config's object classes."""

    def usable(self) -> NDArray[np.bool_]:
        """(n,) which boxes can be scored: every number finite, every size above zero."""
        finite = np.isfinite(self.boxes).all(axis=1) & np.isfinite(self.scores)
        return finite & (self.boxes[:, 3:6] > 0).all(axis=1)


@dataclass(frozen=True)
class SampleResult:
    """Everything a model said about one sample."""

    token: str
    objects: Objects | None = None
    """None without a detection head."""
    bev_map: NDArray[np.float32] | None = None
    """(K, X, Y) probabilities, only of samples whose map was asked for."""
    true_map: NDArray[np.float32] | None = None
    """(K, X, Y) ground truth 0/1 beside `bev_map`, where the sample has one."""
