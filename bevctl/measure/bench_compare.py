"""Two `bevctl bench --json` documents against each other: what became slower or larger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevctl.errors import BevctlError

SCHEMA = "bevctl.bench/1"


@dataclass(frozen=True)
class Change:
    """One quantity of one precision and batch, in both documents."""

    precision: str
    batch: int
    quantity: str
    """step_s or allocated_bytes."""
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative growth: 0.05 is 5 % more."""
        return self.after / self.before - 1


@dataclass(frozen=True)
class Comparison:
    """What both documents measured."""

    changes: list[Change]
    notes: list[str]
    """What makes them hard to compare."""

    def regressions(self, limit: float) -> list[Change]:
        """Changes by more than `limit` for the worse."""
        return [change for change in self.changes if change.change > limit]


def compare(before: Path, after: Path) -> Comparison:
    """Time and memory of every precision and batch that both documents hold.

    Raises:
        BevctlError: a file is no such document, or the two have nothing in common.
    """
    documents = [read_document(path) for path in (before, after)]
    old, new = (_quantities(document, path) for document, path in zip(documents, (before, after), strict=True))
    common = [key for key in old if key in new]
    if not common:
        raise BevctlError(
            f"{before} and {after} share no precision and batch.",
            "Measure both with the same --precision and --batch.",
        )
    changes = [Change(*key, old[key], new[key]) for key in common]
    missing = sorted({f"{key[0]} at batch {key[1]}" for key in old.keys() - new.keys()})
    notes = [f"{after} lacks {', '.join(missing)}"] if missing else []
    facts = [("hardware", "device"), ("inputs", "source"), ("inputs", "points_per_sample")]
    facts += [("settings", name) for name in ("config", "checkpointing", "compile", "cuda_graphs", "deterministic")]
    for section, name in facts:
        a, b = (document.get(section, {}).get(name) for document in documents)
        if a != b:
            notes.append(f"{section}.{name} differs: {a} and {b}")
    return Comparison(changes, notes)


def read_document(path: Path) -> Mapping[str, Any]:
    """A document of `bevctl bench --json`. Raises BevctlError for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BevctlError(f"{path} is not JSON: {str(error)[:200]}.", HINT) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BevctlError(f"{path} is no {SCHEMA} document.", HINT)
    return document


HINT = "Write one with `bevctl bench CONFIG --json > FILE`."


def _quantities(document: Mapping[str, Any], path: Path) -> dict[tuple[str, int, str], float]:
    """Positive numbers by (precision, batch, quantity)."""
    found: dict[tuple[str, int, str], float] = {}
    try:
        for result in document["results"]:
            key = (str(result["precision"]), int(result["batch"]))
            median = (result["step_s"] or {}).get("median")
            for quantity, value in (("step_s", median), ("allocated_bytes", result["allocated_bytes"])):
                if value is not None and float(value) > 0:
                    found[(*key, quantity)] = float(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BevctlError(f"{path} lacks what a {SCHEMA} document has: {error!r}.", HINT) from error
    return found
