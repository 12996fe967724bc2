"""Looking at a run again and again: what is asked, and each look's report."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bevctl.config.span import Span
from bevctl.monitor.gpus import Gpu, live_gpus
from bevctl.monitor.report import Circumstances, Report, report_on
from bevctl.monitor.state import DAY_S
from bevctl.runs.records import RunLog
from bevctl.runs.source import Source, open_source
from bevctl.runs.window import parse_moment


@dataclass(frozen=True)
class Question:
    """What is asked of a run."""

    since: str | None = None
    """A duration such as 1h, or a time."""
    until: str | None = None
    from_end: bool = False
    """Durations count back from the last line, not from now."""
    expect: Mapping[str, Span] = field(default_factory=dict)
    against: RunLog | None = None


class Watch:
    """One run, looked at as often as wanted."""

    def __init__(self, path: str | Path, question: Question) -> None:
        """Finds the run's files. Raises BevctlError where there is no log."""
        self.source = open_source(path)
        self.question = question
        self._sizes: tuple[int, ...] | None = None
        self._grew = False

    def look(self, now: float | None = None) -> Report:
        """Reads what is asked of the run, and judges it. Raises BevctlError for a log that cannot be read."""
        now = time.time() if now is None else now
        since, until = self._window(now)
        self._note_growth()
        log = self.source.read(since, until)
        moment = Circumstances(
            now=now,
            grew=self._grew,
            expect=self.question.expect,
            against=self.question.against,
            gpus=self._gpus(log),
            since=since,
            until=until,
            recent=self._recent(log, since, until),
        )
        return report_on(log, moment)

    def _window(self, now: float) -> tuple[float | None, float | None]:
        asked = self.question
        if asked.since is None and asked.until is None:
            return None, None
        end = self.source.last_time() if asked.from_end else now
        reference = now if end is None else end
        since, until = (None if text is None else parse_moment(text, reference) for text in (asked.since, asked.until))
        return since, until

    def _recent(self, log: RunLog, since: float | None, until: float | None) -> RunLog | None:
        """The last day of the run, where the window asked for holds nothing of it."""
        end = self.source.last_time() if until is None else until
        if log.steps or end is None or (since is None and until is None):
            return None
        return self.source.read(end - DAY_S, until)

    def _note_growth(self) -> None:
        sizes = tuple(path.stat().st_size for path in self.source.files if path.exists())
        self._grew = self._grew or (self._sizes is not None and sizes != self._sizes)
        self._sizes = sizes

    def _gpus(self, log: RunLog) -> tuple[Gpu, ...]:
        """This machine's GPUs, unless the run says that it is on another one."""
        host = (log.header.get("meta") or {}).get("host") if self.source.format == "bevctl" else None
        return live_gpus() if host in (None, socket.gethostname()) else ()


def read_against(path: str | Path) -> RunLog:
    """The whole run that another is compared with."""
    source: Source = open_source(path)
    return source.read()
