"""The folder that a run is to use: looked at before anything starts, then held for one process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bevctl.errors import BevctlError

CONSOLE_LOG = "console.log"
"""What a detached run prints; it may be there before the run starts."""
LOCK = ".lock"
"""What a process that trains in the folder holds."""


def is_used(work_dir: Path) -> bool:
    """Whether a folder holds more than what may be there before a run starts."""
    return any(entry.name not in (CONSOLE_LOG, LOCK) for entry in work_dir.iterdir())


def check_unused(work_dir: Path, resume: str | None) -> None:
    """Refuses to start in a folder that holds something, unless the run continues.

    Raises:
        BevctlError: the folder is not empty, or is not a folder.
    """
    _check_folder(work_dir)
    if resume is None and work_dir.is_dir() and is_used(work_dir):
        raise BevctlError(
            f"The work_dir {work_dir} is not empty.",
            "Continue that run with --resume auto, or choose another folder with --work-dir.",
        )


def _check_folder(work_dir: Path) -> None:
    if work_dir.exists() and not work_dir.is_dir():
        raise BevctlError(f"The work_dir {work_dir} is not a folder.", "Choose another with --work-dir.")


@contextmanager
def claimed(work_dir: Path) -> Iterator[None]:
    """Hold `work_dir` for this process while the body writes a run there.

    The folder is made if needed. The system gives the lock back however the process ends. A file system without locks
    holds nothing.

    Raises:
        BevctlError: another process holds it, or it is not a folder.
    """
    _check_folder(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    with (work_dir / LOCK).open("a") as file:
        if not _locked(file):
            raise BevctlError(
                f"Another process trains in {work_dir}.",
                "Follow it with bevctl monitor, stop it first, or choose another folder with --work-dir.",
            )
        yield


def _locked(file: TextIO) -> bool:
    """Whether this process holds the lock of `file` now, or no process can.

    A lock that loading processes do not inherit, as they live on for seconds when the run is killed.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which of the two, POSIX leaves to the system
        return False
    except OSError:
        return True  # of a file system without locks
    return True
