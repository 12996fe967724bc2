"""Types of option values that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bevctl.errors import BevctlError
from bevctl.files import check_writable


class Output(click.ParamType):
    """A file, or a folder, to write: refused before the work is done where it could not be written after it."""

    def __init__(self, *, folder: bool = False) -> None:
        self.name = "DIR" if folder else "FILE"
        self._folder = folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        del ctx
        path = Path(value)
        try:
            check_writable(path, folder=self._folder)
        except BevctlError as error:
            option = max(param.opts, key=len) if param is not None else "Output"
            raise BevctlError(f"{option} {error.message}", error.hint, error.code) from None
        return path


OUTPUT_FILE = Output()
OUTPUT_FOLDER = Output(folder=True)
