"""What configs of other projects hold: mappings that know where each key was set, and values left unresolved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bevctl.config.layers import Origin


@dataclass(frozen=True)
class Unresolved:
    """A value that only running the config would give: its text, and why it was not worked out."""

    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.text} ({self.reason})"


class Section(dict[str, Any]):
    """A mapping of a config, and the origin of each of its keys."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(values)
        self.origins: dict[str, Origin] = dict(values.origins) if isinstance(values, Section) else {}

    def put(self, key: str, value: Any, origin: Origin | None) -> None:
        """Set a key, given at `origin`."""
        self[key] = value
        if origin is not None:
            self.origins[key] = origin

    def remove(self, key: str) -> None:
        """Take a key out, if it is there."""
        self.pop(key, None)
        self.origins.pop(key, None)


def merged(below: Section, above: Section) -> Section:
    """`above` laid over `below`: mappings are merged level by level, anything else replaces what is below.

    `_delete_: True` in a mapping discards what lies below it, as in mmcv. Neither argument is changed.
    """
    result = Section(below)
    for key, value in above.items():
        if isinstance(value, Section):
            under = below.get(key)
            if not isinstance(under, Section) or value.get("_delete_") is True:
                under = Section()
            value = merged(under, value)
            value.remove("_delete_")
        result.put(key, value, above.origins.get(key))
    return result


def nested(dotted: str, value: Any, origin: Origin) -> Section:
    """The mapping in which a dotted key has this value; mappings in the value become sections."""
    result = Section()
    name, _, rest = dotted.partition(".")
    result.put(name, nested(rest, value, origin) if rest else as_section(value, origin), origin)
    return result


def as_section(value: Any, origin: Origin) -> Any:
    """The value with its mappings as sections whose keys were all set at `origin`; `_delete_` stays."""
    if isinstance(value, list | tuple):
        return type(value)(as_section(item, origin) for item in value)
    if isinstance(value, Section) or not isinstance(value, Mapping):
        return value
    section = Section()
    for key, item in value.items():
        section.put(key, as_section(item, origin), origin)
    return section


def plain(value: Any) -> Any:
    """The value as dicts, lists and scalars. Raises ValueError where part of it is unresolved."""
    if isinstance(value, Unresolved):
        raise ValueError(str(value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return [plain(item) for item in value] if isinstance(value, list) else value


def lookup(values: Any, dotted: str) -> Any:
    """The value of a dotted key, None where there is none; a number is an index of a list."""
    for part in dotted.split("."):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list | tuple) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def origin_of(values: Section, dotted: str) -> Origin | None:
    """Where a dotted key was set."""
    parent, _, name = dotted.rpartition(".")
    holder = lookup(values, parent) if parent else values
    return holder.origins.get(name) if isinstance(holder, Section) else None
