"""From a config's name, overrides and options to one frozen `Config` that knows where each value comes from.

Layers, weakest first: defaults of the schema, `base:` of the file, the file, environment, `--set`, options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bevctl.config.layers import Entries, Layer, Origin, overlay, overridden, resolve
from bevctl.config.render import to_dict, to_yaml
from bevctl.config.schema import Config
from bevctl.config.sources import Given, data_layer, file_layers, find, is_there, set_layer, value_layer

__all__ = ["DEFAULT", "LOCAL", "Given", "Loaded", "Origin", "from_dict", "load", "to_dict", "to_yaml"]

DEFAULT = "bevfusion_multitask_fp16"
LOCAL = Path("bevctl.yaml")

Read = Callable[[Path], tuple[Sequence[Layer], Sequence[str]]]
"""The layers of a config file, weakest first, and what to say about it."""


def read_yaml(path: Path) -> tuple[Sequence[Layer], Sequence[str]]:
    """A config of ours, with its base. Raises BevctlError."""
    return list(file_layers(path)), ()


@dataclass(frozen=True)
class Loaded:
    """A resolved config."""

    config: Config
    origins: dict[str, Origin]
    """Origin of each value, by its dotted key."""
    notes: list[str] = field(default_factory=list)
    """What the user should read on stderr."""
    path: Path | None = None
    """The config file, None for one that came as data."""


def load(
    source: str | Path | None,
    *,
    sets: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, object] | None = None,
    fallback: Callable[[], str | Path | Mapping[str, Any] | None] | None = None,
    read: Read = read_yaml,
) -> Loaded:
    """Resolve a config.

    Args:
        source: path or packaged name; None: `bevctl.yaml` in the working directory, else `fallback()`, else DEFAULT.
        sets: `key=value` (the value in YAML) or the path of a YAML file; later wins.
        options: values (plain or `Given`) by dotted key that rank above `sets`.
        environment: values (plain or `Given`) by dotted key that rank below `sets`, above the file.
        fallback: what to use without CONFIG, when resuming: a path, a name, or a config as data; None for nothing.
        read: how the file is read.

    Raises BevctlError (exit code 2) that names file and line, or the option, for what is not as the schema says.
    """
    notes: list[str] = []
    chosen = _choose(source, fallback, notes)
    path = None if isinstance(chosen, Mapping) else find(chosen)
    entries: Entries = {}
    if isinstance(chosen, Mapping):
        layers: Sequence[Layer] = [data_layer(chosen, "the resumed run")]
    else:
        layers, told = read(find(chosen))
        notes.extend(told)
    for layer in layers:
        overlay(entries, layer)
    for key, value in (environment or {}).items():
        overlay(entries, value_layer(key, value, "environment"))
    for text in sets:
        overlay(entries, set_layer(text))
    for key, value in (options or {}).items():
        layer = value_layer(key, value, "option")
        notes.extend(overridden(entries, layer))
        overlay(entries, layer)
    config, origins = resolve(entries)
    return Loaded(config, origins, notes, path)


def from_dict(data: Mapping[str, Any]) -> Config:
    """The config of plain data, such as `to_dict` gives; checked like a file. Raises BevctlError."""
    entries: Entries = {}
    overlay(entries, data_layer(data, "config"))
    return resolve(entries)[0]


def _choose(
    source: str | Path | None,
    fallback: Callable[[], str | Path | Mapping[str, Any] | None] | None,
    notes: list[str],
) -> str | Path | Mapping[str, Any]:
    if source is not None:
        return source
    if is_there(LOCAL):
        notes.append(f"No CONFIG given: using {LOCAL} of this folder.")
        return LOCAL
    resumed = fallback() if fallback else None
    if resumed is not None:
        notes.append("No CONFIG given: using the config of the resumed run.")
        return resumed
    notes.append(f"No CONFIG given: using the packaged config {DEFAULT}.")
    return DEFAULT
