"""Configs of other projects: YAML of torchpack (mit-bevfusion) and OpenPCDet, Python of mmcv and mmengine; never run.

`read_foreign` gives one form for all of them; `bevctl.config.foreign_facts` says what such a config asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bevctl.config import document, foreign_pcdet, foreign_torchpack
from bevctl.config.document import display
from bevctl.config.foreign_python import Reading
from bevctl.config.foreign_values import Section, Unresolved, lookup, merged, nested, origin_of
from bevctl.config.layers import Origin
from bevctl.errors import BevctlError

MMENGINE_KEYS = ("optim_wrapper", "train_dataloader", "default_scope", "param_scheduler", "train_cfg", "val_evaluator")
MMCV_KEYS = ("optimizer_config", "lr_config", "checkpoint_config", "total_epochs", "runner", "data", "dist_params")
_COMMON_KEYS = ("model", "optimizer", "load_from", "work_dir", "log_level")
_TORCHPACK_KEYS = ("optimizer", "lr_config", "runner", "max_epochs", "fp16", "input_modality", "dataset_type")
_TORCHPACK_MODEL_KEYS = ("encoders", "heads", "fuser")


@dataclass(frozen=True)
class ForeignConfig:
    """A config of another project, its bases merged and its expressions worked out where that is possible."""

    kind: str
    """torchpack, openpcdet, mmcv or mmengine."""
    path: Path
    files: tuple[Path, ...]
    """Every file that it is made of; the later ones rank above the earlier ones."""
    values: Section
    notes: tuple[str, ...] = ()
    """What was not followed, one sentence each."""
    lazy: bool = False
    """A Python config that imports bases or classes, on which mmengine lets no file of the older style build."""

    def get(self, dotted: str) -> Any:
        """The value of a dotted key; None where there is none or it could not be worked out."""
        value = lookup(self.values, dotted)
        return None if isinstance(value, Unresolved) else value

    def origin(self, dotted: str) -> Origin | None:
        """File and line that set a dotted key."""
        return origin_of(self.values, dotted)

    def find(self, name: str, below: str) -> Iterator[Any]:
        """Every value with the key `name` at any depth below the dotted key `below`, outer ones first."""
        waiting, seen = [lookup(self.values, below)], set()
        while waiting:
            value = waiting.pop(0)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Section):
                if name in value and not isinstance(value[name], Unresolved):
                    yield value[name]
                waiting.extend(value.values())
            elif isinstance(value, list | tuple):
                waiting.extend(value)


def is_foreign(path: Path) -> bool:
    """Whether a file is to be read as a config of another project: a Python file, or YAML of torchpack or OpenPCDet.

    A file that cannot be read, or is no YAML, is left to the reader of our own configs.
    """
    if path.suffix == ".py":
        return True
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        own = document.read_mapping(path)
        return _is_pcdet(own) or any(
            _is_torchpack(document.read_mapping(file)) for file in foreign_torchpack.chain(path)
        )
    except BevctlError:
        return False


def _is_pcdet(node: Any) -> bool:
    return {key.value for key, _ in node.value} >= set(foreign_pcdet.KEYS)


def _is_torchpack(node: Any) -> bool:
    """By keys that only torchpack's configs have; mit-bevfusion's leaf files hold nothing but a `model`."""
    top = {key.value: value for key, value in node.value}
    model = top.get("model")
    inside = {key.value for key, _ in model.value} if isinstance(model, document.MappingNode) else set()
    return bool(top.keys() & set(_TORCHPACK_KEYS)) or bool(inside & set(_TORCHPACK_MODEL_KEYS))


def read_foreign(path: Path) -> ForeignConfig:
    """The config of another project in `path`.

    Raises BevctlError (exit 2), with file and line, for a file that cannot be read or is no such config.
    """
    if path.suffix != ".py" and _is_pcdet(document.read_mapping(path)):
        values, files = foreign_pcdet.read(path)
        return ForeignConfig("openpcdet", path, tuple(files), values)
    if path.suffix != ".py":
        values, files = foreign_torchpack.read(path)
        return ForeignConfig("torchpack", path, tuple(files), values)
    reading = Reading()
    try:
        values = reading.read(path)
    except RecursionError:
        raise BevctlError(
            f"{display(path)} is nested too deeply to read.", "Give an mmcv or mmengine config."
        ) from None
    kind, notes = _python_kind(values, path), tuple(reading.notes)
    return ForeignConfig(kind, path, tuple(reading.files), values, notes, reading.lazy)


def changed(config: ForeignConfig, changes: Mapping[str, Any]) -> ForeignConfig:
    """The config with values (by dotted key) laid over it, where its own program takes them from the command line.

    A mapping with `_delete_: True` replaces what is there. Raises BevctlError as `read_foreign` does.
    """
    parts = [nested(key, value, Origin("option", "as asked for")) for key, value in changes.items()]
    if config.kind == "torchpack":
        above = functools.reduce(merged, parts, Section())
        return replace(config, values=foreign_torchpack.read(config.path, above)[0])
    return replace(config, values=functools.reduce(merged, parts, config.values))


def read_foreign_dump(text: str, path: Path) -> ForeignConfig:
    """The config that mmcv or mmengine printed into the log `path`, bases merged; lines count from its own first.

    Raises BevctlError for text that is no such config.
    """
    reading = Reading()
    try:
        values = reading.read_dump(text, path)
    except RecursionError:
        raise BevctlError(f"The config in {display(path)} is nested too deeply to read.") from None
    return ForeignConfig(_python_kind(values, path), path, (path,), values, tuple(reading.notes))


def _python_kind(values: Section, path: Path) -> str:
    if values.keys() & set(MMENGINE_KEYS[:4]) or (values.keys() & set(MMENGINE_KEYS) and not values.keys() & {"data"}):
        return "mmengine"
    if values.keys() & {*MMCV_KEYS, *_COMMON_KEYS}:
        return "mmcv"
    raise BevctlError(
        f"{display(path)} is no mmcv or mmengine config: it sets none of model, data, train_dataloader, optimizer.",
        "Give the config file of the run, not a script.",
    )
