"""Values by dotted key as a config file has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sections_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as sections inside each other."""
    document: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return document
