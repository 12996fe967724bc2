"""Where a run's records come from: one log file, or a folder with the files of one run.

source = open_source("work_dirs/run")
log = source.read(since=time.time() - 3600)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.runs.collect import Collector
from bevctl.runs.folder import OWN_EVENTS, OWN_LOG, TENSORBOARD, Logs, detect_file, find_logs
from bevctl.runs.index import find_window, load_index, save_index
from bevctl.runs.lines import LineFile
from bevctl.runs.own import read_own_header
from bevctl.runs.readers import READERS, Parser, Reader
from bevctl.runs.readers.bevctl_jsonl import BevctlLines
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.events import FAILURE, settle
from bevctl.runs.readers.tensorboard import EventFiles
from bevctl.runs.readers.text import Place
from bevctl.runs.records import RunLog
from bevctl.runs.window import Window

_HEAD = 256 * 1024
"""Bytes in which a log says what it is of."""
_TAIL = 256 * 1024


class Source:
    """A run's files, and how they are read. `read` may be called again and again as they grow.

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

    def read(self, since: float | None = None, until: float | None = None) -> RunLog:
        """The run between two Unix times; of a long log only that part is read, and its beginning for the header.

        Raises:
            BevctlError: a file cannot be read.
        """
        log = RunLog(self.path, self.files, self.format)
        try:
            with _without_garbage_collection():
                return self._read(log, Window(since, until))
        except OSError as error:
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

    def _read(self, log: RunLog, window: Window) -> RunLog:
        modified = self._modified()
        if self.format == TENSORBOARD:
            out = Collector(log, window)
            files = EventFiles(out)
            for path in self.files:
                files.read(path)
        else:
            reader = READERS[self.format]
            out = Collector(log, window, timed=reader.stamp is not None)
            clock = Clock(modified)
            parser = reader.parser(out, clock, Place(self.files[0].name))
            self._prepare(log, parser)
            for path in self.files:
                _FilePart(path, reader, parser, clock).read(window, log)
            parser.finish()
        out.finish(modified)
        for path in self._captures:
            self._add_failures(path, log, window)
        settle(log.events)
        return log

    def _prepare(self, log: RunLog, parser: Parser) -> None:
        """Adds what lies beside bevctl's own log."""
        folder = self.files[0].parent
        if isinstance(parser, BevctlLines) and self.files[0].name == OWN_LOG:
            read_own_header(folder, log)
            events = folder / OWN_EVENTS
            if events.is_file():
                parser.queue([line for block, _ in LineFile(events).blocks() for line in block], events.name)

    def _add_failures(self, path: Path, log: RunLog, window: Window) -> None:
        """Takes the failures out of what a shell captured; the records there are in the logger's own file."""
        name = detect_file(path)
        if name == TENSORBOARD:
            return
        scratch = RunLog(path, [path], name)
        modified = path.stat().st_mtime
        out = Collector(scratch, window, timed=READERS[name].stamp is not None)
        clock = Clock(modified)
        parser = READERS[name].parser(out, clock, Place(path.name))
        _FilePart(path, READERS[name], parser, clock).read(window, scratch)
        parser.finish()
        out.finish(modified)
        known = {event.message for event in log.events}
        log.events += [event for event in scratch.events if event.kind == FAILURE and event.message not in known]


class _FilePart:
    """One file on its way into a parser."""

    def __init__(self, path: Path, reader: Reader, parser: Parser, clock: Clock) -> None:
        self._path = path
        self._reader = reader
        self._parser = parser
        self._clock = clock
        self._file = LineFile(path)

    def read(self, window: Window, log: RunLog) -> None:
        """Feeds the head of the file, then the part that the window needs."""
        start, end = self._find(window)
        if start > _HEAD:
            self._feed(0, _HEAD, log, torn=False)
        else:
            start, end = 0, None if end is None else max(end, _HEAD)
        self._feed(start, end, log, torn=end is None)
        if self._file.damage:
            log.notes.append(self._file.damage)

    def _find(self, window: Window) -> tuple[int, int | None]:
        stamp = self._reader.stamp
        if stamp is None or window.is_open or not self._file.seekable:
            return 0, None
        index = load_index(self._path)
        start, end = find_window(index, lambda line: stamp(line, self._clock), window)
        save_index(index)
        return start, None if end >= index.size else end

    def _feed(self, start: int, end: int | None, log: RunLog, torn: bool) -> None:
        self._parser.jump(Place(self._path.name, start))
        number = 1
        for lines, whole in self._file.blocks(start, end):
            if whole:
                self._parser.feed(lines, number)
            elif torn:
                self._parser.feed_torn(lines[0], number)
            number += len(lines)
            log.last_line = next((line for line in reversed(lines) if line.strip()), log.last_line)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Reading makes very many objects and no cycles, which the collector would look for again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    """The folder below `folder` with bevctl's own log that was written to last; None where there is none."""
    found: list[tuple[float, Path]] = []
    for log in Path(folder).glob(f"**/{OWN_LOG}"):
        if log.is_file():
            found.append((log.stat().st_mtime, log.parent))
    return max(found)[1] if found else None


def _unreadable(path: Path, error: Exception) -> BevctlError:
    reason = getattr(error, "strerror", None) or str(error)
    return BevctlError(f"{path} cannot be read: {reason}.", "Name a log file or the folder of a run.")
