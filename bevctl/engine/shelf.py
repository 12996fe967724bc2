"""The checkpoints that a run keeps, and the link to the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bevctl.engine.checkpoint import write_checkpoint
from bevctl.files import atomic_path


@dataclass
class Shelf:
    """The checkpoints that a run wrote: the newest `keep` of them, and `latest`."""

    work_dir: Path
    keep: int
    written: list[str] = field(default_factory=list)
    """File names, oldest first. Only these are ever deleted: a user's own file in the folder stays."""

    def put(self, name: str, content: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, points `latest` at it and deletes what is older than the newest `keep`."""
        path = self.work_dir / name
        write_checkpoint(path, content)
        _point(self.work_dir / "latest", name)
        self.written = [other for other in self.written if other != name] + [name]
        for old in self.written[: -self.keep]:
            (self.work_dir / old).unlink(missing_ok=True)
        self.written = self.written[-self.keep :]
        return path

    def duplicate(self, name: str, other: str) -> None:
        """Makes `other` a second name of the file `name`; it stays when `name` is deleted."""
        with atomic_path(self.work_dir / other) as temporary:
            try:
                os.link(self.work_dir / name, temporary)
            except OSError:
                shutil.copyfile(self.work_dir / name, temporary)


def _point(link: Path, name: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, link)
