"""Configs of OpenPCDet: YAML in which any mapping may start from the file that its `_BASE_CONFIG_` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bevctl.config import document
from bevctl.config.document import display
from bevctl.config.foreign_torchpack import YamlFile
from bevctl.config.foreign_values import Section, merged
from bevctl.errors import BevctlError

KEYS = ("CLASS_NAMES", "DATA_CONFIG", "OPTIMIZATION")
"""Top-level keys of a model's config."""
_BASE = "_BASE_CONFIG_"


def read(path: Path) -> tuple[Section, list[Path]]:
    """The config with its bases below it, and the files, bases first. Raises BevctlError that names file and line."""
    files: list[Path] = []
    values = _with_bases(YamlFile(path).section(document.read_mapping(path)), path, files)
    return values, [*files, path]


def _with_bases(values: Section, path: Path, files: list[Path]) -> Section:
    """A base's own base is not followed, as in OpenPCDet."""
    below = Section()
    if _BASE in values:
        base = _base_file(values[_BASE], path)
        files.append(base)
        below = YamlFile(base).section(document.read_mapping(base))
    own = Section()
    for key, value in values.items():
        if key != _BASE:
            inner = _with_bases(value, path, files) if isinstance(value, Section) else value
            own.put(key, inner, values.origins.get(key))
    return merged(below, own)


def _base_file(name: Any, path: Path) -> Path:
    """The base as OpenPCDet finds it: relative to tools/, the folder it is run in."""
    for folder in (Path(), *path.parents):
        if isinstance(name, str) and (folder / name).is_file():
            return folder / name
    raise BevctlError(
        f"{display(path)}: the base {name} does not exist.", "It is looked for from the folder tools/ of the project."
    )
