"""What every finding id means: one YAML file a family, which names the id, how it was decided, and what to do."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.errors import BevctlError, did_you_mean


@dataclass(frozen=True)
class Explanation:
    """One id, explained."""

    id: str
    title: str
    meaning: str
    """What it means for a run."""
    decided: str
    """What is looked at, and where the limits lie."""
    do: str
    """What to do about it."""


@functools.lru_cache(maxsize=1)
def explanations() -> Mapping[str, Explanation]:
    """Every explanation by id, family by family."""
    import yaml

    found = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for id, entry in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            found[id] = Explanation(id, **{key: " ".join(text.split()) for key, text in entry.items()})
    return found


def explain(id: str) -> Explanation:
    """The explanation of an id, in any case. Raises BevctlError with the nearest id."""
    known = explanations()
    if id.upper() not in known:
        close = did_you_mean(id.upper(), known)
        raise BevctlError(
            f"No finding {id!r}.", close if close.startswith("Did") else "`bevctl explain` lists them all."
        )
    return known[id.upper()]
