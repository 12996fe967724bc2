"""Values given for a config, layer on layer, until each key holds one value with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from yaml.nodes import MappingNode, Node

from bevctl.config import document, rules
from bevctl.config.schema import Config
from bevctl.config.values import Spec, convert, span_text, specs_of
from bevctl.errors import BevctlError, did_you_mean


@dataclass(frozen=True)
class Origin:
    """Where a value was given."""

    kind: str
    """default, file, environment, set or option."""
    where: str = ""
    """File, variable, `--set` text or option."""
    line: int = 0
    """1-based line of a file; 0 elsewhere."""

    def __str__(self) -> str:
        return f"{self.where}:{self.line}" if self.line else self.where or self.kind


@dataclass(frozen=True)
class Entry:
    """A value that is not yet converted, or an opened section."""

    node: Node
    origin: Origin


Layer = list[tuple[str, Entry]]
"""Dotted keys with what a source gives for them; an opened section comes before its values."""
Entries = dict[str, Entry]
"""What all layers so far give."""


def layer(node: MappingNode, origin: Callable[[int], Origin]) -> Layer:
    """The layer of a mapping of sections; `origin` makes the origin of a line. Raises BevctlError for unknown keys."""
    return list(_flatten(node, Config, "", origin))


def _flatten(
    node: MappingNode, section: type, prefix: str, origin: Callable[[int], Origin]
) -> Iterator[tuple[str, Entry]]:
    """(dotted key, entry) of each value; an opened section comes as itself before its values."""
    specs = specs_of(section)
    for name, value, line in document.items(node, str(origin(0))):
        key, here = prefix + name, origin(line)
        if name not in specs:
            raise BevctlError(f"{here}: unknown key {key!r}.", _nearest(name, prefix, specs))
        spec = specs[name]
        if spec.section is not None and isinstance(value, MappingNode):
            yield key, Entry(value, here)
            yield from _flatten(value, spec.section, f"{key}.", origin)
        elif spec.section is not None and not (spec.optional and document.is_null(value)):
            raise BevctlError(
                f"{here}: {key} is a section, not a value.", f"Its keys: {', '.join(specs_of(spec.section))}."
            )
        elif spec.is_table:
            if not isinstance(value, MappingNode):
                raise BevctlError(f"{here}: {key} must be a mapping, not a value.", f"{key}: {spec.metadata['help']}.")
            for entry, item, item_line in document.items(value, str(here)):
                yield f"{key}.{entry}", Entry(item, origin(item_line))
        else:
            yield key, Entry(value, here)


def _nearest(name: str, prefix: str, specs: Mapping[str, Spec]) -> str:
    """A hint: a sibling that is close, else the same word elsewhere, else the siblings."""
    hint = did_you_mean(name, specs)
    elsewhere = [key for key in keys() if key.rpartition(".")[2] == name]
    if hint.startswith("Did") or not elsewhere:
        return hint.replace("Did you mean '", f"Did you mean '{prefix}")
    return f"Did you mean {' or '.join(repr(key) for key in elsewhere[:3])}?"


def keys(section: type = Config, prefix: str = "") -> list[str]:
    """The dotted keys of every value of a config."""
    found: list[str] = []
    for name, spec in specs_of(section).items():
        key = prefix + name
        found.extend(keys(spec.section, f"{key}.") if spec.section else [key])
    return found


def overlay(entries: Entries, stronger: Layer) -> None:
    """Put a stronger layer on `entries`: a value replaces the value or section of its key; a null section ends."""
    for key, entry in stronger:
        for above in _ancestors(key):
            if above in entries and document.is_null(entries[above].node):
                del entries[above]
        if isinstance(entry.node, MappingNode):
            if key in entries and document.is_null(entries[key].node):
                del entries[key]
            entries.setdefault(key, entry)
            continue
        for below in [other for other in entries if other.startswith(f"{key}.")]:
            del entries[below]
        entries[key] = entry


def _ancestors(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def overridden(entries: Entries, stronger: Layer) -> Iterator[str]:
    """A note for each `--set` value that a stronger layer replaces."""
    for key, entry in stronger:
        old = entries.get(key)
        if old and old.origin.kind == "set" and not isinstance(entry.node, MappingNode):
            yield f"{entry.origin} overrides {old.origin}."


def resolve(entries: Entries) -> tuple[Config, dict[str, Origin]]:
    """The config and the origin of each value. Raises BevctlError for a wrong value or a broken rule."""
    origins: dict[str, Origin] = {}
    config: Config = _build(Config, "", entries, origins)
    for problem in rules.problems(config):
        origin = origins.get(problem.key, Origin("default"))
        where = "" if origin.kind == "default" else f"{origin}: "
        raise BevctlError(f"{where}{problem.message}", problem.hint)
    return config, origins


def _build(section: type, prefix: str, entries: Entries, origins: dict[str, Origin]) -> Any:
    values = {}
    for name, spec in specs_of(section).items():
        key = prefix + name
        entry = entries.get(key)
        below = [other for other in entries if other.startswith(f"{key}.")]
        if spec.is_table:
            values[name] = {other.removeprefix(f"{key}."): _value(other, spec, entries, origins) for other in below}
        elif spec.section and (below or (entry is None and spec.default is not None) or _opens(entry)):
            values[name] = _build(spec.section, f"{key}.", entries, origins)
        elif entry is None:
            values[name] = spec.default
            origins[key] = Origin("default")
        else:
            values[name] = _value(key, spec, entries, origins)
    return section(**values)


def _opens(entry: Entry | None) -> bool:
    return entry is not None and isinstance(entry.node, MappingNode)


def _value(key: str, spec: Spec, entries: Entries, origins: dict[str, Origin]) -> Any:
    entry = entries[key]
    origins[key] = entry.origin
    if spec.section:
        return None
    if spec.is_table:
        return convert(span_text(entry.node), dataclasses.replace(spec, hint=str), key, str(entry.origin))
    return convert(entry.node, spec, key, str(entry.origin))
