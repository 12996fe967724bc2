"""Real processes for the tests: children that sleep, with and without a parent, and a /proc that gives them a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({{ready!r}}, 'w').close(); {SLEEP}"


def script(folder: Path, code: str = SLEEP, name: str = "train.py") -> Path:
    """A file `tools/<name>` with `code`."""
    path = folder / "tools" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    return path


@contextlib.contextmanager
def orphan(*words: str) -> Iterator[int]:
    """The pid of a running `python WORDS` whose parent, a shell, has ended."""
    command = 'trap "" HUP; "$@" > /dev/null 2>&1 < /dev/null & echo $!'
    told = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, *words], capture_output=True, text=True, check=True
    )
    pid = int(told.stdout)
    try:
        _wait_for_python(pid)
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


SUBREAPER = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
subprocess.run(["sh", "-c", '"$@" & echo $!', "sh", *sys.argv[1:]], start_new_session=True)
time.sleep(60)
"""


@contextlib.contextmanager
def adopted(folder: Path, *words: str) -> Iterator[int]:
    """The pid of a running `python WORDS` that a subreaper took over, as agents in containers do."""
    command = [sys.executable, str(script(folder, SUBREAPER, "agent.py")), sys.executable, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        try:
            _wait_for_python(pid)
            _wait(lambda: psutil.Process(pid).ppid() == agent.pid, "the subreaper did not take over")
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)
            agent.kill()


@contextlib.contextmanager
def child(*words: str) -> Iterator[int]:
    """The pid of a running `python WORDS` whose parent is this process."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for_python(process.pid)
            yield process.pid
        finally:
            process.kill()


def fake_proc(root: Path, opened: dict[int, int], *, cuda: bool = True) -> Path:
    """A /proc in which each pid has the GPU device file of that minor number open (-1: none), and CUDA loaded."""
    for pid, minor in opened.items():
        files = root / str(pid) / "fd"
        files.mkdir(parents=True)
        (files / "0").symlink_to("/dev/null")
        if minor >= 0:
            (files / "7").symlink_to(f"/dev/nvidia{minor}")
            (files / "8").symlink_to("/dev/nvidiactl")
        library = "/usr/lib/libcuda.so.570.86" if cuda else "/usr/lib/libnvidia-ml.so.1"
        (root / str(pid) / "maps").write_text(f"7f00-7f01 r-xp 0 0:0 0 {library}\n")
    return root


def wait_for(path: Path) -> None:
    """Until the process says through this file that it is ready."""
    _wait(path.exists, f"{path} did not appear")


def _wait_for_python(pid: int) -> None:
    _wait(lambda: psutil.Process(pid).cmdline()[:1] == [sys.executable], f"process {pid} did not become Python")


def _wait(ready: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)
