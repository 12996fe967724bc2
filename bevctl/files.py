"""Writing files so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bevctl.errors import BevctlError


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Refuse a `path` at which a file, or with `folder` a folder, cannot be written, as far as can be told beforehand.

    Raises BevctlError.
    """
    target = Path(path)
    if folder and target.exists() and not target.is_dir():
        raise BevctlError(f"{path} is not a folder.", "Choose another name.")
    if not folder and target.is_dir():
        raise BevctlError(f"{path} is a folder.", "Name a file.")
    if not folder:
        _refuse_special(target)
    places = (target, *target.absolute().parents) if folder else target.absolute().parents
    nearest = next(place for place in places if place.exists())
    if not nearest.is_dir():
        raise BevctlError(f"{path} cannot be written: {nearest} is not a folder.", "Choose another place.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BevctlError(f"{path} cannot be written: {nearest} is not writable for you.", "Choose another place.")


def _refuse_special(target: Path) -> None:
    """A rename onto a device or a pipe would not write to it, but take its place."""
    if target.exists() and not target.is_file() and not target.is_dir():
        raise BevctlError(f"{target} is a pipe or a device, not a file.", "Give the path of a regular file.")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    The folder of `path` is made if needed. When the body or the rename raises, the temporary file is removed and
    `path` is what it was. Raises OSError as the file system does, of `path`; BevctlError for a pipe or a device.
    """
    target = Path(path)
    _refuse_special(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(target)
        raise
    sync(target.parent)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the content of `path` by `data`, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the content of `path` by `text` in UTF-8, all or nothing."""
    atomic_write_bytes(path, text.encode())


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
