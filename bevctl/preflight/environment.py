"""The Python environment that a run will use, as the probe sees it: this interpreter's, or that of --python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevctl.errors import BevctlError
from bevctl.preflight import probe
from bevctl.preflight.checks import Context
from bevctl.preflight.compatibility import versions_by_project

_MARGIN_S = 1.0
"""Time kept back from a check's limit, so that its own answer comes before it is cut off."""


@dataclass(frozen=True)
class Environment:
    """What the probe says about an interpreter's packages."""

    executable: str
    python: str
    """Version of the interpreter."""
    packages: Mapping[str, Mapping[str, Any]]
    """Distribution → version, where it lies, CUDA version in the name of its wheel."""
    torch: Mapping[str, str | None]
    """Version, cuda and hip of torch's build; empty where there is no torch."""
    pkg_resources: bool
    kernels: Mapping[str, list[str]]
    """Compiled file → architectures of the CUDA kernels in it."""
    programs: Mapping[str, str | None]

    @property
    def versions(self) -> dict[str, str]:
        """Project → version; "mmcv" stands for whichever flavour is installed."""
        return versions_by_project(self.packages)


def read_environment(context: Context) -> Environment:
    """The environment by metadata alone: nothing is imported in it.

    Raises BevctlError when --python cannot be run or is no Python 3.6.
    """
    document = _run_probe(context, "--no-imports") if context.python else probe.probe(probe.search_path(), 0.0, False)
    return Environment(
        executable=document["python"]["executable"],
        python=document["python"]["version"],
        packages=document["packages"],
        torch=document["torch"],
        pkg_resources=document["pkg_resources"],
        kernels=document["kernels"],
        programs=document["programs"],
    )


def try_imports(context: Context) -> Mapping[str, Mapping[str, Any]]:
    """Module → {ok, error, …} of torch and of the compiled packages, each imported in a process of its own.

    Raises BevctlError as `read_environment` does.
    """
    limit = max(context.timeout - _MARGIN_S, _MARGIN_S)
    imports: Mapping[str, Mapping[str, Any]] = _run_probe(context, "--timeout", f"{limit:g}")["imports"]
    return imports


def _run_probe(context: Context, *options: str) -> dict[str, Any]:
    executable = context.python or sys.executable
    command = [executable, str(Path(probe.__file__)), *options]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BevctlError(f"Cannot run {executable}: {reason}.", _HINT) from None
    with process:
        try:
            said, complaint = process.communicate(timeout=context.timeout)
        except subprocess.TimeoutExpired:
            raise BevctlError(f"{executable} did not answer within {context.timeout:g} s.", _HINT) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the imports that it may have left behind
    document = probe.printed_details(said)
    if "python" not in document:
        last = (complaint.strip().splitlines() or ["nothing"])[-1]
        raise BevctlError(f"{executable} is no working Python 3.6 or newer; it said: {last:.200}.", _HINT)
    return document


_HINT = (
    "Give --python the interpreter of the environment that will train, for example ~/miniconda3/envs/NAME/bin/python."
)
