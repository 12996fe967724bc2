"""The interpreter that trains, and the environment its processes get: what the projects' documents export by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.external.trees import Tree

RUN_MARK = "BEVCTL_EXTERNAL_RUN"
"""Environment variable of every process of a run: its work_dir, by which those left behind are found."""
_OF_OURS = ("VIRTUAL_ENV", "PYTHONHOME", "__PYVENV_LAUNCHER__", "CONDA_DEFAULT_ENV", "CONDA_PREFIX")
"""Variables that name the environment bevctl itself may run in."""


@dataclass(frozen=True)
class Interpreter:
    """A Python, and what is known of its torch."""

    path: Path
    """Absolute; a link is kept, because an environment is found by it."""
    torch: str | None = None
    """Version; None where it is not known."""

    @property
    def prefix(self) -> Path:
        """The folder of its environment."""
        return self.path.parent.parent

    def program(self, name: str) -> Path | None:
        """A program beside the interpreter."""
        path = self.path.parent / name
        return path if os.access(path, os.X_OK) and path.is_file() else None


def find_interpreter(name: str) -> Path:
    """The absolute path of an interpreter that is given by path or name. Raises BevctlError where there is none."""
    found = shutil.which(os.path.expanduser(name))
    if found is None:
        raise BevctlError(
            f"--python {name} cannot be run.", "Give the environment's interpreter, such as envs/NAME/bin/python."
        )
    return Path(os.path.abspath(found))


def environment_of(
    interpreter: Interpreter, tree: Tree, work_dir: Path, gpus: int | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """What the processes' environment has differently from ours; None: the variable is taken out.

    Args:
        gpus: show the processes only so many GPUs; None: all.
    """
    changes: dict[str, str | None] = {name: None for name in _OF_OURS if name in environ}
    changes |= {name: None for name in environ if name.startswith("BEVCTL_")}
    if (interpreter.prefix / "pyvenv.cfg").is_file():
        changes["VIRTUAL_ENV"] = str(interpreter.prefix)
    if (interpreter.prefix / "conda-meta").is_dir():
        changes |= {"CONDA_PREFIX": str(interpreter.prefix), "CONDA_DEFAULT_ENV": interpreter.prefix.name}
    changes["PATH"] = _in_front([interpreter.path.parent], environ.get("PATH"))
    changes["PYTHONPATH"] = _in_front([tree.root], environ.get("PYTHONPATH"))
    libraries = _libraries(interpreter)
    if libraries:
        changes["LD_LIBRARY_PATH"] = _in_front(libraries, environ.get("LD_LIBRARY_PATH"))
    if gpus is not None:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:gpus] or map(str, range(gpus)))
    changes["PYTHONUNBUFFERED"] = "1"
    changes[RUN_MARK] = str(work_dir)
    return changes


def applied(changes: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The whole environment with the changes made."""
    whole: dict[str, str | None] = {**environ, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def _libraries(interpreter: Interpreter) -> list[Path]:
    """Folders that compiled operators look for libraries in: those of conda and of torch."""
    conda = [interpreter.prefix / "lib"] if (interpreter.prefix / "conda-meta").is_dir() else []
    return conda + sorted(interpreter.prefix.glob("lib/python3*/site-packages/torch/lib"))


def _in_front(folders: list[Path], before: str | None) -> str:
    known = [part for part in (before or "").split(os.pathsep) if part]
    return os.pathsep.join([*map(str, folders), *(part for part in known if Path(part) not in folders)])
