"""The quick checks at the start of `bevctl train`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from bevctl.config.schema import Config
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode
from bevctl.finding import Check, CheckStatus
from bevctl.preflight.checks import Context, all_checks
from bevctl.preflight.request import context_of_config
from bevctl.preflight.run import Selection, run_checks
from bevctl.preflight.text import summary

TIMEOUT_S = 10.0
"""What hangs for longer is left to the run to find out."""


def check_start(config: Config, gpus: int | None, resume: str | None, console: Console) -> None:
    """Run the quick checks; say on stderr what they find, or in one line that they found nothing.

    Raises BevctlError (exit code 1) when one of them fails.
    """
    # A launcher has opened the meeting point already, on the port that LAUNCH001 would want free.
    launched = ("LAUNCH001",) if "RANK" in os.environ else ()
    check_context(context_of_config(config, gpus=gpus, resume=resume, timeout=TIMEOUT_S), console, skip=launched)


def check_context(context: Context, console: Console, skip: Collection[str] = ()) -> None:
    """The same for any context; `skip` are ids of checks to leave out."""
    report = run_checks(all_checks(), context, Selection(skip=skip, at_start=True))
    failed = [check for check in report.checks if check.status == CheckStatus.FAIL]
    for check in report.checks:
        if check.status == CheckStatus.WARN or check in failed[1:]:
            console.warn(f"{check.id} {check.name}: {check.found}. {check.fix}")
    if failed:
        raise _stopped(failed[0])
    if report.status != CheckStatus.WARN:
        console.info(f"Preflight {summary(report)}")


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: it was not started by another `bevctl train`, nor as a later rank."""
    from bevctl.engine.launch import OUTCOME_DIR

    return OUTCOME_DIR not in environ and environ.get("RANK", "0") == "0"


def _stopped(check: Check) -> BevctlError:
    return BevctlError(
        f"Preflight stopped the run: {check.id} {check.name}: {check.found}.",
        f"{check.fix} --no-preflight starts anyway.".strip(),
        ExitCode.FINDINGS,
    )
