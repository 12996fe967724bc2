"""The one place where the samples of a config are opened."""

from __future__ import annotations

from bevctl.config.schema import Config
from bevctl.data.loader import Samples
from bevctl.data.nuscenes import NuScenesDataset


def open_split(config: Config, split: str) -> Samples:
    """The samples of split "train" or "val". Raises BevctlError where they cannot be used."""
    return NuScenesDataset(config, split)
