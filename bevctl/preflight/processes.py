"""Which processes hold GPU memory, and which of them are training runs that nobody looks after any more."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from bevctl.preflight.nvml import Gpu, NotReported

Value = TypeVar("Value")

_INITS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runsvdir"}
"""Names of the processes that adopt the children of those that died."""
_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
_TRAINING = re.compile(
    r"(?<![a-z])(?:pre)?(?:train|finetune|fine_tune)|multiprocessing\.(?:spawn|forkserver)", re.IGNORECASE
)
_LAUNCHERS = {"bevctl", "torchrun", "torchpack", "deepspeed", "accelerate", "mpirun"}
_SAMPLE_S = 0.3
"""How long a process is watched for signs of work."""
_FRESH_S = 300.0
"""A file written to within this time counts as progress."""
_MAX_COMMAND = 160


@dataclass(frozen=True)
class Process:
    """A running process, as far as this user may look."""

    pid: int
    created: float
    """Start, seconds since 1970; with the pid it names the process for good."""
    user: str
    mine: bool
    age_s: float
    command: str
    parent: int
    parent_name: str
    """Empty: the parent cannot be seen."""
    adopted: bool
    """Its own parent is gone, and an init process or a subreaper took its place."""
    zombie: bool
    training: bool
    """The command line is that of a training run."""
    orphan: str
    """Why it looks left behind; empty: it has its parent, or it is at work."""

    def __str__(self) -> str:
        parent = "detached" if self.adopted else f"parent {self.parent} ({self.parent_name or 'unknown'}) alive"
        state = self.orphan or parent
        return f"pid {self.pid} (user {self.user}, started {duration(self.age_s)} ago, {state}): {self.command}"


@dataclass(frozen=True)
class Holder:
    """Somebody who holds memory of one or several GPUs."""

    pid: int
    process: Process | None
    """None: the driver names the pid, but it cannot be seen from here (another container)."""
    memory: dict[int, int | None]
    """Bytes by GPU index; None where the driver does not tell."""

    def __str__(self) -> str:
        held = ", ".join(f"GPU {index}: {_gib(used)}" for index, used in sorted(self.memory.items()))
        return f"{self.process or f'pid {self.pid} (of another container or machine)'} [{held}]"

    @property
    def is_orphan(self) -> bool:
        """Whether it is an orphaned training process."""
        return self.process is not None and self.process.training and bool(self.process.orphan)


def holders(gpus: Sequence[Gpu], proc: Path = Path("/proc")) -> list[Holder]:
    """Everybody but this process and its children who holds memory of `gpus`, by pid.

    The driver's list is used where its pids can be confirmed; a container, or a dead process whose children keep its
    memory, needs the other way round: processes that have the GPU's device file open and CUDA loaded.
    """
    opened = gpu_openers(proc)
    memory: dict[int, dict[int, int | None]] = {}
    strangers: set[int] = set()
    for gpu in gpus:
        listed = {} if isinstance(gpu.processes, NotReported) else {entry.pid: entry.used for entry in gpu.processes}
        unconfirmed = {pid for pid in listed if not _confirmed(pid, opened, proc)}
        if unconfirmed or not listed:
            unlisted = (pid for pid, minors in opened.items() if gpu.minor in minors and pid not in listed)
            listed |= {pid: None for pid in unlisted if _has_cuda(pid, proc)}
        strangers |= unconfirmed
        for pid, used in listed.items():
            memory.setdefault(pid, {})[gpu.index] = used
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))} - strangers
    return [
        Holder(pid, None if pid in strangers else inspect(pid), held)
        for pid, held in sorted(memory.items())
        if pid not in own
    ]


def gpu_openers(proc: Path = Path("/proc")) -> dict[int, set[int]]:
    """Minor numbers of the GPU device files that each process has open, of the processes this user may look into."""
    opened: dict[int, set[int]] = {}
    for folder in proc.glob("[0-9]*/fd"):
        minors = set()
        # A process may end, or belong to somebody else.
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    device = re.fullmatch(r"/dev/nvidia(\d+)", os.readlink(entry.path))
                    if device:
                        minors.add(int(device[1]))
            opened[int(folder.parent.name)] = minors
    return opened


def _confirmed(pid: int, opened: dict[int, set[int]], proc: Path) -> bool:
    """Whether the driver's pid is that process here: in a container the same number may be another one."""
    if pid not in opened:  # somebody else's process, or none
        return (proc / str(pid)).exists()
    return bool(opened[pid]) or _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _has_cuda(pid: int, proc: Path) -> bool:
    try:
        return "libcuda.so" in (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False


def inspect(pid: int) -> Process | None:
    """The process, or None when there is none to see."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            zombie = process.status() == psutil.STATUS_ZOMBIE
            words: list[str] = [] if zombie else _or(process.cmdline, [])
            command = " ".join(words) or process.name()
            parent, parent_name = process.ppid(), _parent_name(process)
            adopted = _is_adopted(pid, parent, parent_name)
            if zombie:
                orphan = f"dead, but not yet collected by its parent {parent} ({parent_name or 'unknown'})"
            else:
                orphan = "orphaned: its parent is gone" if adopted and not is_at_work(pid) else ""
            return Process(
                pid,
                created=process.create_time(),
                user=_or(process.username, "unknown"),
                mine=process.uids().real == os.getuid(),
                age_s=max(0.0, time.time() - process.create_time()),
                command=command if len(command) <= _MAX_COMMAND else command[: _MAX_COMMAND - 1] + "…",
                parent=parent,
                parent_name=parent_name,
                adopted=adopted,
                zombie=zombie,
                training=bool(_PYTHON.match(process.name())) if zombie else is_training(words),
                orphan=orphan,
            )
    except psutil.Error:
        return None


def _is_adopted(pid: int, parent: int, parent_name: str) -> bool:
    """Whether the parent is not the one that started the process.

    A subreaper other than an init gives itself away by its session: only a leader may have another one than the
    process that started it.
    """
    if parent == 1 or parent_name in _INITS:
        return True
    try:
        session = os.getsid(pid)
        return parent > 0 and session not in (pid, os.getsid(parent))
    except OSError:
        return False


def _or(ask: Callable[[], Value], default: Value) -> Value:
    try:
        return ask()
    except (psutil.Error, KeyError):
        return default


def _parent_name(process: psutil.Process) -> str:
    try:
        parent = process.parent()
        return parent.name() if parent else ""
    except psutil.Error:
        return ""


def is_training(words: Sequence[str]) -> bool:
    """Whether a command line (its words) is that of a training run: Python or a launcher, and a script that trains."""
    subject, rest = _subject(list(words))
    if subject.startswith("torch.distributed.") or Path(subject).name in _LAUNCHERS:
        return any(_TRAINING.search(word) for word in rest)
    return bool(_TRAINING.search(subject))


def _subject(words: list[str]) -> tuple[str, list[str]]:
    """What Python runs (a script, a module, code) or the launcher itself, and the words behind it."""
    if not words:
        return "", []
    if not _PYTHON.fullmatch(Path(words[0]).name):
        return (words[0], words[1:]) if Path(words[0]).name in _LAUNCHERS else ("", [])
    for place, word in enumerate(words[1:], start=1):
        if word in ("-m", "-c"):
            return " ".join(words[place + 1 : place + 2]), words[place + 2 :]
        if not word.startswith("-"):
            return word, words[place + 1 :]
    return "", []


def is_at_work(pid: int) -> bool:
    """Whether the process wrote to a file of its own in the last minutes and uses the CPU right now.

    A run that was detached on purpose (nohup, setsid, `bevctl train --detach`) has no parent either; this tells it
    apart from one that was left behind. A process that may not be looked into gets the benefit of the doubt.
    """
    try:
        process = psutil.Process(pid)
        written = [Path(file.path) for file in process.open_files() if file.mode != "r"]
        if not any(_age(path) < _FRESH_S for path in written):
            return False
        before = process.cpu_times()
        time.sleep(_SAMPLE_S)
        after = process.cpu_times()
    except psutil.AccessDenied:
        return True
    return after.user + after.system > before.user + before.system


def _age(path: Path) -> float:
    """Seconds since the last write; infinite when the file is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def duration(seconds: float) -> str:
    """Roughly, as a person says it: 40 s, 12 min, 3 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _gib(used: int | None) -> str:
    return "an unknown amount" if used is None else f"{used / 2**30:.2f} GiB"
