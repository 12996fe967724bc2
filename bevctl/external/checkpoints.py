"""The checkpoints of a run of another project: which are there, and which is the last whole one."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from bevctl.errors import BevctlError

PATTERNS = ("epoch_*.pth", "iter_*.pth", "ckpt/checkpoint_epoch_*.pth", "ckpt/latest_model.pth")
"""As mmcv, mmengine and OpenPCDet name them, below the work_dir."""
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def checkpoints(work_dir: Path) -> list[Path]:
    """The run's whole checkpoints, the newest first."""
    found = [
        path for pattern in PATTERNS for path in work_dir.glob(pattern) if path.is_file() and not path.is_symlink()
    ]
    return sorted(filter(is_whole, found), key=lambda path: path.stat().st_mtime, reverse=True)


def is_whole(path: Path) -> bool:
    """Whether a file is no torn one: torch's zip files have their directory at the end.

    Of the older format (torch before 1.6, and OpenPCDet to this day) only the beginning can be told.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
        return zipfile.is_zipfile(path) if head == _ZIP else head[:1] == _PICKLE
    except OSError:
        return False


def find_checkpoint(name: str, work_dir: Path, *folders: Path) -> Path:
    """The absolute path that a name means: a path, else a name in the work_dir or in one of `folders`.

    Raises:
        BevctlError: there is none.
    """
    for folder in (Path(), work_dir, work_dir / "ckpt", *folders):
        if (folder / name).is_file():
            return (folder / name).absolute()
    raise BevctlError(
        f"There is no checkpoint {name}, neither as a path nor in {work_dir}.",
        "--resume auto takes the newest one of the work_dir, or starts anew without one.",
    )


def choose_resume(name: str | None, work_dir: Path, say: Callable[[str], None], *folders: Path) -> Path | None:
    """The file to continue from: by name, or for `auto` the newest whole one of the work_dir, if any; None: start anew.

    Raises:
        BevctlError: the named file is missing or torn.
    """
    if name is None:
        return None
    if name == "auto":
        newest = next(iter(checkpoints(work_dir)), None)
        say(f"--resume auto: {newest or f'no checkpoint in {work_dir}, starting anew'}")
        return newest
    path = find_checkpoint(name, work_dir, *folders)
    if not is_whole(path):
        raise BevctlError(f"{path} is damaged or no checkpoint.", f"`bevctl checkpoint verify {path}` says more.")
    return path
