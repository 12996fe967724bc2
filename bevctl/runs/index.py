"""Where in a long log a moment stands: a search over byte offsets, and what it found kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bevctl.files import atomic_write_text
from bevctl.runs.window import Window

_VERSION = 1
_PROBES = 64
"""Evenly spread moments that are looked up first: clock changes between them are seen."""
_NEAR = 256 * 1024
"""Bytes that are read rather than searched."""
_CHUNK = 64 * 1024
_LONGEST_SEARCH = 8 * 1024 * 1024
_MOST_FILES = 300
_HEAD = 256
_TAIL = 64

Stamp = Callable[[str], float | None]
Anchor = tuple[int, float]
"""Byte offset of a line, and its Unix time."""


@dataclass
class LogIndex:
    """What is known of one file: format and anchors, in the order of their offsets."""

    path: Path
    size: int
    mtime_ns: int
    format: str = ""
    anchors: list[Anchor] = field(default_factory=list)
    changed: bool = False

    def add(self, anchor: Anchor) -> None:
        """Keeps an anchor."""
        place = bisect_left(self.anchors, anchor)
        if self.anchors[place : place + 1] != [anchor]:
            self.anchors.insert(place, anchor)
            self.changed = True


def cache_folder() -> Path:
    """Where the platform wants a user's caches, below it bevctl's for logs."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "bevctl" / "logs"


def load_index(path: Path) -> LogIndex:
    """What is known of the file as it is now; an empty index where nothing is, or it was replaced since.

    A file that has only grown keeps its anchors. Raises OSError where the file cannot be looked at.
    """
    status = path.stat()
    index = LogIndex(path.resolve(), status.st_size, status.st_mtime_ns)
    kept = _read_json(_place(index.path))
    if kept.get("version") != _VERSION or kept.get("path") != str(index.path):
        return index
    same = kept.get("size") == index.size and kept.get("mtime_ns") == index.mtime_ns
    if not same and not _has_grown(path, kept, index.size):
        return index
    with contextlib.suppress(KeyError, TypeError, ValueError):
        index.anchors = [(int(offset), float(time)) for offset, time in kept["anchors"]]
        index.format = str(kept["format"])
    index.changed = not same
    return index


def save_index(index: LogIndex) -> None:
    """Keeps what was found. Where the cache cannot be written to, nothing is kept: that only costs time."""
    if not index.changed:
        return
    document = {
        "version": _VERSION,
        "path": str(index.path),
        "size": index.size,
        "mtime_ns": index.mtime_ns,
        "format": index.format,
        "anchors": index.anchors,
    }
    with contextlib.suppress(OSError, RuntimeError, UnicodeEncodeError):
        document["ends"] = _ends(index.path, index.size)
        target = _place(index.path)
        _prune(target.parent)
        atomic_write_text(target, json.dumps(document))


def find_window(index: LogIndex, stamp: Stamp, window: Window) -> tuple[int, int]:
    """Byte offsets, each the beginning of a line or the file's end, between which all lines of `window` stand.

    Times need not rise: the part reaches from the first to the last place where the clock is inside. Only a clock that
    is set and put right again within a sixty-fourth of the file goes unseen.
    """
    if window.is_open or index.size <= _NEAR:
        return 0, index.size
    _spread_probes(index, stamp)
    for earlier, later in list(pairwise(index.anchors)):
        if later[1] < earlier[1]:
            _find_drop(index, stamp, earlier, later)
    if not index.anchors:
        return 0, index.size
    start = 0 if window.since is None else _first(index, stamp, window.since)
    end = index.size if window.until is None else _last(index, stamp, window.until)
    return start, max(start, end)


def _spread_probes(index: LogIndex, stamp: Stamp) -> None:
    step = max(index.size // _PROBES, _NEAR)
    known = [offset for offset, _ in index.anchors]
    for offset in [*range(0, index.size, step), max(0, index.size - _CHUNK)]:
        place = bisect_left(known, offset)
        if place < len(known) and known[place] < offset + step:
            continue
        anchor = _probe(index, stamp, offset)
        if anchor is not None:
            index.add(anchor)


def _find_drop(index: LogIndex, stamp: Stamp, earlier: Anchor, later: Anchor) -> None:
    """Finds the two lines between which the clock was set back."""
    low, high = earlier[0], later[0]
    while high - low > 1:
        middle = (low + high) // 2
        anchor = _probe(index, stamp, middle)
        if anchor is None or anchor[0] >= later[0]:
            high = middle
        elif anchor[1] >= earlier[1]:
            earlier, low = anchor, anchor[0]
        else:
            later, high = anchor, anchor[0]
    index.add(earlier)
    index.add(later)


def _first(index: LogIndex, stamp: Stamp, since: float) -> int:
    """Offset before the first line whose time is `since` or later."""
    anchors = index.anchors
    later = next((place for place, (_, time) in enumerate(anchors) if time >= since), len(anchors))
    if later == 0:
        return 0
    low = anchors[later - 1][0]
    high = anchors[later][0] if later < len(anchors) else index.size
    while high - low > _NEAR:
        anchor = _probe(index, stamp, (low + high) // 2)
        if anchor is None or not low < anchor[0] < high:
            break
        index.add(anchor)
        low, high = (low, anchor[0]) if anchor[1] >= since else (anchor[0], high)
    return low


def _last(index: LogIndex, stamp: Stamp, until: float) -> int:
    """Offset behind the last line whose time is `until` or earlier."""
    anchors = index.anchors
    earlier = next((place for place in range(len(anchors) - 1, -1, -1) if anchors[place][1] <= until), -1)
    low = anchors[earlier][0] if earlier >= 0 else 0
    high = anchors[earlier + 1][0] if earlier + 1 < len(anchors) else index.size
    while high - low > _NEAR:
        anchor = _probe(index, stamp, (low + high) // 2)
        if anchor is None or not low < anchor[0] < high:
            break
        index.add(anchor)
        low, high = (anchor[0], high) if anchor[1] <= until else (low, anchor[0])
    return high


def _probe(index: LogIndex, stamp: Stamp, offset: int) -> Anchor | None:
    """The first line with a time that begins at `offset` or after it, within some megabytes."""
    with index.path.open("rb") as file:
        file.seek(offset)
        if offset:
            offset += len(file.readline(_LONGEST_SEARCH))
        limit = min(index.size, offset + _LONGEST_SEARCH)
        while offset < limit:
            line = file.readline(_LONGEST_SEARCH)
            if not line:
                return None
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            time = stamp(text.rpartition("\r")[2])
            if time is not None:
                return offset, time
            offset += len(line)
    return None


def _place(path: Path) -> Path:
    return cache_folder() / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _has_grown(path: Path, kept: dict[str, Any], size: int) -> bool:
    before = kept.get("size")
    return isinstance(before, int) and 0 < before < size and _ends(path, before) == kept.get("ends")


def _ends(path: Path, size: int) -> str:
    """A fingerprint of the first and the last bytes of a file that has `size` bytes, or had when it was shorter."""
    with path.open("rb") as file:
        head = file.read(min(_HEAD, size))
        file.seek(max(0, size - _TAIL))
        return hashlib.sha256(head + file.read(min(_TAIL, size))).hexdigest()


def _prune(folder: Path) -> None:
    """Drops the indexes that were not used for longest."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_MOST_FILES]:
        file.unlink(missing_ok=True)
