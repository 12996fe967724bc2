"""One reading of a run's files: what a window needs of them, and later what was added since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bevctl.runs.collect import Collector
from bevctl.runs.folder import sample
from bevctl.runs.index import find_window, load_index, save_index
from bevctl.runs.lines import LineFile
from bevctl.runs.readers import READERS, Parser, Reader
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.text import Place
from bevctl.runs.records import RunLog
from bevctl.runs.window import Window

_HEAD = 256 * 1024
"""Bytes in which a log says what it is of."""


class FilePart:
    """One file on its way into a parser."""

    def __init__(self, path: Path, reader: Reader, parser: Parser, clock: Clock) -> None:
        self._path = path
        self._reader = reader
        self._parser = parser
        self._clock = clock
        self._file = LineFile(path)
        self._inode = path.stat().st_ino
        self._number = 1
        self._torn = False

    def read(self, window: Window, log: RunLog) -> None:
        """Feeds the head of the file, then the part that the window needs."""
        start, end = self._find(window)
        if start > _HEAD:
            self._feed(0, _HEAD, log, torn=False)
        else:
            start, end = 0, None if end is None else max(end, _HEAD)
        self._feed(start, end, log, torn=end is None)

    @property
    def is_read(self) -> bool:
        """Whether it is the same file, and nothing was added since."""
        status = self._path.stat()
        return (status.st_ino, status.st_size) == (self._inode, self._file.position)

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` would give what reading it all would: it is the same file, no shorter, with no half told."""
        status = self._path.stat()
        same = status.st_ino == self._inode and status.st_size >= self._file.position
        return self._file.seekable and same and not self._torn

    def go_on(self, log: RunLog) -> None:
        """Feeds what was added since."""
        self._feed_lines(self._file.position, None, log, torn=True)

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
        self._number = 1
        self._feed_lines(start, end, log, torn)

    def _feed_lines(self, start: int, end: int | None, log: RunLog, torn: bool) -> None:
        for lines, whole in self._file.blocks(start, end):
            if whole:
                self._parser.feed(lines, self._number)
                self._number += len(lines)
            elif torn:
                self._torn = self._parser.feed_torn(lines[0], self._number)
            log.last_line = next((line for line in reversed(lines) if line.strip()), log.last_line)
        if self._file.damage:
            log.notes.append(self._file.damage)


class Reading:
    """Text files of one run in one format, read into one log."""

    def __init__(self, log: RunLog, window: Window, modified: float) -> None:
        self.log = log
        self._window = window
        self._reader = READERS[log.format]
        self._clock = Clock(modified)
        self._out = Collector(log, window, timed=window.is_open or self._has_times())
        self.parser = self._reader.parser(self._out, self._clock, Place(log.files[0].name))
        self._parts: list[FilePart] = []

    def _has_times(self) -> bool:
        stamp = self._reader.stamp
        if stamp is None:
            return False
        return any(stamp(line, self._clock) is not None for path in self.log.files for line in sample(path))

    def can_go_on(self, files: Sequence[Path]) -> bool:
        """Whether `read` would now take only what was added since."""
        if not self._window.is_open or self.log.time_estimated or files != self.log.files:
            return False
        return self._parts[-1].can_go_on and all(part.is_read for part in self._parts[:-1])

    def read(self, modified: float) -> RunLog:
        """All that the window needs; when it was read before, what was added since. Raises OSError."""
        if self._parts:
            self._out.go_on()
            self._parts[-1].go_on(self.log)
        else:
            for path in self.log.files:
                self._parts.append(FilePart(path, self._reader, self.parser, self._clock))
                self._parts[-1].read(self._window, self.log)
        self.parser.finish()
        return self._out.finish(modified)
