"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bevctl import files
from bevctl.errors import BevctlError
from bevctl.files import atomic_path, atomic_write_bytes, atomic_write_text, check_writable


def test_the_content_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    atomic_write_text(target, "first")
    atomic_write_text(target, "größer ×2")
    assert target.read_text(encoding="utf-8") == "größer ×2"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_folders_are_made(tmp_path: Path) -> None:
    atomic_write_bytes(tmp_path / "new" / "deep" / "b.bin", b"\x00\x01")
    assert (tmp_path / "new" / "deep" / "b.bin").read_bytes() == b"\x00\x01"


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        assert target.read_text() == "old"
        assert temporary.parent == tmp_path
    assert target.read_text() == "half"


@pytest.mark.parametrize("failure", [RuntimeError("writer"), KeyboardInterrupt()])
def test_a_failing_writer_leaves_the_old_file_alone(tmp_path: Path, failure: BaseException) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(BevctlError, match="is a pipe or a device"):
            atomic_write_text(path, "x")
    assert os.listdir(tmp_path) == ["pipe"]


def test_an_error_names_the_file_and_not_its_temporary(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught, atomic_path(tmp_path / "a.txt"):
        pass  # nothing is written, so that there is nothing to flush
    assert caught.value.filename == str(tmp_path / "a.txt")


class TestCheckWritable:
    def test_files_and_folders_that_are_there_or_not(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").touch()
        for name in ("a.txt", "b.txt", "new/deep/c.txt"):
            check_writable(tmp_path / name)
        for name in (".", "new/deep"):
            check_writable(tmp_path / name, folder=True)
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_what_is_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").touch()
        with pytest.raises(BevctlError, match="is a folder"):
            check_writable(tmp_path)
        with pytest.raises(BevctlError, match="is not a folder"):
            check_writable(tmp_path / "a.txt", folder=True)
        with pytest.raises(BevctlError, match=r"b\.txt cannot be written: .*a\.txt is not a folder"):
            check_writable(tmp_path / "a.txt" / "b.txt")
        with pytest.raises(BevctlError, match="is a pipe or a device"):
            check_writable("/dev/null")

    def test_a_folder_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(BevctlError, match=f"{tmp_path} is not writable for you"):
            check_writable(tmp_path / "new" / "b.txt")
        with pytest.raises(BevctlError, match="is not writable for you"):
            check_writable(tmp_path, folder=True)


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a.txt", "x")
    (tmp_path / "plain.txt").write_text("x")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode
