"""Whether the disk that a run writes to lasts until its end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bevctl.monitor.progress import Progress


@dataclass(frozen=True)
class Disk:
    """Space of the file system that holds a run, in bytes."""

    folder: Path
    free: int
    total: int
    needed: int | None
    """What the run will still write; None where that cannot be told."""

    @property
    def suffices(self) -> bool | None:
        """Whether the space lasts to the end of the run; None: unknown."""
        return None if self.needed is None else self.needed <= self.free


def disk_of(folder: Path, progress: Progress, kept: int | None) -> Disk | None:
    """The disk of a run's folder; None where the folder cannot be looked at.

    Args:
        kept: checkpoints that the run keeps at a time; None: it deletes none.
    """
    try:
        usage = shutil.disk_usage(folder)
        sizes = [path.stat().st_size for path in _checkpoints(folder)]
    except OSError:
        return None
    return Disk(folder, usage.free, usage.total, _needed(sizes, progress, kept))


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of epochs and iterations, each file once however many names it has."""
    files = [path for path in folder.glob("*.pth") if path.is_file() and not path.is_symlink()]
    return [path for path in files if path.stem.startswith(("epoch_", "iter_", "checkpoint_epoch_"))]


def _needed(sizes: list[int], progress: Progress, kept: int | None) -> int | None:
    """One checkpoint of the largest size so far for every epoch that is left, as far as they are kept.

    A checkpoint is written beside the one that it replaces, so one more than is kept must fit.
    """
    if not sizes or progress.epochs_left is None:
        return None
    left = progress.epochs_left
    if kept is not None:
        left = min(left, max(kept + 1 - len(sizes), 1))
    return max(sizes) * left
