"""The file that `bevctl train --set FILE` takes: the settings of the remedies that are worth trying."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bevctl.config.sections import sections_of
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.files import atomic_write_text


def chosen_remedies(findings: Sequence[DiagnoseFinding]) -> list[Remedy]:
    """For each finding its first verified setting, else its first untried one; never one that failed.

    A later remedy that changes a key of an earlier one is left out.
    """
    chosen: list[Remedy] = []
    for finding in findings:
        settings = [remedy for remedy in finding.fix if remedy.set]
        best = next((r for r in settings if r.verified), next((r for r in settings if r.verified is None), None))
        taken = {key for remedy in chosen for key in remedy.set}
        if best is not None and not taken & best.set.keys():
            chosen.append(best)
    return chosen


def write_fix(path: Path, findings: Sequence[DiagnoseFinding]) -> list[Remedy]:
    """Writes the settings of `chosen_remedies` and returns them; writes nothing where there are none.

    Raises:
        OSError: the file system refuses.
    """
    remedies = chosen_remedies(findings)
    if remedies:
        atomic_write_text(path, "".join(map(_comment, remedies)) + yaml.safe_dump(_document(remedies), sort_keys=False))
    return remedies


def _comment(remedy: Remedy) -> str:
    proof = "tried on the replay: cures it" if remedy.verified else "not tried"
    return f"# {' '.join(remedy.why.split())} ({proof})\n"


def _document(remedies: Sequence[Remedy]) -> dict[str, Any]:
    """The settings as a config file has them."""
    values = {key: value for remedy in remedies for key, value in remedy.set.items()}
    return sections_of({key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})
