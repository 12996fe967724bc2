"""Data sets that mmdet3d builds from a config, as samples of ours: same order, same random numbers, same resume."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bevctl.config.mmdet3d import installed, quiet, run_config
from bevctl.config.mmdet3d_keys import inner_data_set, type_name
from bevctl.config.schema import Config
from bevctl.data.index import read_info
from bevctl.data.info import InfoFile
from bevctl.errors import BevctlError
from bevctl.foreign_batch import ForeignBatch

ATTEMPTS = 10
"""Samples tried in training, one in place of another, before an index is given up."""
_UNREADABLE = (OSError, EOFError, ValueError)
"""What a missing, truncated or damaged file makes a pipeline raise; anything else is an error of its code."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """What became of one index: what the pipeline packed, or None, and a sentence for each unreadable file."""

    content: Any
    token: str
    problems: tuple[str, ...] = ()


class Mmdet3dSamples:
    """A split of the data set that the config's dataloader names; index with (epoch, i).

    Python's, NumPy's and torch's generators are seeded by (seed, epoch, i) while a pipeline runs, and put back
    afterwards: augmentation does not depend on workers, ranks or a stop in between. `data.root` and the info files are
    ours, so that they can be set. Unreadable files and `data.skip_samples` are treated as in
    `bevctl.data.nuscenes.NuScenesDataset`.

    Raises:
        BevctlError: mmdet3d is not installed, or cannot build the data set.
    """

    def __init__(self, config: Config, split: str) -> None:
        assert config.model.mmdet3d is not None
        self.config = config
        self.notes: tuple[str, ...] = ()
        self._train = split == "train"
        self._source = run_config(config.model.mmdet3d.config)
        loader = self._source.get(f"{split}_dataloader")
        if not loader:
            raise BevctlError(
                f"{config.model.mmdet3d.config} has no {split}_dataloader.", "Add it, or set train.eval_interval=0."
            )
        with _seeded(config.seed):  # some draw their samples when they are made
            self._set = _build(_with_files(loader["dataset"].to_dict(), config, self._train))
        self._collate = _collate_function(loader.get("collate_fn"))

    @functools.cached_property
    def info(self) -> InfoFile:
        """The annotations of this split. Raises BevctlError where they are no nuScenes info file."""
        data = self.config.data
        return read_info(Path(data.root) / (data.info_train if self._train else data.info_val))

    @property
    def checkpoint_meta(self) -> Mapping[str, Any]:
        """What mmengine's checkpoints say besides: the config's text, and the names of the classes."""
        named = {key: _plain(value) for key, value in dict(self._set.metainfo).items()}
        return {"cfg": self._source.pretty_text, "dataset_meta": named}

    def __len__(self) -> int:
        return len(self._set)

    def __getitem__(self, index: tuple[int, int]) -> Loaded:
        epoch, position = index
        problems: list[str] = []
        with _seeded(self.config.seed, epoch, position):
            for _ in range(ATTEMPTS if self._train else 1):
                position, token = self._admitted(position)
                try:
                    return Loaded(self._set[position], token, tuple(problems))
                except _UNREADABLE as error:
                    problems.append(f"Sample {token}: {type(error).__name__}: {error!s:.200}.")
                    position = random.randrange(len(self))
        return Loaded(None, "", tuple(problems))

    def collate(self, items: Sequence[Loaded]) -> ForeignBatch:
        """The samples as their own model takes them; those that could not be read leave their sentence only."""
        read = [item for item in items if item.content is not None]
        content = self._collate([item.content for item in read]) if read else None
        return ForeignBatch(content, [i.token for i in read], [problem for i in items for problem in i.problems])

    def _admitted(self, position: int) -> tuple[int, str]:
        """The position, or in training the next whose sample is not to be skipped; and the sample's token."""
        skipped = self.config.data.skip_samples if self._train else ()
        for _ in range(len(self)):
            token = self._token(position)
            if token not in skipped:
                return position, token
            position = (position + 1) % len(self)
        raise BevctlError("data.skip_samples leaves no sample to train on.", "Take some tokens out of it.")

    def _token(self, position: int) -> str:
        info = self._set.get_data_info(position)
        return str(info.get("token", info.get("sample_idx", position)))


def _with_files(dataset: dict[str, Any], config: Config, train: bool) -> dict[str, Any]:
    """The data set with our root and info file, where it names its own."""
    inner = inner_data_set(dataset)
    files = {"data_root": config.data.root, "ann_file": config.data.info_train if train else config.data.info_val}
    if isinstance(inner, dict):
        inner.update({key: value for key, value in files.items() if inner.get(key)})
    return dataset


def _build(dataset: dict[str, Any]) -> Any:
    with installed(), quiet():
        from mmdet3d.registry import DATASETS

        try:
            return DATASETS.build(dataset)
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            name, reason = type_name(dataset), " ".join(str(error).split())[:300]
            raise BevctlError(
                f"mmdet3d cannot build the data set {name}: {type(error).__name__}: {reason}.",
                "Check data_root and ann_file of the config; --set data.root=DIR replaces the first.",
            ) from error


def _collate_function(named: Any) -> Callable[[list[Any]], Any]:
    with installed():
        from mmengine.dataset import pseudo_collate
        from mmengine.registry import FUNCTIONS

    if named is None:
        return pseudo_collate
    options = {key: value for key, value in dict(named).items() if key != "type"}
    function = FUNCTIONS.get(named["type"]) if isinstance(named["type"], str) else named["type"]
    return functools.partial(function, **options)


@contextlib.contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    """Every global generator starts from `numbers` inside the block, and goes on as before after it."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 (pipelines draw from the global generators)
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


def _plain(value: Any) -> Any:
    """`value` in types that the weights-only reader takes; text for any other."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
