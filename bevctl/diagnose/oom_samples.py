"""How large the samples were of the step that ran out of memory, beside others of the data set: of a run of bevctl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bevctl.config.load import from_dict
from bevctl.errors import BevctlError
from bevctl.finding import Evidence
from bevctl.monitor.facts import last_segment
from bevctl.monitor.view import View

if TYPE_CHECKING:
    from bevctl.config.schema import Config
    from bevctl.measure.memory_trace import SampleSize

_ITERATION = re.compile(r"ran out in iteration (\d+)")
_MOST = 64
"""Samples of a step that are looked at; of all ranks, as the log does not tell which one ran out."""


def samples_of_step(view: View, message: str) -> Iterator[Evidence]:
    """The sizes of the samples of the iteration that `message` names; nothing where the run or its data does not tell.

    Their order follows from the seed. They are read again, as the run reads them, without images.
    """
    found = _ITERATION.search(message)
    if found is None or view.config is None or view.events("rewind"):
        return
    from bevctl.measure.memory_inputs import sample_sizes, sizes_at

    try:
        config = from_dict(view.config)
        if not (Path(config.data.root) / config.data.info_train).is_file():
            return
        sizes = sizes_at(config, lambda length: _indices(config, last_segment(view.log), int(found[1]), length))
        usual = sample_sizes(config)
    except (BevctlError, ValueError):
        return
    if sizes:
        others = f"of {usual.samples} looked at, the median is {_words(usual.typical)}, and p95 {_words(usual.p95)}"
        largest = max(sizes, key=lambda size: (*size.sites[:1], size.points))
        what = f"{len(sizes)} samples, the largest with {_words(largest)}; {others}"
        yield Evidence(f"samples of iteration {found[1]}", what)


def _indices(config: Config, segment: Mapping[str, object], iteration: int, length: int) -> list[tuple[int, int]]:
    """What iteration `iteration` (from 1) of the run's last start reads, on all ranks: (epoch, position)."""
    from bevctl.data.loader import EpochSampler

    names = ("batch", "world", "accumulate", "iters_per_epoch")
    batch, world, accumulate, per_epoch = (int(str(segment.get(name, 1))) for name in names)
    epoch, inner = divmod(iteration - 1, per_epoch)
    found: list[tuple[int, int]] = []
    for rank in range(world):
        start = inner * accumulate
        sampler = EpochSampler(length, batch, epoch, config.seed, rank, world, start_batch=start)
        for _, indices in zip(range(accumulate), sampler, strict=False):
            found += indices
    return found[:_MOST]


def _words(size: SampleSize) -> str:
    voxels: Sequence[str] = [f"{size.sites[0]:,} voxels"] if size.sites else []
    return ", ".join([f"{size.points:,} points", *voxels, f"{size.boxes} boxes"])
