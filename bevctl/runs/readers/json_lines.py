"""JSON objects, one a line, as mmcv, mmengine and bevctl write them; NaN and Infinity as Python spells them."""

from __future__ import annotations

import json
from typing import Any

from bevctl.runs.readers.text import TextLog

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


def other_line(text: TextLog, line: str, number: int) -> None:
    """A line that is no object: a traceback, say, where a shell appended one to the log."""
    text.plain(text.without_rank(line), number)
