"""The folder of a run before and while one process trains in it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bevctl.errors import BevctlError
from bevctl.runs.work_dir import CONSOLE_LOG, LOCK, check_unused, claimed


def test_a_used_folder_is_for_continuing(tmp_path: Path) -> None:
    check_unused(tmp_path / "new", None)
    for name in (CONSOLE_LOG, LOCK):
        (tmp_path / name).touch()
    check_unused(tmp_path, None)
    (tmp_path / "log.txt").touch()
    check_unused(tmp_path, "auto")
    with pytest.raises(BevctlError, match="is not empty"):
        check_unused(tmp_path, None)


@pytest.mark.parametrize("look", [lambda path: check_unused(path, "auto"), lambda path: claimed(path).__enter__()])
def test_a_file_is_no_work_dir(tmp_path: Path, look: object) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BevctlError, match="is not a folder"):
        look(tmp_path / "file")  # type: ignore[operator]


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from bevctl.runs.work_dir import claimed\n"
        "with claimed(Path(sys.argv[1])):\n"
        "    if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "    print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BevctlError, match="Another process trains in"), claimed(tmp_path):
            pytest.fail("two processes hold one folder")
        other.kill()
        other.wait()
    with claimed(tmp_path):  # a loading process of the one that was killed lives on
        (tmp_path / "log.txt").touch()
    assert sorted(os.listdir(tmp_path)) == [LOCK, "log.txt"]


def test_a_file_system_without_locks_trains_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with claimed(tmp_path):
        (tmp_path / "log.txt").touch()
