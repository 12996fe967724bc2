"""The live processes of a run on this machine: which rank each is, whether it can run at all, and where it stands."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bevctl.runs.records import Beat, RunLog

DUMP_S = 20.0
"""Longest time that py-spy may take for one process."""
_THREAD = re.compile(r'^Thread .*\((?P<state>[^)]*)\)(?:: "(?P<name>[^"]*)")?')
_FRAME = re.compile(r"^ +(?P<function>\S.*?) \((?P<file>[^()]*?):(?P<line>\d+)\)")
COLLECTIVE = "waits in a collective"
_DOINGS = {
    "waits for data": r"_try_get_data|_get_data\b|_next_data|multiprocessing.queues",
    COLLECTIVE: r"\b(?:all_reduce|all_gather\w*|broadcast\w*|barrier|reduce_scatter\w*|reduce|gather|"
    r"monitored_barrier|_sync_\w+|init_process_group|_store_based_barrier)\b",
    "saves a checkpoint": r"\b(?:save_checkpoint|_save|fsync|write_checkpoint)\b",
    "computes gradients": r"\b(?:_engine_run_backward|backward)\b",
    "waits for the GPU": r"\b(?:synchronize|item|cpu|tolist)\b",
    "evaluates": r"\b(?:\w*evaluate\w*|single_gpu_test|multi_gpu_test|collect_results\w*)\b",
}
"""What a rank does, by the innermost frame that says so; the last one by any frame."""
_SHOWN = 6


@dataclass(frozen=True)
class RankProcess:
    """A process that trains."""

    pid: int
    rank: int | None
    status: str
    """As psutil names it: running, sleeping, stopped, disk-sleep, zombie."""
    bad_workers: tuple[tuple[int, str], ...] = ()
    """Pid and status of its loading processes that are stopped or dead."""
    stack: tuple[str, ...] = ()
    """Frames of the main thread, innermost first; empty where py-spy is not installed or not allowed to look."""
    no_stack: str = ""
    """Why there is none."""

    @property
    def name(self) -> str:
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank} (pid {self.pid})"

    @property
    def is_halted(self) -> bool:
        """Whether it is stopped by a signal, or dead."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    @property
    def doing(self) -> str:
        """What it waits for, by its stack; empty where that does not tell."""
        return doing(self.stack)


def doing(stack: Sequence[str]) -> str:
    """What a process with these frames, innermost first, does; empty where they do not tell."""
    named = [(frame, name) for frame in stack for name, pattern in _DOINGS.items() if re.search(pattern, frame)]
    return named[0][1] if named else ""


def processes_of(log: RunLog, beats: Sequence[Beat] = ()) -> list[RankProcess]:
    """The training processes of a run that live on this machine and belong to this user, by rank.

    Args:
        beats: the last words of its ranks.
    """
    here = {beat.pid: beat.rank for beat in beats if beat.host == socket.gethostname()}
    roots = _roots(log, here)
    ranks = {process.pid: process for root in roots for process in [root, *_siblings(root)]}
    known = [_look(process, here.get(process.pid)) for process in ranks.values()]
    return sorted(
        (p for p in known if p is not None), key=lambda p: (p.rank is None, p.rank if p.rank is not None else p.pid)
    )


def _roots(log: RunLog, told: Container[int]) -> list[psutil.Process]:
    """The processes that run.json and the ranks name, or those that have one of the log's files open for writing.

    Args:
        told: pids of ranks on this machine.
    """
    meta = log.header.get("meta") or {}
    if log.format == "bevctl" and isinstance(meta.get("pid"), int):
        main = meta["pid"] if meta.get("host") == socket.gethostname() else None
        is_running = meta.get("status") == "running"
        return [p for p in _mine() if is_running and (p.pid == main or p.pid in told)]
    files = {str(path.resolve()) for path in log.files}
    writers = {process.pid: process for process in _mine() if files & set(_written(process))}
    # Loading processes inherit the open file of the rank that started them.
    return [process for process in writers.values() if _parent(process) not in writers]


def _mine() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.uids().real == os.getuid():
                yield process
        except psutil.Error:
            continue


def _written(process: psutil.Process) -> list[str]:
    try:
        return [file.path for file in process.open_files() if file.mode != "r"]
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _rank(process: psutil.Process) -> int | None:
    try:
        text = process.environ().get("RANK", "")
    except (psutil.Error, OSError):
        return None
    return int(text) if text.isdecimal() else None


def _siblings(process: psutil.Process) -> list[psutil.Process]:
    """The other ranks that the same launcher started."""
    if _rank(process) is None:
        return []
    try:
        parent = process.parent()
        children: Iterable[psutil.Process] = parent.children() if parent is not None and parent.pid > 1 else ()
        return [child for child in children if child.pid != process.pid and _rank(child) is not None]
    except psutil.Error:
        return []


def _look(process: psutil.Process, rank: int | None) -> RankProcess | None:
    """What is known of a process; `rank`: as the run tells it."""
    try:
        status = process.status()
        workers = tuple(_bad(process.children()))
    except psutil.Error:
        return None
    stack, why = ((), "") if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED) else stack_of(process.pid)
    return RankProcess(process.pid, _rank(process) if rank is None else rank, status, workers, stack, why)


def _bad(children: Iterable[psutil.Process]) -> Iterator[tuple[int, str]]:
    for child in children:
        try:
            status = child.status()
        except psutil.Error:
            continue
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            yield child.pid, status


def stack_of(pid: int) -> tuple[tuple[str, ...], str]:
    """Frames of a process's main thread by py-spy, and otherwise why there are none."""
    program = shutil.which("py-spy")
    if program is None:
        return (), "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"py-spy gave nothing: {str(error)[:120]}"
    frames = tuple(main_thread(done.stdout.splitlines()))
    return frames, "" if frames else f"py-spy gave nothing: {done.stderr.strip()[-160:] or 'no frames'}"


def main_thread(lines: Iterable[str]) -> Iterator[str]:
    """Frames of the thread MainThread in what `py-spy dump` prints, innermost first; of the first without names."""
    threads: list[tuple[str, list[str]]] = []
    for line in lines:
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head is not None:
            threads.append((head["name"] or "", []))
        elif frame is not None and threads:
            threads[-1][1].append(f"{frame['function']} ({_short(frame['file'])}:{frame['line']})")
    chosen = next((frames for name, frames in threads if name == "MainThread"), threads[0][1] if threads else [])
    yield from chosen


def _short(file: str) -> str:
    """The file with the folder that it is in."""
    return "/".join(Path(file).parts[-2:])


def top(process: RankProcess) -> str:
    """The innermost frames in one line."""
    return " < ".join(process.stack[:_SHOWN])
