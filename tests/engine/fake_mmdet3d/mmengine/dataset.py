"""How samples become a batch."""

from __future__ import annotations

from typing import Any


def pseudo_collate(samples: list[Any]) -> Any:
    """Lists in place of single values, at every depth."""
    if isinstance(samples[0], dict):
        return {key: pseudo_collate([sample[key] for sample in samples]) for key in samples[0]}
    return list(samples)
