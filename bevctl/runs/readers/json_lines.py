"""JSON objects, one a line, as mmcv, mmengine and bevctl write them; NaN and Infinity as Python spells them."""

from __future__ import annotations

import json
from typing import Any

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
