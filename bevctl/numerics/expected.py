"""The maintained list of what may be not finite without being a fault, and of what input is implausible."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Rule:
    """One entry of expected.yaml."""

    pattern: str
    """fnmatch of an operation (aten.where.self) or of an input (batch.boxes[0])."""
    reason: str
    columns: tuple[int, ...] = ()
    """Of an input's last axis; all where empty."""
    outputs: tuple[int, ...] = ()
    """Of an operation, counted from 0; all where empty."""
    arguments: tuple[str, ...] = ()
    """Of an operation, by name."""
    unless: tuple[str, ...] = ()
    """Flags of an operation: the rule does not hold where one of them is false."""
    largest: float = float("inf")
    """Largest plausible magnitude."""
    blanket: bool = False
    """Whether the operation replaces everything that is not finite."""

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Expected:
    """The rules by section; see the file for what each section means."""

    inputs: tuple[Rule, ...] = ()
    uninitialised: tuple[Rule, ...] = ()
    unread: tuple[Rule, ...] = ()
    outputs: tuple[Rule, ...] = ()
    masking: tuple[Rule, ...] = ()
    plausible: tuple[Rule, ...] = ()


def first_match(rules: Sequence[Rule], name: str) -> Rule | None:
    """The first rule that names `name`."""
    return next((rule for rule in rules if rule.matches(name)), None)


@functools.cache
def expected() -> Expected:
    """The rules that come with the package."""
    return read_expected(Path(__file__).with_name("expected.yaml"))


def read_expected(path: Path) -> Expected:
    """The rules of a file of the form of expected.yaml."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Expected(**{section: tuple(_rule(row) for row in rows) for section, rows in content.items()})


def _rule(row: dict[str, Any]) -> Rule:
    return Rule(
        pattern=row.get("op") or row["name"],
        reason=row["reason"],
        columns=tuple(row.get("columns", ())),
        outputs=tuple(row.get("outputs", ())),
        arguments=tuple(row.get("arguments", ())),
        unless=tuple(row.get("unless", ())),
        largest=float(row.get("largest", "inf")),
        blanket=row.get("blanket", False),
    )
