"""The file in which each rank says what it is at: written in place, and believed only where it is true."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bevctl.runs import heartbeat
from bevctl.runs.heartbeat import Heartbeat, read_beats
from bevctl.runs.records import Beat, Doing

STARTED = 1.79e9 + 0.123456
RUN = {"segments": [{"started": 1.7e9, "world": 8}, {"started": STARTED, "world": 2}]}
BEAT: dict[str, Any] = {
    "rank": 1,
    "host": "node-1",
    "pid": 4711,
    "started": STARTED,
    "turn": 3000,
    "iteration": 812,
    "doing": "waits for data",
    "time": STARTED + 60,
}


def _refuse(sentence: str) -> None:
    raise AssertionError(sentence)


def _beats(folder: Path, rank: int = 0) -> Heartbeat:
    return Heartbeat(folder, rank, STARTED, _refuse)


def _write(folder: Path, content: dict[str, Any] | bytes, name: str = "1.json") -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def test_a_rank_says_what_it_is_at(tmp_path: Path) -> None:
    with _beats(tmp_path, rank=1) as beats:
        assert [b.doing for b in read_beats(tmp_path, RUN)] == [Doing.STARTS]
        before = time.time()
        beats.turn_to(Doing.GRADIENTS, 812)
        (beat,) = read_beats(tmp_path, RUN)
        text = (tmp_path / "ranks" / "1.json").read_bytes()
    assert beat == Beat(1, socket.gethostname(), os.getpid(), STARTED, 2, 812, Doing.GRADIENTS, beat.time)
    assert before <= beat.time <= time.time()
    assert (len(text), text.rstrip(b"\n").count(b"\n")) == (512, 0), "one line, padded"
    (last,) = read_beats(tmp_path, RUN)
    assert (last.doing, last.iteration, last.turn) == (Doing.LEFT, 812, 3)


def test_an_iteration_that_gets_shorter_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    with _beats(tmp_path) as beats:
        for iteration in (123_456_789, 7):
            beats.turn_to(Doing.GRADIENTS, iteration)
            assert [beat.iteration for beat in read_beats(tmp_path, RUN)] == [iteration]


@pytest.mark.parametrize(
    ("doing", "several", "place"),
    [
        (Doing.STARTS, "start", ""),
        (Doing.DATA, "wait for data", "in iteration 7"),
        (Doing.DEVICE, "wait for the device", "in iteration 7"),
        (Doing.SAVES, "save a checkpoint", "after iteration 7"),
        (Doing.EVALUATES, "evaluate", "after iteration 7"),
        (Doing.LEFT, "left the training", "in iteration 7"),
    ],
)
def test_words(doing: Doing, several: str, place: str) -> None:
    assert (doing.plural, Beat(0, "", 1, 0.0, 1, 7, doing, 0.0).place) == (several, place)


def test_only_ranks_of_the_present_start_are_believed(tmp_path: Path) -> None:
    for rank, started in ((0, STARTED), (1, STARTED - 1e-6), (2, STARTED)):
        _write(tmp_path, {**BEAT, "rank": rank, "started": started}, f"{rank}.json")
    assert [beat.rank for beat in read_beats(tmp_path, RUN)] == [0], "1 is of another start, 2 is not in a world of 2"
    _write(tmp_path, BEAT, "1.json")
    assert [beat.rank for beat in read_beats(tmp_path, RUN)] == [0, 1]
    assert read_beats(tmp_path, {"segments": []}) == read_beats(tmp_path / "none", RUN) == []


def test_a_process_of_an_earlier_start_does_not_speak_for_the_present_one(tmp_path: Path) -> None:
    old = Heartbeat(tmp_path, 0, 1.7e9, _refuse)
    with old, _beats(tmp_path) as new:
        new.turn_to(Doing.DATA, 5)
        old.turn_to(Doing.SAVES, 99)
        assert [(beat.iteration, beat.doing) for beat in read_beats(tmp_path, RUN)] == [(5, Doing.DATA)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", 0),
        ("rank", True),
        ("pid", "4711"),
        ("turn", -1),
        ("iteration", 1.5),
        ("host", None),
        ("started", None),
        ("time", float("nan")),
        ("doing", "sleeps"),
        ("doing", []),
    ],
)
def test_what_is_no_beat_is_passed_over(tmp_path: Path, key: str, value: object) -> None:
    _write(tmp_path, BEAT)
    assert len(read_beats(tmp_path, RUN)) == 1
    _write(tmp_path, {**BEAT, key: value})
    assert read_beats(tmp_path, RUN) == []
    _write(tmp_path, {name: entry for name, entry in BEAT.items() if name != key})
    assert read_beats(tmp_path, RUN) == []


def test_folders_and_pipes_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "ranks" / "0.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "ranks" / "1.json")
    assert read_beats(tmp_path, RUN) == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=600) | st.recursive(st.none(), st.lists).map(lambda value: json.dumps(value).encode()))
def test_garbage_is_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(heartbeat, "_BETWEEN_READS_S", 0.0)
    _write(tmp_path, content)
    assert read_beats(tmp_path, RUN) == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 511), st.integers(0, 10**9), st.integers(0, 10**9), st.sampled_from(Doing))
def test_half_a_beat_is_never_another_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, before: int, after: int, doing: Doing
) -> None:
    monkeypatch.setattr(heartbeat, "_BETWEEN_READS_S", 0.0)
    old, new = (
        json.dumps({**BEAT, "turn": number, "iteration": number, "doing": word.value}).encode().ljust(512, b"\n")
        for number, word in ((before, Doing.GRADIENTS), (after, doing))
    )
    _write(tmp_path, new[:cut] + old[cut:])
    for beat in read_beats(tmp_path, RUN):
        assert (beat.rank, beat.pid, beat.started) == (1, 4711, STARTED)


def test_a_reader_that_meets_half_a_beat_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, json.dumps(BEAT).encode()[:40])
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: _write(tmp_path, BEAT))
    assert [beat.iteration for beat in read_beats(tmp_path, RUN)] == [812]


def test_a_full_disk_is_told_once_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    calls = [0]

    def full(*_: Any) -> int:
        calls[0] += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Heartbeat(tmp_path, 0, STARTED, told.append) as beats:
        monkeypatch.setattr(heartbeat.os, "pwrite", full)
        for iteration in range(3):
            beats.turn_to(Doing.DATA, iteration)
    assert len(told) == calls[0] == 1
    assert "0.json cannot be written (No space left on device)" in told[0]


def test_a_warning_that_cannot_be_kept_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("no folder")
    told: list[str] = []

    def full(sentence: str) -> None:
        told.append(sentence)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Heartbeat(tmp_path, 0, STARTED, full) as beats:
        beats.turn_to(Doing.DATA, 1)
    assert len(told) == 1
    assert read_beats(tmp_path, RUN) == []
