"""Ends orphaned training processes that hold GPU memory: only this user's, only those that nobody looks after."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from bevctl.errors import BevctlError, ExitCode
from bevctl.preflight.nvml import Gpu, NotReported, NvmlUnavailable, read_driver
from bevctl.preflight.processes import Holder, Process

GRACE_S = 30.0
"""From SIGTERM to SIGKILL; a bevctl run writes a checkpoint within 25 s."""
_KILL_S = 10.0
_RELEASE_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Ended:
    """What became of one process."""

    pid: int
    signal: str
    """The last signal it was sent: SIGTERM or SIGKILL."""
    gone: bool
    released: dict[int, int | None]
    """Bytes of GPU memory that came free, by GPU index; None where the driver does not tell."""


def present_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; none where there is no driver.

    Raises BevctlError (exit code 3) when there is a driver and it does not answer.
    """
    try:
        return read_driver().gpus
    except NvmlUnavailable as error:
        if not error.present:
            return ()
        raise BevctlError(f"Cannot see who holds GPU memory: {error.reason}.", error.fix, ExitCode.UNKNOWN) from error


def reapable(held: Sequence[Holder], pids: Collection[int] = ()) -> list[Holder]:
    """Those of `held` that may be ended: this user's orphaned training processes, or those with one of `pids`.

    Raises BevctlError for one of `pids` that is not this user's, has a living parent, or holds no GPU memory.
    """
    if not pids:
        return [h for h in held if h.is_orphan and h.process is not None and h.process.mine and not h.process.zombie]
    by_pid = {holder.pid: holder for holder in held}
    for pid in pids:
        reason = _reason_to_refuse(by_pid.get(pid))
        if reason:
            raise BevctlError(f"--pid {pid}: {reason}.", "Without --pid, --reap lists what it would end.")
    return [by_pid[pid] for pid in sorted(set(pids))]


def _reason_to_refuse(holder: Holder | None) -> str:
    if holder is None or holder.process is None:
        return "no process that can be seen here holds GPU memory under this number"
    process = holder.process
    if not process.mine:
        return f"it belongs to user {process.user}"
    if process.zombie:
        return f"it is dead already; its parent {process.parent} ({process.parent_name}) has to collect it"
    if not process.adopted:
        return f"it is not orphaned, its parent {process.parent} ({process.parent_name}) is alive; stop it there"
    return ""


def reap(targets: Sequence[Holder], grace_s: float = GRACE_S) -> list[Ended]:
    """End `targets` and their children: SIGTERM, after `grace_s` SIGKILL; then see whether their memory came free."""
    before = _free_by_gpu(present_gpus())
    processes = [process for process in (_same(holder.process) for holder in targets) if process is not None]
    children = [child for process in processes for child in _children(process)]
    killed = _stop(processes, children, grace_s)
    after = _wait_for_release({holder.pid for holder in targets}, before)
    return [
        Ended(
            holder.pid,
            "SIGKILL" if holder.pid in killed else "SIGTERM",
            not any(process.pid == holder.pid and _alive(process) for process in processes),
            {index: _difference(after.get(index), before.get(index)) for index in holder.memory},
        )
        for holder in targets
    ]


def _same(seen: Process | None) -> psutil.Process | None:
    """The process that was looked at, unless it has ended and its pid now belongs to another one."""
    try:
        process = psutil.Process(seen.pid) if seen else None
        return process if process and seen and process.create_time() == seen.created else None
    except psutil.NoSuchProcess:
        return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _stop(processes: Sequence[psutil.Process], children: Sequence[psutil.Process], grace_s: float) -> set[int]:
    """Signal `processes`, and `children` that outlive them; returns the pids that needed SIGKILL."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _wait(lambda: any(map(_alive, processes)), grace_s)
    stubborn = [process for process in (*processes, *children) if _alive(process)]
    for process in stubborn:
        _signal(process, signal.SIGKILL)
    _wait(lambda: any(map(_alive, stubborn)), _KILL_S)
    return {process.pid for process in stubborn}


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie has let go of its memory, and may wait for ever for its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(unfinished: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while unfinished() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _wait_for_release(pids: Collection[int], before: Mapping[int, int]) -> dict[int, int]:
    """Free bytes by GPU once none of `pids` is listed and more is free than `before`, or after a while."""
    gpus: tuple[Gpu, ...] = ()

    def held() -> bool:
        nonlocal gpus
        gpus = present_gpus()
        listed = {entry.pid for gpu in gpus if not isinstance(gpu.processes, NotReported) for entry in gpu.processes}
        return bool(listed & set(pids)) or _free_by_gpu(gpus) == dict(before)

    if before:
        _wait(held, _RELEASE_S)
    return _free_by_gpu(gpus)


def _free_by_gpu(gpus: Sequence[Gpu]) -> dict[int, int]:
    return {gpu.index: gpu.memory.free for gpu in gpus if not isinstance(gpu.memory, NotReported)}


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
