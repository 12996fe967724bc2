"""Moments and windows: how they are written, and how they are found in a long log."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.errors import BevctlError
from bevctl.runs import index
from bevctl.runs.index import LogIndex, cache_folder, find_window, load_index
from bevctl.runs.source import open_source
from bevctl.runs.window import Window, parse_duration, parse_moment
from tests.runs.logs import START, mmcv_line, mmcv_message, moment

NOW = time.mktime((2026, 2, 3, 12, 0, 0, 0, 0, -1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h", 3600), ("2d", 172800), ("1h30m", 5400), ("1.5 h", 5400), ("1W", 604800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_moment(text, NOW) == NOW - seconds


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-02-03T04:05:06", START.replace(microsecond=0).timestamp()),
        ("2026-02-03 04:05:06,789", START.timestamp()),
        ("2026/02/03 04:05:06", START.replace(microsecond=0).timestamp()),
        ("2026-02-03T03:00:00Z", 1770087600.0),
        ("2026-02-03T03:00:00+02:00", 1770080400.0),
        ("11:30", NOW - 1800),
        ("12:30:15", NOW + 1815 - 86400),
        ("1770087600", 1770087600.0),
    ],
)
def test_timestamps(text: str, moment: float) -> None:
    assert parse_moment(text, NOW) == pytest.approx(moment)


@pytest.mark.parametrize("text", ["", "soon", "1x", "-1h", "25:00", "2026-13-01", "h", "1h 5"])
def test_what_is_no_moment_is_told(text: str) -> None:
    with pytest.raises(BevctlError, match="neither a duration nor a time"):
        parse_moment(text, NOW)


@given(st.text(max_size=12))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(BevctlError):
        assert isinstance(parse_moment(text, NOW), float)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_window_holds_what_is_in_it(since: float, until: float, time: float) -> None:
    assert Window(since, until).holds(time) == (since <= time <= until)
    assert Window(since).holds(time) == (time >= since)
    assert Window().holds(time)
    assert Window(since, until).holds(None)


def _long_log(path: Path, count: int, times: list[float] | None = None) -> Path:
    """A log of about 270 bytes a line, one every 20 s."""
    with path.open("w") as file:
        file.write(mmcv_message(-1, "workflow: [('train', 1)], max: 900 epochs") + "\n")
        for number in range(count):
            at = 20.0 * number if times is None else times[number]
            epoch, window = divmod(number, 8)
            file.write(mmcv_line(epoch + 1, 50 * (window + 1), seconds=at, loss=f"{number}.0000") + "\n")
            if number % 500 == 250:
                file.write("Formatting\n" * 40)
    return path


def _expected(times: list[float], since: float | None, until: float | None) -> list[int]:
    return [n for n, t in enumerate(times) if (since is None or t >= since) and (until is None or t <= until)]


COUNT = 12_000


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _long_log(tmp_path_factory.mktemp("long") / "train.log", COUNT)


@pytest.mark.parametrize(
    ("since", "until"),
    [(-3600.0, None), (None, 1000.0), (100_000.0, 110_000.0), (-1.0, None), (1e9, None), (None, -1e9), (0.0, 0.0)],
)
def test_a_window_of_a_long_log_is_what_a_full_read_has_in_it(
    long_log: Path, since: float | None, until: float | None
) -> None:
    times = [20.0 * number for number in range(COUNT)]
    if since is not None and since < 0:
        since = times[-1] + since
    start, end = (None if t is None else START.timestamp() + t for t in (since, until))
    log = open_source(long_log).read(start, end)
    expected = _expected(times, since, until)
    assert log.records == len(expected)
    if len(expected) <= 10_000:
        assert [step.loss for step in log.steps] == expected
    assert log.max_epochs == 900, "the head of the log is read too"
    assert log.iters_per_epoch == 400


def test_only_a_part_of_a_long_log_is_read(long_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bevctl.runs.lines import LineFile

    read: list[int] = []
    original = LineFile._raw

    def counted(self: LineFile, start: int, end: int | None) -> Iterator[bytes]:
        for block in original(self, start, end):
            read.append(len(block))
            yield block

    monkeypatch.setattr(LineFile, "_raw", counted)
    source = open_source(long_log)
    source.read(since=START.timestamp() + 20.0 * COUNT - 3600)
    assert sum(read) < 0.5 * long_log.stat().st_size
    monkeypatch.setattr(index, "_probe", None)
    assert source.read(since=START.timestamp() + 20.0 * COUNT - 3600).records == 180, "the second time by the index"


@pytest.mark.parametrize("back_s", [3600.0, 86400.0])
def test_a_clock_that_was_set_back_loses_no_records(tmp_path: Path, back_s: float) -> None:
    times = [20.0 * n - (back_s if n > 7000 else 0.0) for n in range(10_000)]
    path = _long_log(tmp_path / "train.log", len(times), times)
    for since in (times[-1] - 3600, times[7000] - 1000, times[7000] + 1000, times[-1] + 1):
        log = open_source(path).read(START.timestamp() + since)
        assert log.records == len(_expected(times, since, None))


def test_the_index_follows_a_log_that_grows_and_forgets_one_that_is_replaced(tmp_path: Path) -> None:
    path = _long_log(tmp_path / "train.log", 6000)
    since = START.timestamp() + 20.0 * 5900
    assert open_source(path).read(since).records == 100
    known = load_index(path)
    assert known.anchors
    assert not known.changed
    with path.open("a") as file:
        for number in range(6000, 6050):
            file.write(mmcv_line(900, 50, seconds=20.0 * number) + "\n")
    grown = load_index(path)
    assert grown.anchors == known.anchors
    assert grown.changed
    path.write_text(path.read_text().replace("mmdet3d", "another"))
    assert load_index(path).anchors == []


def test_the_index_lies_in_the_users_cache_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = _long_log(tmp_path / "run" / "train.log", 3000)
    before = sorted(os.listdir(path.parent))
    open_source(path).read(START.timestamp() + 50_000)
    assert sorted(os.listdir(path.parent)) == before
    (kept,) = (tmp_path / "cache").iterdir()
    document = json.loads(kept.read_text())
    assert document["path"] == str(path)
    assert len(kept.read_text()) < 10_000


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"version": 1}', '{"version": 1, "path": 3, "anchors": "x"}'])
def test_a_broken_index_is_made_anew(tmp_path: Path, content: str) -> None:
    path = _long_log(tmp_path / "train.log", 3000)
    since = START.timestamp() + 50_000
    expected = open_source(path).read(since).records
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(content)
    assert open_source(path).read(since).records == expected


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    path = _long_log(tmp_path / "train.log", 3000)
    assert open_source(path).read(START.timestamp() + 59_000).records == 50


@given(st.lists(st.integers(0, 50), min_size=1, max_size=400), st.integers(0, 50), st.integers(0, 50))
def test_the_part_holds_the_window_whatever_the_clock_did(times: list[int], since: int, until: int) -> None:
    """A file is played by its lines: one line is one byte, every line is probed."""
    found = LogIndex(Path("none"), len(times), 0)
    found.anchors = [(offset, float(time)) for offset, time in enumerate(times)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_NEAR", 1)
        patch.setattr(index, "_probe", lambda *_: None)
        start, end = find_window(found, lambda _: None, Window(float(since), float(until)))
    inside = [offset for offset, time in enumerate(times) if since <= time <= until]
    assert all(start <= offset < end for offset in inside)


def test_the_last_time_of_a_log(tmp_path: Path, long_log: Path) -> None:
    assert open_source(long_log).last_time() == moment(20.0 * (COUNT - 1)).timestamp()
    path = tmp_path / "run.log.json"
    path.write_text('{"mode": "train", "epoch": 1, "iter": 50, "loss": 1.0, "time": 0.5}\n')
    assert open_source(path).last_time() == path.stat().st_mtime


def test_the_cache_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "bevctl" / "logs"
    monkeypatch.setattr("sys.platform", "win32")
    assert cache_folder() == tmp_path / "local" / "bevctl" / "logs"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "bevctl" / "logs"
