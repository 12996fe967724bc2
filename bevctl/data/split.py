"""The one place where the samples of a config are opened."""

from __future__ import annotations

from collections.abc import Callable

from bevctl.config.schema import Config
from bevctl.data.loader import Samples
from bevctl.data.mmdet3d import Mmdet3dSamples
from bevctl.data.nuscenes import NuScenesDataset

_BY_FAMILY: dict[str, Callable[[Config, str], Samples]] = {"mmdet3d": Mmdet3dSamples}
"""Model families that bring their own data set."""


def brings_data(config: Config) -> bool:
    """Whether only the family's own data set makes batches for its model: nothing can be made up in memory."""
    return config.model.type in _BY_FAMILY


def open_split(config: Config, split: str) -> Samples:
    """The samples of split "train" or "val". Raises BevctlError where they cannot be used."""
    return _BY_FAMILY.get(config.model.type, NuScenesDataset)(config, split)
