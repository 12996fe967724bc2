"""JSON objects, one a line, as mmcv, mmengine and bevctl write them; NaN and Infinity as Python spells them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from bevctl.runs.collect import Collector
from bevctl.runs.layout import LayoutCache
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.text import Place, TextLog

_decode = json.JSONDecoder().decode


def decode_object(line: str) -> dict[str, Any] | None:
    """The object that `line` holds; None where it is none, or not whole."""
    if not line.startswith("{"):
        return None
    try:
        value = _decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class JsonLines(ABC):
    """What the parsers (see `bevctl.runs.readers`) of these formats share: `_item` takes an object, or refuses it."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:  # noqa: ARG002 - none needs to guess a time
        self._out = out
        self._text = TextLog(out, place)
        self._layouts = LayoutCache()

    def jump(self, place: Place) -> None:
        self._text.jump(place)

    def feed(self, lines: list[str], number: int) -> None:
        for line in lines:
            item = decode_object(line)
            if item is None or not self._item(item, number):
                self._text.plain(line, number)
            number += 1

    def feed_torn(self, line: str, number: int) -> bool:
        item = decode_object(line)
        if item is None or not self._item(item, number):
            self._out.left_out()
            return False
        return True

    def finish(self) -> None:
        self._text.close_dump()

    @abstractmethod
    def _item(self, item: dict[str, Any], number: int) -> bool:
        """Whether the object of line `number` is one of the format's, and taken."""
