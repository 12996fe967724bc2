"""What a check or a diagnosis says, in the fields that JSON and the screen share. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Severity(str, Enum):
    """How bad; ordered by `rank`."""

    INFO = "info"
    WARN = "warn"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class CheckStatus(str, Enum):
    """Outcome of a preflight check; `unknown` is never a pass."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One line of preflight. `why` says what goes wrong otherwise, `fix` what to do, with the exact command."""

    id: str
    name: str
    section: str
    """gpu, software, files, data, system or launch."""
    status: CheckStatus
    found: str
    required: str = ""
    why: str = ""
    fix: str = ""
    advisory: bool = False
    """Listed, but never decides status or exit code when unknown."""


@dataclass(frozen=True)
class Evidence:
    """One observation: where it stands and what it says."""

    where: str
    what: str


@dataclass(frozen=True)
class Finding:
    """One alarm of monitor or one finding of diagnose."""

    id: str
    severity: Severity
    title: str
    evidence: tuple[Evidence, ...] = field(default=())
    cause: str = ""
    fix: str | None = None
