"""Following a run of another project while it trains: its progress by the log readers, its failures by its output."""

from __future__ import annotations

import re
import time
from pathlib import Path

from bevctl.console import Console
from bevctl.errors import BevctlError
from bevctl.runs.readers.events import FAILURE, FailureScanner, settle
from bevctl.runs.records import EventRecord, RunLog
from bevctl.runs.source import Source, open_source

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_S = 60.0
"""Time between two lines of progress."""
LOOK_S = 5.0
"""Time between two looks at the log."""


class Follower:
    """Watches one start of a run."""

    def __init__(self, work_dir: Path, console: Console) -> None:
        self._work_dir = work_dir
        self._console = console
        self._scanner = FailureScanner()
        self._failures: list[EventRecord] = []
        self._source: Source | None = None
        self._looked = 0.0
        self._said = 0.0
        self._since = time.time()
        self.trained = False
        """Whether it has written a training record."""

    def line(self, line: str) -> None:
        """A line of its output: shown without its colours, and searched for failures."""
        line = _ESCAPE.sub("", line)
        if line.strip():
            self._console.info(line)
        _, found = self._scanner.scan(line)
        if found is not None:
            self._failures.append(EventRecord(FAILURE, found.message, None, data=dict(found.data)))

    def tick(self) -> None:
        """Says now and then how far the run is."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        log = self.look()
        if log is not None and self.trained and now - self._said >= PROGRESS_S:
            self._said = now
            self._console.info(f"bevctl: {progress(log)}")

    def look(self) -> RunLog | None:
        """The log as it is now; None where there is none yet."""
        try:
            self._source = self._source or open_source(self._work_dir)
            log = self._source.read()
        except BevctlError:
            self._source = None
            return None
        modified = log.modified or 0.0
        last = log.steps[-1].time if log.steps else None
        self.trained |= bool(log.steps) and (last if last is not None else modified) >= self._since - 1.0
        return log

    def failure(self) -> EventRecord | None:
        """What the run died of, the first cause of all that its output tells."""
        settle(self._failures)
        return next((event for event in self._failures if event.data.get("role") == "cause"), None)


def progress(log: RunLog) -> str:
    """How far a run is, in one line."""
    last = log.steps[-1]
    total = log.max_iters or (log.max_epochs or 0) * (log.iters_per_epoch or 0)
    parts = [f"epoch {last.epoch}{f' of {log.max_epochs}' if log.max_epochs else ''}"]
    parts.append(f"iteration {last.iter}{f' of {total}' if total else ''}")
    parts += [f"loss {last.loss:.4g}"] if last.loss is not None else []
    left = last.eta_s
    if left is None and total and last.iter_time_s is not None:
        left = max(total - last.iter, 0) * last.iter_time_s
    if left is not None:
        hours, minutes = divmod(round(left / 60), 60)
        parts.append(f"{hours} h {minutes:02d} min left")
    return ", ".join(parts)
