"""What each rank of a run is at: one small file a rank, `ranks/<rank>.json`, which the rank writes and anyone reads.

Only rank 0 writes records; when ranks wait for each other, these files tell which one they wait for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bevctl.runs.layout import is_count, is_moment
from bevctl.runs.readers.json_lines import decode_object
from bevctl.runs.records import Beat, Doing

FOLDER = "ranks"
_LENGTH = 512
"""Bytes of a file: a host's name has at most 255."""
_READS, _BETWEEN_READS_S = 3, 0.01


class Heartbeat:
    """Keeps the file of one rank from a start to its end, as a context manager.

    A beat overwrites the file where it is, in one call of microseconds: without fsync, as pages that were written
    survive the process that is killed and only a machine that fails loses them; without a rename, as whoever reads half
    a beat reads again. Where the file cannot be written, training goes on without it.

    Args:
        started: see `Beat.started`.
        warn: told once, in a sentence, that the file cannot be written.
    """

    def __init__(self, work_dir: Path, rank: int, started: float, warn: Callable[[str], None]) -> None:
        self._path = work_dir / FOLDER / f"{rank}.json"
        self._identity = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "started": started}
        self._warn = warn
        self._turn = self._iteration = 0
        self._file: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A process of an earlier start that still lives keeps a file that nobody sees any more.
            self._path.unlink(missing_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError as error:
            self._give_up(error)
        self.turn_to(Doing.STARTS, 0)

    def turn_to(self, doing: Doing, iteration: int) -> None:
        """Notes what the rank does from now on; see `Beat.iteration`."""
        if self._file is None:
            return
        self._turn, self._iteration = self._turn + 1, iteration
        beat = {**self._identity, "turn": self._turn, "iteration": iteration, "doing": doing.value, "time": time.time()}
        try:
            os.pwrite(self._file, json.dumps(beat).encode().ljust(_LENGTH, b"\n"), 0)
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.turn_to(Doing.LEFT, self._iteration)
        self._close()

    def _give_up(self, error: OSError) -> None:
        self._close()
        with contextlib.suppress(OSError):  # what keeps the warning may lie on the same full disk
            self._warn(
                f"{self._path} cannot be written ({error.strerror or error}): nobody sees where this rank stands"
            )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def read_beats(work_dir: Path, run: Mapping[str, Any]) -> list[Beat]:
    """The last words of the ranks of a run's present start, by rank.

    Files of an earlier start, of ranks that it does not have, and that hold no beat are passed over.

    Args:
        run: the document run.json of this folder.
    """
    segments = run.get("segments")
    last = segments[-1] if isinstance(segments, list) and segments else None
    started, world = (last.get("started"), last.get("world")) if isinstance(last, dict) else (None, None)
    if not is_moment(started) or not is_count(world):
        return []
    try:
        files = [path for path in (work_dir / FOLDER).iterdir() if path.suffix == ".json" and path.is_file()]
    except OSError:
        return []
    named = ((path.stem, _read(path)) for path in files)
    beats = [beat for name, beat in named if beat is not None and name == str(beat.rank)]
    return sorted((b for b in beats if b.started == started and b.rank < world), key=lambda beat: beat.rank)


def _read(path: Path) -> Beat | None:
    for attempt in range(_READS):
        if attempt:
            time.sleep(_BETWEEN_READS_S)
        try:
            with path.open("rb") as file:
                line = file.read(_LENGTH).decode("utf-8", "replace")
        except OSError:
            return None
        item = decode_object(line)
        if item is not None:
            return _beat(item)
    return None


def _beat(item: dict[str, Any]) -> Beat | None:
    """The beat of a file that a stranger may have written; None where it is none."""
    counts = [item.get(name) for name in ("rank", "pid", "turn", "iteration")]
    host, started, moment = item.get("host"), item.get("started"), item.get("time")
    if not all(map(is_count, counts)) or not isinstance(host, str) or not is_moment(started) or not is_moment(moment):
        return None
    try:
        doing = Doing(item.get("doing"))
    except ValueError:
        return None
    return Beat(item["rank"], host, item["pid"], started, item["turn"], item["iteration"], doing, moment)
