"""One start of another program: a process group whose output is copied, and of which nothing is left at the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from bevctl.errors import BevctlError, ExitCode
from bevctl.external.interpreter import RUN_MARK

TICK_S = 0.1
LEFT_S = 5.0
"""Time that processes left behind get between SIGTERM and SIGKILL."""
_CHUNK = 64 * 1024
_LONGEST_LINE = 64 * 1024
_BREAK = re.compile(rb"\r\n|\n|\r")


class StopSignals:
    """Context manager that counts SIGTERM, SIGINT and SIGHUP instead of dying of them.

    SIGHUP stays ignored where it is, as under nohup.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            wanted = (signal.SIGTERM, signal.SIGINT, *(() if stays else (signal.SIGHUP,)))
            self._previous = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.count += 1


@dataclass(frozen=True)
class Ending:
    """How one start ended."""

    code: int
    """Exit code; below 0 the number of the signal that killed it."""
    left: int
    """Processes that were left behind, and ended."""

    @property
    def told(self) -> str:
        """In words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-self.code).name}"
        return f"signal {-self.code}"


@dataclass(frozen=True)
class Program:
    """What is started, and who hears of it."""

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    """The whole of it, with RUN_MARK in it."""
    output: Path
    """File that its output is appended to, byte for byte."""
    on_line: Callable[[str], None]
    """Is given each line, from another thread."""
    on_tick: Callable[[], None]
    """Is called about ten times a second while it runs."""
    grace_s: float = 30.0
    """Time to end after the first signal."""


def run_program(program: Program, stop: StopSignals) -> Ending:
    """Runs a program to its end. A first signal is passed on to its processes, a second kills them.

    Raises:
        BevctlError: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            list(program.command),
            cwd=program.cwd,
            env=dict(program.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise BevctlError(
            f"{program.command[0]} cannot be started: {error.strerror or error}.",
            "Check --python and what the launcher needs.",
            ExitCode.RUN_FAILED,
        ) from None
    assert process.stdout is not None
    reader = threading.Thread(target=_copy, args=(process.stdout, program), daemon=True)
    reader.start()
    try:
        _wait(process, program, stop)
        _let_the_others_end(program, stop)
    finally:
        _signal_group(process, signal.SIGKILL)
        left = end_processes(left_behind(program.environment[RUN_MARK]))
        process.wait()
        reader.join(LEFT_S)
    return Ending(process.returncode, left)


def _wait(process: subprocess.Popen[bytes], program: Program, stop: StopSignals) -> None:
    deadline: float | None = None
    while process.poll() is None:
        if stop.first is not None and deadline is None:
            deadline = time.monotonic() + program.grace_s
            _signal_group(process, stop.first)
        if deadline is not None and (stop.count > 1 or time.monotonic() > deadline):
            _signal_group(process, signal.SIGKILL)
        program.on_tick()
        time.sleep(TICK_S)
    program.on_tick()


def _let_the_others_end(program: Program, stop: StopSignals) -> None:
    """After a signal the first process may be gone before those it started, as the shell around mpirun is."""
    deadline = time.monotonic() + program.grace_s
    while stop.count == 1 and time.monotonic() < deadline and left_behind(program.environment[RUN_MARK]):
        time.sleep(TICK_S)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _copy(stream: IO[bytes], program: Program) -> None:
    """Output to the file as it comes, and line by line; a progress bar's carriage return ends a line too."""
    rest = b""
    with stream, program.output.open("ab", buffering=0) as file:
        while chunk := os.read(stream.fileno(), _CHUNK):
            with contextlib.suppress(OSError):  # a full disk must not hold up who writes into the pipe
                file.write(chunk)
            *lines, rest = _BREAK.split(rest + chunk)
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                program.on_line(line.decode("utf-8", "replace"))
    if rest:
        program.on_line(rest.decode("utf-8", "replace"))


def left_behind(mark: str) -> list[psutil.Process]:
    """This user's processes that carry a run's mark."""
    return list(_marked(mark))


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end_processes(processes: list[psutil.Process]) -> int:
    """Ends processes, by SIGTERM, then SIGKILL; returns how many."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=LEFT_S) if processes else ([], [])
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(processes)
