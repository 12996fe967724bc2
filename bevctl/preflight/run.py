"""Runs the checks one after the other, each with a limit on its time, and sums up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from bevctl.errors import BevctlError, ExitCode, did_you_mean
from bevctl.finding import Check, CheckStatus
from bevctl.preflight.checks import CheckSpec, Context, Outcome, skipped, unknown

_WORST_FIRST = (CheckStatus.FAIL, CheckStatus.UNKNOWN, CheckStatus.WARN)


@dataclass(frozen=True)
class Report:
    """The outcome of all checks."""

    checks: tuple[Check, ...]

    @property
    def status(self) -> CheckStatus:
        """The worst: fail, then unknown (advisory ones aside), then warn; else pass."""
        counting = {check.status for check in self.checks if not _is_idle(check)}
        return next((status for status in _WORST_FIRST if status in counting), CheckStatus.PASS)

    def decides(self, check: Check) -> bool:
        """Whether the status, not being a pass, is what it is because of this check."""
        return check.status == self.status != CheckStatus.PASS and not _is_idle(check)

    def exit_code(self, fail_on: str) -> ExitCode:
        """0, 1 or 3; a warning alone counts as a finding when `fail_on` is "warn"."""
        if self.status == CheckStatus.FAIL or (self.status == CheckStatus.WARN and fail_on == "warn"):
            return ExitCode.FINDINGS
        return ExitCode.UNKNOWN if self.status == CheckStatus.UNKNOWN else ExitCode.OK


def _is_idle(check: Check) -> bool:
    return check.advisory and check.status == CheckStatus.UNKNOWN


@dataclass(frozen=True)
class Selection:
    """Which checks to run: ids or names of sections, in any case; empty `only` means all."""

    only: Collection[str] = ()
    skip: Collection[str] = ()
    at_start: bool = False
    """Only those quick enough for the start of a run."""

    def validate(self, table: Mapping[str, tuple[CheckSpec, ...]]) -> None:
        """Raises BevctlError for a word that is neither an id nor a section."""
        known = {*table, *(spec.id for specs in table.values() for spec in specs)}
        for word in (*self.only, *self.skip):
            if word.upper() not in known and word.lower() not in known:
                raise BevctlError(f"No check {word!r}.", did_you_mean(word.upper(), known))

    def reason_to_skip(self, spec: CheckSpec, section: str, deep: bool) -> str:
        """Why this check is not run; empty: it is."""
        if self.only and not _named(spec, section, self.only):
            return "not among those of --only"
        if _named(spec, section, self.skip):
            return "left out with --skip"
        if spec.deep and not deep:
            return "only with --deep"
        if self.at_start and not spec.at_start:
            return "not at the start of a run"
        return ""


def _named(spec: CheckSpec, section: str, words: Collection[str]) -> bool:
    return any(word.upper() == spec.id or word.lower() == section for word in words)


def run_checks(
    table: Mapping[str, tuple[CheckSpec, ...]],
    context: Context,
    selection: Selection,
    announce: Callable[[CheckSpec], None] = lambda _: None,
) -> Report:
    """Run the selected checks of `table`; the others are listed as skipped. Nothing a check does gets out of here."""
    checks = []
    for section, specs in table.items():
        for spec in specs:
            announce(spec)
            reason = selection.reason_to_skip(spec, section, context.deep)
            outcome = skipped(reason) if reason else run_one(spec, context)
            checks.append(spec.check(section, outcome))
    return Report(tuple(checks))


def run_one(spec: CheckSpec, context: Context) -> Outcome:
    """What the check found, or unknown with the reason when it raised or took too long.

    It runs in a daemon thread, which cannot keep the process from ending however long it hangs.
    """
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_guarded(spec, context)), name=spec.id, daemon=True)
    thread.start()
    thread.join(context.timeout)
    if outcomes:
        return outcomes[0]
    return unknown(f"no answer within {context.timeout:g} s", "Give it longer with --timeout, or leave it out.")


def _guarded(spec: CheckSpec, context: Context) -> Outcome:
    try:
        return spec.function(context)
    except Exception as error:  # whatever goes wrong inside a check is a result, not the end of preflight
        return unknown(f"the check itself failed: {sentence(error)}")


def sentence(error: Exception) -> str:
    """An exception in one line."""
    text = error.message if isinstance(error, BevctlError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
