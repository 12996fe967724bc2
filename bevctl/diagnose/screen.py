"""A diagnosis on the screen: what went wrong, what shows it, why, and what cures it at what cost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from bevctl.console import printable, table
from bevctl.diagnose.report import OUTCOMES, DiagnoseFinding, Diagnosis, Remedy, Status, Table
from bevctl.finding import Severity

_COLOURS = {Severity.FAIL: "bold red", Severity.WARN: "yellow", Severity.INFO: "cyan"}
_ANSWERS = {
    Status.FOUND: ("FOUND", "bold red", ""),
    Status.CLEAR: ("CLEAR", "green", "nothing harmful was found"),
    Status.INCONCLUSIVE: ("INCONCLUSIVE", "yellow", "what is here does not decide it"),
}
_LONGEST_CELL = 40
_LABEL = 10
"""Columns of the words before each paragraph."""


def picture(topic: str, diagnosis: Diagnosis, width: int) -> RenderableType:
    """The whole answer, in `width` columns."""
    parts: list[RenderableType] = [_head(topic, diagnosis)]
    parts += [Text(printable(_paragraph("looked at", sentence, width))) for sentence in diagnosis.looked_at]
    for finding in diagnosis.findings:
        parts += [Text(), *_finding(finding, width)]
    for numbers in diagnosis.tables:
        parts += [Text(), _table(numbers)]
    return Group(*parts)


def _head(topic: str, diagnosis: Diagnosis) -> Text:
    word, style, meaning = _ANSWERS[diagnosis.status]
    text = Text(word, style=style)
    text.append(f"  {topic}: {printable(diagnosis.verdict() or meaning)}", style="")
    return text


def _finding(finding: DiagnoseFinding, width: int) -> Iterator[RenderableType]:
    title = Text(f"{finding.severity.value} {finding.id}", style=_COLOURS[finding.severity])
    title.append(f"  {printable(finding.title)}", style="bold")
    title.append(f"  ({_sure(finding.confidence)})", style="dim")
    yield title
    for evidence in finding.evidence:
        yield Text(printable(_paragraph("evidence", f"{evidence.where}: {evidence.what}", width)))
    if finding.cause:
        yield Text(printable(_paragraph("cause", finding.cause, width)))
    for remedy in finding.fix:
        yield Text(printable(_paragraph("remedy", _remedy(remedy), width)))


def _sure(confidence: float) -> str:
    return f"{confidence:.0%}\u00a0sure"


def _remedy(remedy: Remedy) -> str:
    settings = ", ".join(f"{key}={_value(value)}" for key, value in remedy.set.items())
    cost = [
        f"{name} x {factor:.2f}" for name, factor in (("time", remedy.step_time), ("memory", remedy.memory)) if factor
    ]
    # What is not a setting cannot be tried; nothing is said of it then.
    outcome = [OUTCOMES[remedy.verified]] if remedy.set or remedy.verified is not None else []
    since = {"auto": [], "": ["from the start on"]}.get(remedy.resume, [f"from {remedy.resume} on"])
    notes = f" ({', '.join([*outcome, *since, *cost])})" if outcome else ""
    return f"{settings + ' -- ' if settings else ''}{remedy.why}{notes}"


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _paragraph(label: str, text: str, width: int) -> str:
    indent = " " * (_LABEL + 2)
    return textwrap.fill(
        text,
        width=max(width, 40),
        initial_indent=f"  {label:<{_LABEL}}",
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _table(numbers: Table) -> RenderableType:
    rows = [[_cell(value, name) for name, value in zip(numbers.columns, row, strict=True)] for row in numbers.rows]
    return table(list(numbers.columns), rows, numbers.title)


def _cell(value: object, column: str) -> object:
    if value is None:
        return ""
    if isinstance(value, float) and column == "share":
        return f"{value:.1%}"
    if isinstance(value, str) and len(value) > _LONGEST_CELL:
        return f"..{value[2 - _LONGEST_CELL :]}"  # of a dotted name the end tells more
    return f"{value:.5g}" if isinstance(value, float) else value
