"""A run followed as it goes: redrawn in place on a terminal, elsewhere a line or a JSON document for what is new."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rich.console import RenderableType

from bevctl.console import Console
from bevctl.finding import Severity
from bevctl.monitor.report import Report
from bevctl.monitor.screen import one_line

INTERVAL_S = 2.0
ENDS = ("finished", "died")
"""States in which there is nothing more to follow."""
Look = Callable[[], Sequence[Report]]


class Follower:
    """Looks at runs every `interval_s` seconds until all are over, or until Ctrl-C.

    Args:
        draw: makes the picture of the reports for a terminal of so many columns and lines.
        tell: is called with the reports of each look, such as to notify somebody.
    """

    def __init__(
        self,
        console: Console,
        look: Look,
        draw: Callable[[Sequence[Report], int, int], RenderableType],
        document: Callable[[Sequence[Report]], None],
        tell: Callable[[Sequence[Report]], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._console = console
        self._look = look
        self._draw = draw
        self._document = document
        self._tell = tell
        self._interval_s = interval_s
        self._pause = threading.Event()

    def run(self) -> Sequence[Report]:
        """Follows, and returns the last reports."""
        if self._console.json:
            return self._follow(OnChange(self._document).show)
        if not self._console.can_redraw:
            return self._follow(Lines(self._console).show)
        with self._console.redrawn() as screen:
            return self._follow(lambda reports: screen.show(self._draw(reports, *screen.size)))

    def _follow(self, show: Callable[[Sequence[Report]], None]) -> Sequence[Report]:
        reports = self._look()
        try:
            while True:
                show(reports)
                self._tell(reports)
                if all(report.state.name in ENDS for report in reports):
                    return reports
                self._pause.wait(self._interval_s)
                reports = self._look()
        except KeyboardInterrupt:
            return reports


class OnChange:
    """Shows reports only when something in them is new."""

    def __init__(self, show: Callable[[Sequence[Report]], None]) -> None:
        self._show = show
        self._seen: object = None

    def show(self, reports: Sequence[Report]) -> None:
        """Passes the reports on if they differ from those before."""
        now = [(_position(report), [alarm.id for alarm in report.alarms]) for report in reports]
        if now != self._seen:
            self._seen = now
            self._show(reports)


def _position(report: Report) -> tuple[object, ...]:
    return report.progress.iter, report.state.name, len(report.log.validations), report.log.records


class Lines:
    """Prints a run's line when it has new records or another state, and each new alarm."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, object] = {}
        self._alarms: set[tuple[str, str]] = set()

    def show(self, reports: Sequence[Report]) -> None:
        """Prints what is new since the last call."""
        for report in reports:
            run = str(report.log.path)
            now = _position(report)
            if self._seen.get(run) != now:
                self._seen[run] = now
                self._console.result(one_line(report))
            for alarm in report.alarms:
                if (run, alarm.id) not in self._alarms and alarm.severity is not Severity.INFO:
                    self._alarms.add((run, alarm.id))
                    self._console.result(f"{report.name}: {alarm.severity.value} {alarm.id}: {alarm.title}")
