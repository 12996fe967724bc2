"""Values that a user sets by another project's own keys: `key=value`, or a YAML file of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bevctl.config import document
from bevctl.errors import BevctlError

_WORDS = {"true": True, "false": False, "null": None}


def read_overrides(sets: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """(dotted key, value) of each, in their order. Raises BevctlError for a file that cannot be read."""
    return tuple(pair for text in sets for pair in _pairs(text))


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    key, separator, value = text.partition("=")
    if separator:
        yield key, literal(value)
        return
    document.read_mapping(Path(text))
    try:
        yield from _flat(yaml.safe_load(Path(text).read_text(encoding="utf-8")))
    except yaml.YAMLError:
        raise BevctlError(f"{text} holds more than plain values.", "Use numbers, text, lists and mappings.") from None


def literal(text: str) -> Any:
    """The value of a text as mmcv, torchpack and OpenPCDet take it: a Python literal, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _WORDS.get(text.lower(), text)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
