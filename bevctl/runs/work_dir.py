"""The folder that a run is to use, looked at before anything starts."""

from __future__ import annotations

from pathlib import Path

from bevctl.errors import BevctlError

CONSOLE_LOG = "console.log"
"""What a detached run prints; it may be there before the run starts."""


def check_unused(work_dir: Path, resume: str | None) -> None:
    """Refuses to start in a folder that holds something, unless the run continues.

    Raises:
        BevctlError: the folder is not empty, or is not a folder.
    """
    if work_dir.exists() and not work_dir.is_dir():
        raise BevctlError(f"The work_dir {work_dir} is not a folder.", "Choose another with --work-dir.")
    if resume is None and work_dir.is_dir() and any(entry.name != CONSOLE_LOG for entry in work_dir.iterdir()):
        raise BevctlError(
            f"The work_dir {work_dir} is not empty.",
            "Continue that run with --resume auto, or choose another folder with --work-dir.",
        )
