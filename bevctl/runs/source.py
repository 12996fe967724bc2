"""Where a run's records come from: one log file, or a folder with the files of one run."""

from __future__ import annotations

import math
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.garbage import no_collection
from bevctl.runs.collect import Collector
from bevctl.runs.folder import OWN_EVENTS, OWN_LOG, OWN_RECORD, TENSORBOARD, Logs, candidates, detect_file, find_logs
from bevctl.runs.lines import LineFile
from bevctl.runs.own import read_launch, read_own_header
from bevctl.runs.readers import READERS
from bevctl.runs.readers.bevctl_jsonl import BevctlLines
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.events import FAILURE, settle
from bevctl.runs.readers.tensorboard import EventFiles
from bevctl.runs.reading import Reading
from bevctl.runs.records import RunLog
from bevctl.runs.window import Window

_TAIL = 256 * 1024


class Source:
    """A run's files, and how they are read. `read` may be called again and again as they grow.

    A second call for the whole run reads only what was added, and gives the first call's RunLog with it.

    Attributes:
        path: what the user named.
        files: the files that are read, in the order in which they were written.
        format: a key of READERS, or `tensorboard`.
    """

    def __init__(self, path: Path, logs: Logs) -> None:
        self.path = path
        self.files = logs.files
        self.format = logs.format
        self._captures = logs.captures
        self._readings: dict[Path, Reading] = {}
        self._names: list[Path] = []

    def read(self, since: float | None = None, until: float | None = None) -> RunLog:
        """The run between two Unix times; of a long log only that part is read, and its beginning for the header.

        Raises:
            BevctlError: a file cannot be read.
        """
        try:
            with no_collection():
                return self._read(Window(since, until))
        except OSError as error:
            self._readings.clear()
            raise _unreadable(self.path, error) from error

    def last_time(self) -> float | None:
        """Unix time of the last line that has one; the newest file's mtime for a log without times.

        Raises:
            BevctlError: a file cannot be read.
        """
        try:
            modified = self._modified()
            reader = READERS.get(self.format)
            if reader is None or reader.stamp is None:
                return modified
            clock = Clock(modified)
            for path in reversed(self.files):
                file = LineFile(path)
                start = max(0, path.stat().st_size - _TAIL) if file.seekable else 0
                lines = [line for block, _ in file.blocks(start) for line in block]
                times = (reader.stamp(line, clock) for line in reversed(lines))
                last = next((time for time in times if time is not None), None)
                if last is not None:
                    return last
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return modified

    def _modified(self) -> float:
        return max(path.stat().st_mtime for path in self.files)

    def _read(self, window: Window) -> RunLog:
        self._find_new_files()
        modified = self._modified()
        read = self._read_events if self.format == TENSORBOARD else self._read_lines
        log = read(window, modified)
        for path in self._captures:
            self._add_failures(path, log, window)
        settle(log.events)
        read_launch(self.path, log)
        return log

    def _find_new_files(self) -> None:
        """A run that was resumed may have begun another file in its folder."""
        if not self.path.is_dir() or self.format == "bevctl":
            return
        names, self._names = self._names, sorted(candidates(self.path))
        if names and names != self._names and (logs := find_logs(self.path)) is not None:
            self.format, self.files, self._captures = logs.format, logs.files, logs.captures

    def _read_events(self, window: Window, modified: float) -> RunLog:
        out = Collector(RunLog(self.path, self.files, self.format), window)
        files = EventFiles(out)
        for path in self.files:
            files.read(path)
        return out.finish(modified)

    def _read_lines(self, window: Window, modified: float) -> RunLog:
        reading = self._reading(self.path, self.files, self.format, window, modified)
        self._read_beside(reading)
        return reading.read(modified)

    def _reading(self, path: Path, files: list[Path], name: str, window: Window, modified: float) -> Reading:
        """That of the last call where it can go on, else a new one."""
        known = self._readings.get(path)
        if known is None or not window.is_open or not known.can_go_on(files):
            self._readings[path] = known = Reading(RunLog(path, files, name), window, modified)
        return known

    def _read_beside(self, reading: Reading) -> None:
        """Adds what lies beside bevctl's own log."""
        folder, parser = self.files[0].parent, reading.parser
        if isinstance(parser, BevctlLines) and self.files[0].name == OWN_LOG:
            read_own_header(folder, reading.log)
            events = folder / OWN_EVENTS
            if events.is_file():
                blocks = LineFile(events).blocks()
                parser.queue([line for block, whole in blocks if whole for line in block], events.name)

    def _add_failures(self, path: Path, log: RunLog, window: Window) -> None:
        """Takes the failures out of what a shell captured; the records there are in the logger's own file."""
        name = detect_file(path)
        if name == TENSORBOARD:
            return
        modified = path.stat().st_mtime
        captured = self._reading(path, [path], name, window, modified).read(modified)
        known = {event.message for event in log.events}
        failures = [event for event in captured.events if event.kind == FAILURE and event.message not in known]
        if failures:
            log.events = sorted(log.events + failures, key=lambda event: math.inf if event.time is None else event.time)


def open_source(path: str | Path) -> Source:
    """The run that a path names: a log file in any format of READERS, gzip-compressed or not, or a run's folder.

    Raises:
        BevctlError: there is nothing, nothing readable, or no log in the folder.
    """
    path = Path(path)
    try:
        logs = _logs(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from error
    if logs is None:
        raise BevctlError(f"No log is in {path}.", "Name a log file, or the folder that a training wrote its log to.")
    return Source(path, logs)


def _logs(path: Path) -> Logs | None:
    if path.is_dir():
        return find_logs(path)
    if not path.is_file():
        path.stat()
        raise BevctlError(f"{path} is neither a file nor a folder.", "Name a log file or a run's folder.")
    if path.name in (OWN_LOG, OWN_EVENTS) and (path.parent / OWN_LOG).is_file():
        return find_logs(path.parent)
    return Logs(detect_file(path), [path], [])


def newest_run(folder: str | Path = "runs") -> Path | None:
    """The folder below `folder` in which bevctl wrote to a run last; None where there is none.

    A run that another project's program trains has that program's log, and `run.json` from bevctl.
    """
    found: list[tuple[float, Path]] = []
    for name in (OWN_LOG, OWN_RECORD):
        for file in Path(folder).glob(f"**/{name}"):
            if file.is_file():
                found.append((file.stat().st_mtime, file.parent))
    return max(found)[1] if found else None


def _unreadable(path: Path, error: Exception) -> BevctlError:
    reason = getattr(error, "strerror", None) or str(error)
    return BevctlError(f"{path} cannot be read: {reason}.", "Name a log file or the folder of a run.")
