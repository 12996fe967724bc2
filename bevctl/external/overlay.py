"""The config file that a run of another project is started with where options cannot say what is asked for.

It lies in the run's folder, builds on the project's own file, and nothing is ever written into the project's tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bevctl.config.foreign import ForeignConfig
from bevctl.config.sections import sections_of
from bevctl.errors import BevctlError
from bevctl.files import atomic_write_text

FOLDER = "bevctl"
"""Folder inside the work_dir; in the work_dir itself mmcv's training scripts write a file of the config's name."""
_WIDTH = 100


@dataclass(frozen=True)
class Overlay:
    """A config file to be written."""

    path: Path
    text: str

    def write(self) -> None:
        """Raises OSError as the file system does."""
        atomic_write_text(self.path, self.text)


def python_overlay(config: ForeignConfig, changes: Mapping[str, Any], work_dir: Path) -> Overlay:
    """An mmcv or mmengine config over the project's, under the same name, with the changed values alone."""
    head = f"# Written by bevctl for the run in {work_dir}: what differs from the config below.\n"
    lines = [f"_base_ = [{str(config.path.absolute())!r}]"]
    lines += [f"{key} = {_source(value)}" for key, value in _over(config.values, sections_of(changes)).items()]
    return Overlay(work_dir / FOLDER / config.path.name, head + "\n".join(lines) + "\n")


def yaml_overlay(config: ForeignConfig, changes: Mapping[str, Any], work_dir: Path) -> Overlay:
    """A copy of an OpenPCDet config with values changed; the bases that it names are looked for where they were."""
    document = yaml.safe_load(config.path.read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        *parents, name = dotted.split(".")
        holder = document
        for key in parents:
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            raise BevctlError(
                f"{dotted} cannot be set: {config.path} has no mapping there.", "Change the config itself."
            )
        holder[name] = value
    head = f"# Written by bevctl for the run in {work_dir}: {config.path} with {', '.join(changes)} changed.\n"
    return Overlay(work_dir / FOLDER / config.path.name, head + yaml.safe_dump(document, sort_keys=False))


def _over(below: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values, with `_delete_` in a mapping over a null or a number, into which mmcv merges none."""
    result = {}
    for key, value in values.items():
        under = below.get(key)
        if isinstance(value, dict) and key in below and not isinstance(under, Mapping):
            value = {"_delete_": True, **value}
        elif isinstance(value, dict) and isinstance(under, Mapping):
            value = _over(under, value)
        result[key] = value
    return result


def _source(value: Any, indent: int = 0) -> str:
    """A value as mmcv's configs write it: mappings by `dict(…)` where the keys are names."""
    if not isinstance(value, dict | list | tuple):
        return repr(value)
    flat = _flat(value)
    if len(flat) + indent <= _WIDTH:
        return flat
    inner = " " * (indent + 4)
    opening, closing = _brackets(value)
    items = [f"{inner}{key}{_source(item, indent + 4 + len(key))},\n" for key, item in _items(value)]
    return f"{opening}\n{''.join(items)}{' ' * indent}{closing}"


def _flat(value: Any) -> str:
    if not isinstance(value, dict | list | tuple):
        return repr(value)
    opening, closing = _brackets(value)
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return opening + ", ".join(f"{key}{_flat(item)}" for key, item in _items(value)) + comma + closing


def _items(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [("", item) for item in value]
    named = _has_names(value)
    return [(f"{key}=" if named else f"{key!r}: ", item) for key, item in value.items()]


def _brackets(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> tuple[str, str]:
    if isinstance(value, dict):
        return ("dict(", ")") if _has_names(value) else ("{", "}")
    return ("[", "]") if isinstance(value, list) else ("(", ")")


def _has_names(value: dict[Any, Any]) -> bool:
    import keyword

    return all(isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in value)
