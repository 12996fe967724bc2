"""What is wrong between the values of a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A rule that does not hold: the key to point at, a sentence with the values, and what to do."""

    key: str
    message: str
    hint: str
