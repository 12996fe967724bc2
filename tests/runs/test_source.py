"""Files and folders that a run's records come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bevctl.errors import BevctlError, ExitCode
from bevctl.runs import store
from bevctl.runs.lines import LineFile
from bevctl.runs.source import newest_run, open_source
from tests.runs.logs import mmcv_line, mmcv_lines, mmcv_message, write


def test_several_files_of_one_run_are_one_log(tmp_path: Path) -> None:
    write(tmp_path / "20260203_090000.log", [mmcv_line(2, inner, seconds=5000 + inner) for inner in (50, 100)])
    write(tmp_path / "20260203_040506.log", mmcv_lines(10))
    write(tmp_path / "20260203_040506.log.json", ['{"mode": "train", "epoch": 1, "iter": 50, "loss": 1.0}'])
    write(tmp_path / "configs.yaml", ["a: 1"])
    log = open_source(tmp_path).read()
    assert log.format == "mmcv-text", "it has the times"
    assert [path.name for path in log.files] == ["20260203_040506.log", "20260203_090000.log"]
    assert [step.iter for step in log.steps] == [50 * n for n in range(1, 11)]
    assert log.steps[-1].loss == 2.1, "of the later file"
    assert [event.kind for event in log.events] == ["resume"]


def test_what_the_shell_captured_adds_its_failures(tmp_path: Path) -> None:
    write(tmp_path / "20260203_040506.log", mmcv_lines(4))
    crash = [
        "Traceback (most recent call last):",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",
    ]
    write(tmp_path / "nohup.out", [*mmcv_lines(4), *crash])
    log = open_source(tmp_path).read()
    assert [path.name for path in log.files] == ["20260203_040506.log"]
    assert log.records == 4
    (failure,) = log.events
    assert (failure.data["cause"], failure.data["role"], failure.where) == ("worker_killed", "cause", "nohup.out:6")
    assert failure.iter == 200


def test_a_shells_capture_alone_is_the_log(tmp_path: Path) -> None:
    write(tmp_path / "nohup.out", mmcv_lines(4))
    assert open_source(tmp_path).read().records == 4


def test_mmengines_folder(tmp_path: Path) -> None:
    text = "2026/02/03 04:05:06 - mmengine - INFO - Epoch(train) [1][ 50/100]  lr: 2.0e-05  loss: 2.5000"
    numbers = '{"lr": 2e-05, "loss": 2.5, "time": 0.5, "epoch": 1, "iter": 50, "step": 50}'
    write(tmp_path / "20260203_040506" / "20260203_040506.log", [text])
    for name in ("scalars.json", "20260203_040506.json"):
        write(tmp_path / "20260203_040506" / "vis_data" / name, [numbers])
    assert open_source(tmp_path).read().format == "mmengine-text"
    log = open_source(tmp_path / "20260203_040506" / "vis_data").read()
    assert (log.format, [path.name for path in log.files], log.records) == ("mmengine-json", ["scalars.json"], 1)


def test_other_files_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "train.log", mmcv_lines(2))
    write(tmp_path / "notes.txt", ["Epoch of great men", "loss: 3"])
    write(tmp_path / ".hidden" / "other.log", mmcv_lines(9))
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.log").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "epoch_1.pth").write_bytes(b"\x80\x02")
    log = open_source(tmp_path).read()
    assert ([path.name for path in log.files], log.records) == (["train.log"], 2)


def test_what_is_added_is_read_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = ["Traceback (most recent call last):", "RuntimeError: CUDA out of memory."]
    text = "".join(line + "\n" for line in [*mmcv_lines(30), *crash, *mmcv_lines(40)[30:]])
    path = tmp_path / "train.log"
    path.write_text(text[:100])
    source = open_source(path)
    source.read()
    read: list[int] = []
    original = LineFile._raw

    def counted(self: LineFile, start: int, end: int | None) -> Iterator[bytes]:
        for block in original(self, start, end):
            read.append(len(block))
            yield block

    monkeypatch.setattr(LineFile, "_raw", counted)
    for end in (*range(100, len(text), 777), len(text)):
        path.write_text(text[:end])
        grown = source.read()
        fresh = open_source(path).read()
        assert (grown.steps, grown.events, grown.metrics) == (fresh.steps, fresh.events, fresh.metrics)
        assert (grown.records, grown.unknown_lines, grown.last_line) == (
            fresh.records,
            fresh.unknown_lines,
            fresh.last_line,
        )
        assert grown.notes == fresh.notes
    assert fresh.records == 40
    before = sum(read)
    source.read()
    assert sum(read) == before, "nothing was added"


def test_a_log_that_starts_anew_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "train.log", mmcv_lines(8))
    source = open_source(path)
    assert source.read().records == 8
    write(path, mmcv_lines(3))
    assert source.read().records == 3
    path.unlink()
    write(path, mmcv_lines(9))
    assert source.read().records == 9


def test_a_resumed_run_begins_another_file(tmp_path: Path) -> None:
    write(tmp_path / "20260203_040506.log", mmcv_lines(8))
    source = open_source(tmp_path)
    assert source.read().records == 8
    write(tmp_path / "20260203_090000.log", [mmcv_line(2, 50, seconds=9000)])
    assert source.read().records == 9
    write(tmp_path / "20260203_090000.log", [mmcv_line(2, inner, seconds=9000 + inner) for inner in (50, 100)])
    assert source.read().records == 10


def test_a_thinned_log_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEEP", 10)
    source = open_source(write(tmp_path / "train.log", mmcv_lines(1)))
    for count in (1, 5, 12, 13, 40, 100):
        write(tmp_path / "train.log", mmcv_lines(count))
        log = source.read()
        assert (log.records, log.metrics["loss"].count, log.metrics["loss"].max) == (count, count, count)
        assert log.steps[-1].loss == count


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00\x01\x02", b"\x1f\x8b", b"\xff\xfe", b"PK\x03\x04"])
def test_a_file_without_a_log_in_it_has_no_records(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    log = open_source(path).read()
    assert (log.records, log.steps, log.events) == (0, [], [])


def _loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "missing.log", "No such file"),
        (_loop, "symbolic links"),
        (_pipe, "neither a file nor a folder"),
        (_empty, "No log is in"),
        (lambda folder: folder / "a\0b", "cannot be read"),
        (lambda folder: folder / ("x" * 5000), "too long"),
    ],
)
def test_what_is_no_log_is_told_in_a_sentence(tmp_path: Path, make: object, says: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(BevctlError, match=says) as caught:
        open_source(path)
    assert caught.value.code == ExitCode.USAGE
    assert caught.value.hint


def test_a_file_that_goes_away_while_it_is_watched(tmp_path: Path) -> None:
    path = write(tmp_path / "train.log", mmcv_lines(2))
    source = open_source(path)
    path.unlink()
    with pytest.raises(BevctlError, match="cannot be read"):
        source.read()
    with pytest.raises(BevctlError, match="cannot be read"):
        source.last_time()


def test_the_newest_run(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    for number, name in enumerate(("a", "b/c", "d")):
        log = write(tmp_path / name / "log.jsonl", [])
        os.utime(log, (1e9 + (number == 1), 1e9 + (number == 1)))
    assert newest_run(tmp_path) == tmp_path / "b" / "c"


def test_windows_of_a_run_in_several_files(tmp_path: Path) -> None:
    write(tmp_path / "1.log", [mmcv_message(0, "Distributed training: True"), *mmcv_lines(8)])
    write(tmp_path / "2.log", [mmcv_line(2, inner, seconds=9000 + inner) for inner in (50, 100)])
    os.utime(tmp_path / "1.log", (1e9, 1e9))
    source = open_source(tmp_path)
    last = source.last_time()
    assert last is not None
    log = source.read(since=last - 3600)
    assert [step.iter for step in log.steps] == [450, 500]
    assert log.header["env"] == {"Distributed training": "True"}
