"""A report as lines of plain text, which neither wrap nor cut the commands they give."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bevctl.finding import Check, CheckStatus
from bevctl.preflight.run import Report

if TYPE_CHECKING:
    from bevctl.preflight.reap import Ended

_MARKS = {
    CheckStatus.PASS: "ok",
    CheckStatus.WARN: "WARN",
    CheckStatus.FAIL: "FAIL",
    CheckStatus.SKIP: "-",
    CheckStatus.UNKNOWN: "?",
}
_WORDS = {
    CheckStatus.FAIL: "failed",
    CheckStatus.UNKNOWN: "unknown",
    CheckStatus.WARN: "with a warning",
    CheckStatus.PASS: "passed",
    CheckStatus.SKIP: "skipped",
}
_INDENT = 17


def report_lines(report: Report) -> Iterator[str]:
    """Each check below its section, what is wrong with its requirement, reason and fix; the verdict last.

    Neighbours that were skipped for one reason share a line.
    """
    width = max((len(check.name) for check in report.checks), default=0)
    id_width = max((len(check.id) for check in report.checks), default=0)
    section = ""
    for (name, skipped_because, _), group in itertools.groupby(report.checks, _line_of):
        checks = list(group)
        if name != section:
            section = name
            yield section
        first = checks[0]
        if skipped_because and len(checks) > 1:
            yield f"  {_MARKS[first.status]:<5} {first.id} to {checks[-1].id}: {skipped_because}"
            continue
        yield f"  {_MARKS[first.status]:<5} {first.id:<{id_width}}  {first.name:<{width}}  {first.found}"
        if first.status in (CheckStatus.WARN, CheckStatus.FAIL) or report.decides(first):
            yield from _explanation(first)
    yield summary(report)


def _line_of(check: Check) -> tuple[str, str, str]:
    """What checks on one line have in common: the section and the reason to be skipped, else the check itself."""
    if check.status == CheckStatus.SKIP:
        return check.section, check.found, ""
    return check.section, "", check.id


def _explanation(check: Check) -> Iterator[str]:
    for label, text in (("needed", check.required), ("why", check.why), ("fix", check.fix)):
        if text:
            yield f"{'':<{_INDENT}}{label:<7} {text}"


def summary(report: Report) -> str:
    """One line: the verdict and how many checks ended how, with the ids of those that decide it."""
    counts = Counter(check.status for check in report.checks)
    parts = [f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status]]
    deciding = [check.id for check in report.checks if report.decides(check)]
    named = f" ({', '.join(deciding)}; `bevctl explain {deciding[0]}` says more)" if deciding else ""
    return f"{report.status.value.upper()}: {', '.join(parts)}{named}"


def ended_line(ended: Ended) -> str:
    """What became of one process that was ended."""
    if not ended.gone:
        return f"pid {ended.pid} survives SIGKILL: it hangs inside the driver; only a reboot or a GPU reset helps."
    freed = [f"GPU {gpu}: {size / 2**30:.2f} GiB" for gpu, size in ended.released.items() if size is not None]
    return f"pid {ended.pid} ended by {ended.signal}; came free: {', '.join(freed) or 'not reported'}"
