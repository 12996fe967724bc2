"""Checks of section "system": disk, memory, cores and limits of the machine or container."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import bevctl
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.gpu_selection import gpus_in_use
from bevctl.preflight.host import cores, memory_available
from bevctl.preflight.needs import NotKnown, checkpoint_bytes, sample_bytes
from bevctl.runs.work_dir import is_used
from bevctl.sizes import format_gb, format_gib

_LOG_BYTES = 200_000_000
"""Room for logs, events and pictures of a run."""
_FREE_INODES = 1000
_PREFETCH = 2
"""Batches that each loading process keeps ready."""
_WORKER_BYTES = 600 * 2**20
"""Memory of a loading process: Python, torch and what it decodes."""
_MAIN_BYTES = 3 * 2**30
"""Host memory of a training process with CUDA loaded."""
_CPU_MAIN_BYTES = 2**30
_FILES_A_SAMPLE = 20
"""Tensors of a sample that travel between processes, each as an open file."""
_FILES_BASE = 256


def disk_space(context: Context) -> Outcome:
    """Free bytes for this user on the work_dir's filesystem."""
    folder = existing(context.work_dir)
    free = shutil.disk_usage(folder).free
    found = f"{format_gb(free)} free on the filesystem of {folder}"
    try:
        need, reason = _disk_need(context)
    except NotKnown as error:
        return unknown(f"{found}; the need is not known: {error}", "Say it with --min-free.", advisory=True)
    required = f"{format_gb(need)}: {reason}"
    if free < need:
        return failed(found, "Free some space, lower train.keep, or choose another --work-dir.", required=required)
    return passed(found, required=required)


def _disk_need(context: Context) -> tuple[int, str]:
    if context.min_free is not None:
        return context.min_free, "--min-free"
    size = context.once(checkpoint_bytes)
    kept = context.config.train.keep if context.config else 1
    # Beside the kept ones: the best, the file being written, and one that is deleted only after it.
    count = kept + 3
    return count * size + _LOG_BYTES, f"{count} checkpoints of {format_gb(size)} and logs"


def inodes(context: Context) -> Outcome:
    """Files that may still be made there."""
    status = os.statvfs(existing(context.work_dir))
    if status.f_files == 0:
        return passed("this filesystem has no fixed number of files")
    found = f"{status.f_favail:,} free"
    if status.f_favail < _FREE_INODES:
        return failed(found, "Delete small files on that filesystem, or choose another --work-dir.")
    return passed(found)


def writable(context: Context) -> Outcome:
    """A file is really written and removed again, in the work_dir or in the folder where it will be made."""
    work_dir, folder = context.work_dir, existing(context.work_dir)
    obstacle = _obstacle(work_dir)
    if obstacle:
        return failed(obstacle, "Choose another --work-dir.")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".bevctl-preflight-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failed(f"{folder}: {error.strerror or error}", "Choose another --work-dir, or have it made writable.")
    if folder == work_dir and context.resume is None and is_used(folder):
        return warned(
            f"{work_dir} can be written, but is not empty: bevctl train refuses it",
            "Continue that run with --resume auto, or choose another --work-dir.",
        )
    return passed(f"wrote and removed a file in {folder}")


def _obstacle(work_dir: Path) -> str:
    """What stands where the work_dir, or a folder above it, should be; empty: nothing does."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            work_dir.lstat()
    except OSError as error:
        return f"{str(work_dir)!r:.80}: {error.strerror}"
    for path in (work_dir, *work_dir.absolute().parents):
        if os.path.lexists(path) and not os.path.isdir(path):
            return f"{path} is {'a link to nothing' if path.is_symlink() else 'not a folder'}"
    return ""


def quota(context: Context) -> Outcome:
    """What `quota` says about this user; many network filesystems show free space that a quota does not grant."""
    program = shutil.which("quota")
    if program is None:
        return unknown("the program quota is not installed")
    done = subprocess.run(
        [program, "-w", "-p"], capture_output=True, text=True, timeout=0.9 * context.timeout, check=False
    )
    rows = [row for row in map(_quota_row, done.stdout.splitlines()) if row is not None]
    full = [f"{name}: {format_gb(used)} of {format_gb(limit)} used" for name, used, limit in rows if used >= limit]
    if full:
        return failed("; ".join(full), "Free some space below the quota, or choose another --work-dir.")
    shown = [f"{name}: {format_gb(limit - used)} left" for name, used, limit in rows]
    return passed("; ".join(shown) or "no quota for this user")


def _quota_row(line: str) -> tuple[str, int, int] | None:
    """(filesystem, bytes used, bytes allowed) of a line of `quota -w`, whose blocks are KiB; None for other lines."""
    words = line.split()
    numbers = [word.rstrip("*") for word in words[1:4]]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, soft, hard = (1024 * int(number) for number in numbers)
    return (words[0], used, hard or soft) if hard or soft else None


def shared_memory(context: Context, folder: Path = Path("/dev/shm")) -> Outcome:
    """Loading processes hand their batches over in /dev/shm."""
    if context.workers == 0:
        return skipped("no loading processes (train.workers is 0)")
    if not folder.is_dir():
        return failed(f"there is no {folder}", "Mount it (tmpfs), or use --workers 0.")
    free = shutil.disk_usage(folder).free
    found = f"{format_gib(free)} free"
    try:
        need = _batches_in_flight(context) * context.batch * context.once(sample_bytes)
    except NotKnown as error:
        return unknown(f"{found}; the need is not known: {error}", advisory=True)
    required = (
        f"{format_gib(need)}: {_batches_in_flight(context)} batches of {context.batch} samples "
        f"of about {format_gib(context.once(sample_bytes))}"
    )
    if free < need:
        fix = "Give the container more (docker run --shm-size=16g, or --ipc=host), or lower --workers."
        return failed(found, fix, required=required)
    return passed(found, required=required)


def _batches_in_flight(context: Context) -> int:
    return (context.gpus or 1) * context.workers * _PREFETCH


def open_files(context: Context) -> Outcome:
    """Each tensor that a loading process hands over is an open file of the training process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _FILES_BASE + context.workers * _PREFETCH * context.batch * _FILES_A_SAMPLE
    required = f"{need} for {context.workers} loading processes with batches of {context.batch}"
    if soft == resource.RLIM_INFINITY:
        return passed("no limit", required=required)
    found = f"{soft} (ulimit -n)"
    if soft < need:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return failed(
            found, f"ulimit -n {max(need, 65536)} before the start; the hard limit is {most}.", required=required
        )
    return passed(found, required=required)


