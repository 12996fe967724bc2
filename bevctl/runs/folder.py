"""The log files of one run's folder: its own of bevctl, or what mmcv, mmengine and OpenPCDet leave there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bevctl.runs.lines import LineFile
from bevctl.runs.readers import detect
from bevctl.runs.readers.tensorboard import is_event_file

OWN_LOG = "log.jsonl"
OWN_EVENTS = "events.jsonl"
OWN_RECORD = "run.json"
TENSORBOARD = "tensorboard"
_PREFERRED = ("bevctl", "mmcv-text", "mmengine-text", "openpcdet", "mmcv-json", "mmengine-json", TENSORBOARD, "generic")
_NAME = re.compile(r"\.(?:log|log\.json|jsonl|out|err|txt|json)(?:\.gz)?$|tfevents", re.IGNORECASE)
_CAPTURE = re.compile(r"(?:\.(?:out|err)|nohup.*|console\.log)(?:\.gz)?$", re.IGNORECASE)
_NOT_LOGS = frozenset((OWN_RECORD, "requirements.txt", OWN_EVENTS))
_DEPTH = 3
_MOST_ENTRIES = 5000
_MOST_FILES = 200
_HEAD = 256 * 1024
_TAIL = 64 * 1024


@dataclass(frozen=True)
class Logs:
    """The files that are read, in the order in which they were written."""

    format: str
    files: list[Path]
    captures: list[Path]
    """What a shell captured of the same run: the failures in them are told, as loggers do not write those."""


def sample(path: Path) -> list[str]:
    """Lines from both ends of a file. Raises OSError as the file system does."""
    file = LineFile(path)
    lines = [line for block, _ in islice(file.blocks(0, _HEAD), 1) for line in block]
    size = path.stat().st_size
    if file.seekable and size > _HEAD:
        tail = [line for block, _ in file.blocks(max(_HEAD, size - _TAIL)) for line in block]
        lines += tail[1:]
    return lines


def detect_file(path: Path) -> str:
    """The format of one file, by what is in it. Raises OSError as the file system does."""
    return TENSORBOARD if is_event_file(path) else detect(sample(path))[0]


def find_logs(folder: Path) -> Logs | None:
    """The logs of the run in `folder`; None where there is none. Raises OSError as the file system does."""
    if (folder / OWN_LOG).is_file():
        return Logs("bevctl", [folder / OWN_LOG], [])
    found: dict[str, list[Path]] = {}
    for path in candidates(folder):
        try:
            name, score = (TENSORBOARD, 1.0) if is_event_file(path) else detect(sample(path))
        except OSError:
            continue
        if score > 0:
            found.setdefault(name, []).append(path)
    best = next((name for name in _PREFERRED if name in found), None)
    if best is None:
        return None
    captured = [path for paths in found.values() for path in paths if _CAPTURE.search(path.name)]
    files = [path for path in found[best] if path not in captured] or found[best]
    return Logs(best, _in_order(_once(files)), [path for path in captured if path not in files])


def candidates(folder: Path) -> list[Path]:
    """Files below `folder` that may be logs, those that were written to last first."""
    paths: list[tuple[float, Path]] = []
    for root, folders, names in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        folders[:] = [] if depth >= _DEPTH else sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(root, name)
            if _NAME.search(name) and name not in _NOT_LOGS and path.is_file():
                paths.append((path.stat().st_mtime, path))
        if len(paths) > _MOST_ENTRIES:
            break
    return [path for _, path in sorted(paths, reverse=True)][:_MOST_FILES]


def _once(files: list[Path]) -> list[Path]:
    """mmengine writes its numbers twice, as scalars.json and under the time's name."""
    doubled = {path.parent for path in files if path.name == "scalars.json"}
    return [path for path in files if path.parent not in doubled or path.name == "scalars.json"]


def _in_order(files: list[Path]) -> list[Path]:
    """By the time that loggers put into file names, else by when they were last written to."""
    named = re.compile(r"\d{8}_\d{6}|\d{8}-\d{6}")

    def order(path: Path) -> tuple[str, float]:
        stamp = named.search(path.name) or named.search(path.parent.name) or named.search(path.parent.parent.name)
        return (stamp[0].replace("-", "_") if stamp else "", path.stat().st_mtime)

    return sorted(files, key=order)
