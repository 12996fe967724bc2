"""Widths in a model's config that tensor cores cannot take as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bevctl.diagnose.subject import Subject
from bevctl.finding import Evidence

EIGHT = 8
"""FP16 numbers that a tensor core takes at once."""
_WIDTH = re.compile(r"(?:^|_)(?:channels?|dims?|planes|filters|hidden|embed|ffn)$")
_DEEP = 20


def odd_channels(subject: Subject) -> list[Evidence]:
    """Widths of more than 8 that are no multiple of 8, with the place that sets them.

    Narrower ones are inputs (colours, coordinates) and outputs, which no config can change.
    """
    config = subject.setting.config
    if config is not None:
        found = _odd(config.values.get("model"), "model")
        return [Evidence(str(config.origin(key) or config.path), f"{key} = {value}") for key, value in found]
    own = (subject.view.config or {}).get("model") if subject.view is not None else None
    return [Evidence(subject.setting.where, f"{key} = {value}") for key, value in _odd(own, "model")]


def _odd(node: Any, dotted: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if depth > _DEEP:
        return
    if isinstance(node, Mapping):
        for key, value in node.items():
            place = f"{dotted}.{key}"
            widths = value if isinstance(value, list | tuple) else [value]
            if _WIDTH.search(str(key)):
                yield from ((place, width) for width in widths if _is_odd(width))
            yield from _odd(value, place, depth + 1)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _odd(value, f"{dotted}.{index}", depth + 1)


def _is_odd(width: object) -> bool:
    return isinstance(width, int) and not isinstance(width, bool) and width > EIGHT and width % EIGHT != 0
