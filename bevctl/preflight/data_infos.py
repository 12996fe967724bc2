"""The info files of a run for the checks that look at samples: each read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bevctl.errors import BevctlError
from bevctl.preflight.checks import Context
from bevctl.preflight.plan import read_plan

if TYPE_CHECKING:
    from bevctl.data.info import InfoFile, SampleInfo

SAMPLES = 6
"""Samples of each split whose files are opened."""
SURE_SHARE, LOW_SHARE = 0.9, 0.5
"""Share of boxes that land in an image: in nuScenes' set nearly all do; below the second the calibration is wrong."""


def train_info(context: Context) -> InfoFile:
    """The info file of the training split. Raises BevctlError."""
    return _read(context, "train")


def val_info(context: Context) -> InfoFile:
    """The info file of the evaluation split. Raises BevctlError."""
    return _read(context, "val")


def _read(context: Context, split: str) -> InfoFile:
    from bevctl.data.index import read_info

    path = context.once(read_plan).info_files.get(split)
    if path is None:
        raise BevctlError(f"The config names no info file for {split}.", "Name it.")
    return read_info(path, context.config.data.box_convention if context.config is not None else "auto")


def readable_infos(context: Context) -> dict[str, InfoFile]:
    """The info files that can be read, by split."""
    found = {}
    for split, read in (("train", train_info), ("val", val_info)):
        try:
            found[split] = context.once(read)
        except BevctlError:
            continue  # DATA002 says why
    return found


def spread(samples: Sequence[SampleInfo], count: int) -> list[SampleInfo]:
    """`count` samples, evenly spaced over the file."""
    step = max(len(samples) / count, 1.0)
    return [samples[int(i * step)] for i in range(min(count, len(samples)))]
