"""A run of another project from its start to our exit code: starts, restarts, and what is noted in run.json."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bevctl
from bevctl.config import foreign_facts
from bevctl.console import Console, strict_json
from bevctl.errors import BevctlError, ExitCode
from bevctl.external.checkpoints import checkpoints
from bevctl.external.follow import Follower
from bevctl.external.interpreter import applied
from bevctl.external.launch import Launch
from bevctl.external.process import TICK_S, Ending, Program, StopSignals, end_processes, left_behind, run_program
from bevctl.files import atomic_write_text
from bevctl.runs.records import EventRecord
from bevctl.runs.writer import read_run

OUTPUT = "console.out"
"""File in the work_dir with everything that the processes print; the readers take it for a shell's capture."""
USELESS = (
    "nonfinite_input", "cuda_oom", "no_kernel", "undefined_symbol", "disk_full", "size_mismatch", "unused_parameters",
    "marked_twice", "weights_only",
)  # fmt: skip
"""Causes (see `bevctl.runs.readers.events`) that a restart meets again."""
_NONFINITE = re.compile(r"\b(?:loss\w*|grad\w*|cost)\b.*\b(?:nan|inf|infinit\w*|non-?finite)\b", re.IGNORECASE)
_STATUS = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted", ExitCode.NONFINITE: "nonfinite"}