def host_memory(context: Context) -> Outcome:
    """Memory of the training and loading processes, against what the machine or container has left."""
    available = memory_available()
    found = f"{format_gib(available.value)} available ({available.source})"
    gpus = context.gpus or 1
    main = _MAIN_BYTES if context.once(gpus_in_use).used else _CPU_MAIN_BYTES
    need = gpus * (main + context.workers * _WORKER_BYTES)
    required = f"about {format_gib(need)} for {gpus} training and {gpus * context.workers} loading processes"
    fix = "Lower --workers, or give the machine or container more memory."
    if available.value < need / 2:
        return failed(found, fix, required=required)
    if available.value < need:
        return warned(found, fix, required=required)
    return passed(found, required=required)


def cpu_cores(context: Context) -> Outcome:
    """A core for each loading process keeps the GPUs fed; a training process mostly waits."""
    have = cores()
    gpus = context.gpus or 1
    need = gpus * max(1, context.workers)
    found = f"{have.value:g} cores ({have.source})"
    required = f"{need}, for {gpus} x {context.workers} loading processes"
    if have.value < need:
        return warned(found, f"Use --workers {int(have.value // gpus)}.", required=required)
    return passed(found, required=required)


def clock(context: Context) -> Outcome:
    """A clock that is behind, or that nothing keeps in step, makes logs and file ages of several machines lie."""
    newest = Path(bevctl.__file__).stat().st_mtime
    now = time.time()
    if now < newest - 60:
        return warned(f"{time.ctime(now)}, before bevctl was installed ({time.ctime(newest)})", "Set the clock (NTP).")
    program = shutil.which("timedatectl")
    if program is None:
        return unknown("plausible; whether it is kept in step cannot be seen here")
    answer = subprocess.run(
        [program, "show", "--property=NTPSynchronized", "--value"],
        capture_output=True,
        text=True,
        timeout=0.9 * context.timeout,
        check=False,
    ).stdout.strip()
    if answer == "yes":
        return passed("kept in step by NTP")
    if answer == "no":
        return warned("not kept in step by NTP", "timedatectl set-ntp true, or start chrony.")
    return unknown("plausible; whether it is kept in step cannot be seen here")


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there: where it would be made."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if os.path.isdir(folder))


CHECKS = (
    CheckSpec(
        "SYS001",
        "disk space",
        disk_space,
        why="a full disk ends the run at its next checkpoint",
    ),
    CheckSpec(
        "SYS002",
        "inodes",
        inodes,
        required=f"{_FREE_INODES:,} free",
        why="without free inodes no file can be made, however much space df shows",
    ),
    CheckSpec(
        "SYS003",
        "work_dir can be written",
        writable,
        required="a folder of its own, or a place where it can be made",
        why="a run that cannot write loses its first checkpoint",
    ),
    CheckSpec(
        "SYS004",
        "quota",
        quota,
        required="space left below the quota",
        why='"Disk quota exceeded" ends a run although df shows space',
        advisory=True,
        at_start=False,
    ),
    CheckSpec(
        "SYS005",
        "/dev/shm",
        shared_memory,
        why='loading processes die with "bus error" when it is full; containers get 64 MB by default',
    ),
    CheckSpec(
        "SYS006",
        "open files",
        open_files,
        why='loading stops with "too many open files"',
    ),
    CheckSpec(
        "SYS007",
        "host memory",
        host_memory,
        why='the kernel kills loading processes: "DataLoader worker is killed by signal: Killed"',
    ),
    CheckSpec(
        "SYS008",
        "CPU cores",
        cpu_cores,
        why="with fewer cores than processes the GPUs wait for data",
    ),
    CheckSpec(
        "SYS009",
        "clock",
        clock,
        required="plausible and kept in step",
        why="records and file ages of several machines cannot be compared",
        advisory=True,
        at_start=False,
    ),
)
