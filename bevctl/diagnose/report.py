"""What a diagnosis says: findings with a confidence and remedies, tables, and what follows for the exit code.

Standard library only; a topic's module is a function

    def diagnose(request: DiagnoseRequest) -> Diagnosis

that raises BevctlError for input it cannot work with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bevctl.errors import ExitCode
from bevctl.finding import Evidence, Severity


def _say_nothing(_: str) -> None:
    """Where nobody listens."""


@dataclass(frozen=True)
class DiagnoseRequest:
    """What the command line asks of a topic."""

    run: Path | None
    """The folder of a run, a log, or an incident's folder; None: only the other files are given."""
    replay: bool = False
    against: Path | None = None
    """The run to compare with."""
    source: Path | None = None
    """Folder of the model's source code, which is read and never run."""
    config: str | None = None
    """Config by path or packaged name, where the run does not hold its own."""
    checkpoint: Path | None = None
    forecast: bool = False
    bench: tuple[Path, ...] = ()
    """Documents of `bevctl bench --json`."""
    profile: int | None = None
    """Steps to profile; None: nothing is run."""
    device: str = "auto"
    """auto, cpu or cuda: where a topic computes."""
    say: Callable[[str], None] = _say_nothing
    """Told what is going on, a sentence at a time."""


class Status(str, Enum):
    """What a diagnosis comes to. A run about which nothing can be said is never clear."""

    FOUND = "found"
    CLEAR = "clear"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and whether it was seen to help."""

    set: Mapping[str, Any]
    """Values by dotted config key; empty where the remedy is not a setting."""
    why: str
    verified: bool | None = None
    """True: it ran and cured; False: it ran and did not; None: it was not tried."""
    step_time: float | None = None
    """Measured time of a step with it, over that without."""
    memory: float | None = None
    """Measured peak of allocated memory with it, over that without."""
    resume: str = "auto"
    """Checkpoint of the run to continue from with it, as for `train --resume`; empty: it must start anew."""


OUTCOMES = {True: "cures it", False: "does not cure it", None: "not tried"}
"""`Remedy.verified` in words."""


@dataclass(frozen=True)
class DiagnoseFinding:
    """One cause, as far as it is known: the fields of `bevctl.finding.Finding`, a confidence, and several remedies."""

    id: str
    severity: Severity
    confidence: float
    """0..1: how sure it is that the cause is this one."""
    title: str
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    fix: tuple[Remedy, ...] = ()
    """The best first."""


@dataclass(frozen=True)
class Table:
    """Numbers beside the findings: drawn on the screen, a list of rows by column under `name` in JSON."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Diagnosis:
    """The answer of a topic."""

    status: Status
    findings: Sequence[DiagnoseFinding] = ()
    looked_at: Sequence[str] = ()
    """What was examined, and what could not be: a sentence each."""
    tables: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the JSON document."""
    said: str = ""
    """The answer in one sentence where nothing was found; empty: what the status means."""

    def verdict(self) -> str:
        """The answer in one sentence: the worst finding, the first of equals, else what was said."""
        if self.status is not Status.FOUND or not self.findings:
            return self.said
        return max(self.findings, key=lambda finding: finding.severity.rank).title


def status_of(findings: Iterable[DiagnoseFinding]) -> Status:
    """FOUND where a finding is more than information, else CLEAR."""
    return Status.FOUND if any(f.severity.rank >= Severity.WARN.rank for f in findings) else Status.CLEAR


def exit_code(diagnosis: Diagnosis, fail_on: Severity = Severity.WARN) -> ExitCode:
    """3 where nothing could be decided, 1 where a finding is at or above `fail_on`, else 0."""
    if diagnosis.status is Status.INCONCLUSIVE:
        return ExitCode.UNKNOWN
    above = any(finding.severity.rank >= fail_on.rank for finding in diagnosis.findings)
    return ExitCode.FINDINGS if above else ExitCode.OK


def document(topic: str, diagnosis: Diagnosis) -> dict[str, Any]:
    """The fields of the JSON document, without its head."""
    return {
        "topic": topic,
        "status": diagnosis.status.value,
        "findings": [{**asdict(finding), "severity": finding.severity.value} for finding in diagnosis.findings],
        "looked_at": list(diagnosis.looked_at),
        **{
            table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in diagnosis.tables
        },
        **diagnosis.facts,
    }
