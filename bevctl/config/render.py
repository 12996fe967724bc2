"""A config as plain data and as YAML text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from bevctl.config.layers import Origin
from bevctl.config.schema import Config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as dicts, lists, text, numbers, booleans and None."""
    plain: dict[str, Any] = _plain(config)
    return plain


def to_yaml(config: Config) -> str:
    """The config as YAML text, every value given; `load` reads back the same config."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def annotated_yaml(config: Config, origins: Mapping[str, Origin]) -> str:
    """The config as YAML text with the origin of each value as a comment."""
    rows: list[tuple[str, str]] = []
    _annotate(to_dict(config), "", origins, rows)
    width = min(max(len(text) for text, _ in rows), 60)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _annotate(
    values: Mapping[str, Any], prefix: str, origins: Mapping[str, Origin], rows: list[tuple[str, str]]
) -> None:
    for name, value in values.items():
        key = prefix + name
        indent = "  " * prefix.count(".")
        if isinstance(value, dict) and value:
            rows.append((f"{indent}{name}:", ""))
            _annotate(value, f"{key}.", origins, rows)
        else:
            text = yaml.dump({name: value}, Dumper=_Dumper, width=10_000, allow_unicode=True).rstrip("\n")
            first, *rest = text.split("\n")
            rows.append((f"{indent}{first}", str(origins.get(key, "default"))))
            rows.extend((f"{indent}{line}", "") for line in rest)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Block mappings, lists of plain values in one line, no aliases, control characters escaped."""

    def ignore_aliases(self, _: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Left to itself, PyYAML writes U+0085 and its like unescaped, and reads them as line ends.
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        flow = not any(isinstance(item, dict) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(str, _Dumper.represent_str)