@dataclass(frozen=True)
class Policy:
    """When a run that failed is started again."""

    max_restarts: int = 0
    pause_s: float = 10.0
    """Time for the driver to give the memory of the dead processes back."""
    grace_s: float = 30.0
    """Time that the processes get to end after the first signal."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    code: ExitCode
    work_dir: Path
    checkpoint: Path | None
    """The newest one that is whole."""
    restarts: int


class ExternalRun:
    """One run: its folder, its starts and their outcomes."""

    def __init__(self, launch: Launch, policy: Policy, console: Console) -> None:
        self._launch = launch
        self._policy = policy
        self._console = console
        self._document = read_run(launch.work_dir)
        self._restarts = 0

    def run(self, resume: Path | None) -> Result:
        """Trains to the end, to a signal, or until no restart is left.

        Raises:
            BevctlError: it cannot be started (exit 2 or 4), failed (4), or stopped on non-finite numbers (5).
        """
        self._take_folder()
        status = "failed"
        try:
            with StopSignals() as stop:
                code = self._starts(resume, stop)
            status = _STATUS.get(code, "failed")
        except BevctlError as error:
            status = _STATUS.get(error.code, "failed")
            raise
        finally:
            self._note(status=status, ended=time.time())
        newest = next(iter(checkpoints(self._launch.work_dir)), None)
        return Result(code, self._launch.work_dir, newest, self._restarts)

    def _starts(self, resume: Path | None, stop: StopSignals) -> ExitCode:
        while True:
            before = next(iter(checkpoints(self._launch.work_dir)), None)
            follower = Follower(self._launch.work_dir, self._console)
            ending = self._start(resume, follower, stop)
            newest = next(iter(checkpoints(self._launch.work_dir)), None)
            if stop.first is not None:
                return self._stopped(stop, newest)
            if ending.code == 0:
                return ExitCode.OK
            failure = follower.failure()
            follower.look()
            error = self._failed(ending, failure)
            reason = self._reason_not_to_restart(error, failure, follower.trained, before == newest)
            if reason:
                raise BevctlError(error.message, f"{error.hint} {reason}".strip(), error.code)
            self._restarts += 1
            resume = newest or resume
            where = f"from {resume.name}" if resume else "from the beginning"
            self._console.warn(
                f"{error.message} Restart {self._restarts} of {self._policy.max_restarts} {where} in "
                f"{self._policy.pause_s:g} s."
            )
            if not _pause(self._policy.pause_s, stop):
                return self._stopped(stop, newest)

    def _start(self, resume: Path | None, follower: Follower, stop: StopSignals) -> Ending:
        launch = self._launch
        command = launch.command(resume, free_port())
        segment = self._segment(command, resume)
        self._note(status="running", segments=[*self._document["segments"], segment])
        program = Program(
            command=command,
            cwd=launch.tree.cwd,
            environment=applied(launch.environment),
            output=launch.work_dir / OUTPUT,
            on_line=follower.line,
            on_tick=follower.tick,
            grace_s=self._policy.grace_s,
        )
        ending = run_program(program, stop)
        if ending.left:
            self._console.info(f"Ended {ending.left} process{'es' * (ending.left > 1)} that it left behind.")
        segment |= {"exit": ending.code, "ended": time.time()}
        self._note()
        return ending

    def _take_folder(self) -> None:
        """Makes the folder, and sees to it that no other start of this run is alive in it."""
        launch, document = self._launch, self._document
        pid, here = document.get("pid"), document.get("host") == socket.gethostname()
        if document.get("status") == "running" and here and isinstance(pid, int) and _is_bevctl(pid):
            raise BevctlError(f"{launch.work_dir} is in use by process {pid}.", "Choose another with --work-dir.")
        ended = end_processes(left_behind(str(launch.work_dir)))
        if ended:
            self._console.warn(f"Ended {ended} process{'es' * (ended > 1)} of an earlier start of this run.")
        launch.work_dir.mkdir(parents=True, exist_ok=True)
        if launch.overlay is not None:
            launch.overlay.write()

    def _segment(self, command: list[str], resume: Path | None) -> dict[str, Any]:
        launch = self._launch
        half = foreign_facts.half_precision(launch.config)
        return {
            "started": time.time(),
            "command": command,
            "cwd": str(launch.tree.cwd),
            "resume": str(resume) if resume else None,
            "precision": half.dtype if half.on else "fp32",
            "loss_scale": half.loss_scale,
            "batch": foreign_facts.batch_per_gpu(launch.config),
            "world": launch.job.wanted.gpus,
            "lr": foreign_facts.learning_rate(launch.config),
            "versions": {"bevctl": bevctl.__version__, "torch": launch.interpreter.torch},
        }

    def _note(self, **fields: Any) -> None:
        launch = self._launch
        self._document |= {
            "engine": "external",
            "name": launch.config.path.stem,
            "tree": {"kind": launch.tree.kind.name, "path": str(launch.tree.root)},
            "python": str(launch.interpreter.path),
            "config": str(launch.overlay.path if launch.overlay else launch.config.path.absolute()),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "restarts": self._restarts,
            "updated": time.time(),
            **fields,
        }
        text = json.dumps(strict_json(self._document), indent=2) + "\n"
        atomic_write_text(launch.work_dir / "run.json", text)

    def _stopped(self, stop: StopSignals, newest: Path | None) -> ExitCode:
        """A first signal is a preemption if there is something to go on from; a second is just that."""
        assert stop.first is not None
        if stop.count == 1 and newest is not None:
            self._console.info(f"Stopped by {stop.first.name}. {newest.name} is the last checkpoint.")
            return ExitCode.PREEMPTED
        return ExitCode.INTERRUPTED if stop.first.name == "SIGINT" else ExitCode.TERMINATED

    def _failed(self, ending: Ending, failure: EventRecord | None) -> BevctlError:
        script, output = self._launch.tree.script.path.name, self._launch.work_dir / OUTPUT
        said = f": {' '.join(failure.message.split())[:300].rstrip('.')}" if failure else ""
        fix = str(failure.data.get("fix") or "") if failure else ""
        code = ExitCode.NONFINITE if failure and _is_nonfinite(failure) else ExitCode.RUN_FAILED
        return BevctlError(
            f"{script} ended with {ending.told}{said}.", f"{fix} Its output is in {output}.".strip(), code
        )

    def _reason_not_to_restart(
        self, error: BevctlError, failure: EventRecord | None, trained: bool, is_same_checkpoint: bool
    ) -> str:
        """Empty: restart."""
        limit = self._policy.max_restarts
        if error.code == ExitCode.NONFINITE or (failure is not None and failure.data.get("cause") in USELESS):
            return "A restart would meet it again."
        if not limit:
            return "--max-restarts N starts it again from its last checkpoint."
        if not trained:
            return "It was not restarted, because it had not begun to train."
        if self._restarts and is_same_checkpoint:
            return "It was not restarted again, because no checkpoint was written since the last time."
        return f"All {limit} restarts are used up." if self._restarts >= limit else ""


def _is_nonfinite(failure: EventRecord) -> bool:
    return failure.data.get("cause") == "nonfinite_input" or _NONFINITE.search(failure.message) is not None


def _is_bevctl(pid: int) -> bool:
    """Whether a process is alive and is a bevctl, and not another that got its number."""
    import psutil

    try:
        return pid != os.getpid() and any("bevctl" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _pause(seconds: float, stop: StopSignals) -> bool:
    """Waits; False where a signal came."""
    deadline = time.monotonic() + seconds
    while stop.first is None and time.monotonic() < deadline:
        time.sleep(TICK_S)
    return stop.first is None


def free_port(environ: Mapping[str, str] = os.environ) -> int:
    """MASTER_PORT where it is set, else a port that is free now."""
    given = environ.get("MASTER_PORT", "")
    if given.isdigit():
        return int(given)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
