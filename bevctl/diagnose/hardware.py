"""What the GPUs say about themselves, for an incident that does not come again."""

from __future__ import annotations

from collections.abc import Iterator

from bevctl.config.schema import Config
from bevctl.finding import CheckStatus, Evidence
from bevctl.preflight.gpu_health import ecc, remapped_rows, xid
from bevctl.preflight.request import context_of_config

_QUESTIONS = (("ECC", ecc), ("memory rows", remapped_rows), ("Xid", xid))


def hardware_evidence(config: Config) -> tuple[list[Evidence], bool]:
    """One sentence each on memory errors, remapped rows and driver errors; and whether one of them accuses a card."""
    evidence, accused = [], False
    for name, status, found in _answers(config):
        evidence.append(Evidence(name, found))
        accused |= status in (CheckStatus.WARN, CheckStatus.FAIL)
    return evidence, accused


def _answers(config: Config) -> Iterator[tuple[str, CheckStatus, str]]:
    context = context_of_config(config)
    for name, ask in _QUESTIONS:
        outcome = ask(context)
        yield name, outcome.status, outcome.found
