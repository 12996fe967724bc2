"""`diagnose hang` by the last words of the ranks: the one that the others wait for is named, from any machine."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.diagnose import hang, rank_processes
from bevctl.diagnose.rank_beats import culprit, last_words, names, standing
from bevctl.diagnose.report import Diagnosis, Status
from bevctl.runs.records import Beat, Doing
from tests.conftest import Outcome

from .cases import ask, evidence, found, own_run, the

MINUTE = 60.0
RECORDS = 60
LAST = 1.79e9 + RECORDS - 1
"""Unix time of the last record of `own_run`."""
STARTED = 1.79e9 - 5.5
ELSEWHERE = "node-7"


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "live_gpus", tuple)
    monkeypatch.setattr(rank_processes.shutil, "which", lambda _: None)


def _beat(rank: int, turn: int, iteration: int, doing: Doing, host: str = ELSEWHERE, pid: int = 4000) -> Beat:
    return Beat(rank, host, pid + rank, STARTED, turn, iteration, doing, LAST + rank)


BEHIND = _beat(3, 240, 61, Doing.DATA)
WAITING = [_beat(rank, 241, 61, Doing.GRADIENTS) for rank in (0, 1, 2, 4)]
ALL = sorted([BEHIND, *WAITING], key=lambda beat: beat.rank)


def _run(folder: Path, beats: Sequence[Beat], world: int = 5, **entries: object) -> Path:
    """A run on another host whose ranks left these words."""
    run = own_run(folder, {"loss": [2.0] * RECORDS, "iter_time_s": [1.0] * RECORDS}, RECORDS)
    document = json.loads((run / "run.json").read_text())
    segment = {**document["segments"][0], "started": STARTED, "world": world}
    document |= {"status": "running", "pid": 4000, "host": ELSEWHERE, "segments": [segment], **entries}
    (run / "run.json").write_text(json.dumps(document))
    (run / "ranks").mkdir()
    for beat in beats:
        (run / "ranks" / f"{beat.rank}.json").write_text(json.dumps(dataclasses.asdict(beat)))
    return run


def _ask(run: Path, monkeypatch: pytest.MonkeyPatch, minutes: float) -> Diagnosis:
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: LAST + minutes * MINUTE)
        return ask("hang", run)


def _rows(answer: Diagnosis) -> list[Sequence[object]]:
    return [row for table in answer.tables if table.name == "ranks" for row in table.rows]


def test_the_rank_that_is_behind_is_named_from_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _ask(_run(tmp_path, ALL), monkeypatch, 14)
    assert found(answer) == {"RUN001": "fail", "HANG101": "warn", "HANG104": "fail"}
    told = the(answer, "HANG104")
    waits = "rank 3 waits for data in iteration 61 for 14 min"
    assert told.title == f"{waits}; the others compute gradients in iteration 61"
    assert told.fix[0].why.startswith(f"on {ELSEWHERE}: look at its loading processes")
    assert "ranks 0-2, 4: compute gradients in iteration 61 for 14 min" in evidence(told)
    assert answer.findings[0] is told
    assert _rows(answer)[3] == (3, 61, "waits for data", 837, ELSEWHERE, "4003")


@pytest.mark.parametrize("minutes", [0.1, 0.9])
def test_a_healthy_run_has_a_table_and_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float
) -> None:
    answer = _ask(_run(tmp_path, ALL), monkeypatch, minutes)
    assert (answer.status, list(answer.findings)) == (Status.CLEAR, [])
    assert len(_rows(answer)) == 5


def test_words_of_an_earlier_start_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = dataclasses.replace(BEHIND, started=STARTED - 100)
    answer = _ask(_run(tmp_path, [*WAITING, stale]), monkeypatch, 14)
    assert the(answer, "HANG104").title == "ranks 0-2, 4 compute gradients in iteration 61 for 14 min"
    assert the(answer, "HANG104").severity.value == "warn"
    assert any("Last words of ranks 0-2, 4 only, of 5 ranks" in said for said in answer.looked_at)


def test_ranks_that_never_spoke_are_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _ask(_run(tmp_path, []), monkeypatch, 14)
    assert found(answer) == {"RUN001": "fail", "HANG101": "warn"}
    assert _rows(answer) == []


def test_an_evaluation_that_takes_its_time_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [_beat(rank, 250, RECORDS, Doing.EVALUATES) for rank in range(5)]
    answer = _ask(_run(tmp_path, beats, iters_per_epoch=RECORDS), monkeypatch, 14)
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    assert "ranks 0-4: evaluate after iteration 60 for 14 min" in evidence(the(answer, "HANG101"))


def test_silence_at_the_end_of_an_epoch_is_no_evaluation_when_no_rank_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _ask(_run(tmp_path, ALL, iters_per_epoch=RECORDS), monkeypatch, 14)
    assert found(answer) == {"RUN001": "fail", "HANG101": "warn", "HANG104": "fail"}
    assert the(answer, "HANG101").title == "Silent for 14 min in training"


def test_a_run_that_ended_long_ago_is_not_called_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _ask(_run(tmp_path, ALL), monkeypatch, 3 * 1440)
    assert (answer.status, found(answer)) == (Status.INCONCLUSIVE, {})
    assert the(answer, "HANG104").title.startswith("rank 3 waits for data in iteration 61 for 3 days")


@pytest.mark.parametrize("status", ["preempted", "failed", "running"])
def test_ranks_that_all_left_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    beats = [_beat(rank, 300 - rank, 61, Doing.LEFT) for rank in range(5)]
    assert "HANG104" not in found(_ask(_run(tmp_path, beats, status=status), monkeypatch, 14))


def test_a_process_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    gone = _beat(1, 241, 61, Doing.GRADIENTS, here, pid=2**22 + 5)
    lives = dataclasses.replace(_beat(0, 241, 61, Doing.GRADIENTS, here), pid=os.getpid())
    answer = _ask(_run(tmp_path, [lives, gone], world=2), monkeypatch, 14)
    title = "rank 1 is gone; last word: computes gradients in iteration 61 for 14 min; rank 0 computes gradients in"
    assert the(answer, "HANG104").title == f"{title} iteration 61"
    assert "dmesg" in the(answer, "HANG104").fix[0].why


def test_a_rank_that_left_is_named_though_it_is_ahead() -> None:
    left = _beat(1, 300, 61, Doing.LEFT)
    told = culprit([WAITING[0], left], LAST + MINUTE)
    assert told is not None
    assert told.title == "rank 1 left the training in iteration 61, 59 s ago; rank 0 computes gradients in iteration 61"
    told = culprit([WAITING[0], left, _beat(2, 305, 62, Doing.LEFT)], LAST + MINUTE)
    assert told is not None
    assert told.title.startswith("rank 1 left the training in iteration 61, 59 s ago; rank 2 too; rank 0 computes")


def test_others_in_several_places_are_further() -> None:
    told = culprit([BEHIND, *WAITING, _beat(5, 245, 62, Doing.DATA)], LAST + MINUTE)
    assert told is not None
    assert told.title == "rank 3 waits for data in iteration 61 for 57 s; the others are further"
    assert [item.where for item in last_words(ALL, LAST)] == ["rank 3", "ranks 0-2, 4"]


@given(st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_names_of_ranks_lose_none(ranks: list[int]) -> None:
    word, *told = names([_beat(rank, 1, 1, Doing.DATA) for rank in ranks]).replace(",", "").split(" ")
    ends = [tuple(map(int, span.split("-"))) for span in told]
    assert [rank for span in ends for rank in range(span[0], span[-1] + 1)] == sorted(ranks)
    assert word == ("rank" if len(ranks) == 1 else "ranks")


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Doing)), min_size=1, max_size=9))
def test_a_culprit_is_never_everyone(places: list[tuple[int, Doing]]) -> None:
    beats = [_beat(rank, turn, turn, doing) for rank, (turn, doing) in enumerate(places)]
    told = culprit(beats, LAST)
    is_alike = len({beat.turn for beat in beats}) == 1 and Doing.LEFT not in {beat.doing for beat in beats}
    has_left = all(beat.doing is Doing.LEFT for beat in beats)
    assert (told is None) == (is_alike or has_left)
    assert standing(beats, LAST).count("iteration") + standing(beats, LAST).count("start") >= 1


def test_the_command(invoke: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, ALL)
    monkeypatch.setattr(time, "time", lambda: LAST + 14 * MINUTE)
    result = invoke("diagnose", "hang", run, "--json")
    assert (result.code, result.document["findings"][0]["id"]) == (1, "HANG104")
    assert [row["doing"] for row in result.document["ranks"]].count("waits for data") == 1
