"""The folder of a run: which one, and which checkpoint in it continues it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bevctl.config.schema import Config
from bevctl.engine.checkpoint import Checkpoint, newest_checkpoints, read_checkpoint
from bevctl.errors import BevctlError, did_you_mean

AUTO = "auto"
_NAME_ONE = "Give the path of a checkpoint file, such as runs/tiny/latest."
_RESUME_AUTO = "--resume auto takes the newest one, or starts anew without one."


def work_dir_of(config: Config) -> Path:
    return Path(config.work_dir or Path("runs") / config.name)


def find_checkpoint(name: str, work_dir: Path, otherwise: str = _NAME_ONE) -> Path:
    """The file that a name of a checkpoint means: a path, else a name in work_dir.

    Args:
        otherwise: what to do where work_dir holds none at all.

    Raises:
        BevctlError: neither exists.
    """
    for path in (Path(name), work_dir / name):
        if path.is_file():
            return path
    known = [path.name for path in newest_checkpoints(work_dir)] if work_dir.is_dir() else []
    raise BevctlError(
        f"There is no checkpoint {name}" + ("." if work_dir == Path() else f", neither as a path nor in {work_dir}."),
        did_you_mean(name, known) if known else otherwise,
    )


def read_resume(resume: str | None, work_dir: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to continue from; None to start anew. `auto` passes over files that cannot be read, and says so.

    Raises:
        BevctlError: the named checkpoint is missing or unreadable, or `auto` finds only unreadable ones.
    """
    if resume is None:
        return None
    if resume != AUTO:
        return read_checkpoint(find_checkpoint(resume, work_dir, _RESUME_AUTO))
    unreadable: BevctlError | None = None
    for path in newest_checkpoints(work_dir) if work_dir.is_dir() else []:
        try:
            return read_checkpoint(path)
        except BevctlError as error:
            say(f"Passing over a checkpoint: {error.message}")
            unreadable = unreadable or error
    if unreadable is not None:
        raise unreadable
    say(f"--resume auto: no checkpoint in {work_dir}, starting anew")
    return None


def resumed_config(resume: str | None, work_dir: str | None) -> Path | dict[str, Any] | None:
    """The config that a run continues with when none is given: of its checkpoint, else of its work_dir.

    Foreign checkpoints name none that bevctl can read.
    """
    folder = Path(work_dir) if work_dir else None
    if resume not in (None, AUTO):
        checkpoint = read_checkpoint(find_checkpoint(resume or "", folder or Path()))
        config = checkpoint.meta.get("config")
        if checkpoint.origin == "bevctl" and isinstance(config, dict):
            return config
    if resume is not None and folder is not None and (folder / "config.yaml").is_file():
        return folder / "config.yaml"
    return None
