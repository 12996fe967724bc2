from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bevctl.engine.launch import OUTCOME_DIR, Cluster, _combined, check_cluster, leave_outcome
from bevctl.errors import BevctlError, ExitCode


def _outcome(code: int, message: str = "", expected: bool = True) -> dict[str, Any]:
    return {"code": code, "message": message, "hint": "", "expected": expected}


@pytest.mark.parametrize(
    ("codes", "signalled", "combined"),
    [([0, 0], 0, 0), ([6, 6], 15, 6), ([6, 4], 15, 6), ([], 15, 143), ([], 2, 130)],
)
def test_codes_of_workers_are_kept(codes: list[int], signalled: int, combined: int) -> None:
    assert _combined([_outcome(code) for code in codes], signalled) == combined


def test_the_worker_that_knows_the_cause_speaks() -> None:
    lost = _outcome(4, "RuntimeError: Connection closed by peer", expected=False)
    with pytest.raises(BevctlError, match="disk is full") as caught:
        _combined([lost, _outcome(4, "The disk is full")], 0)
    assert caught.value.code == ExitCode.RUN_FAILED
    with pytest.raises(BevctlError, match="not finite") as caught:
        _combined([lost, _outcome(5, "Gradients were not finite")], 0)
    assert caught.value.code == ExitCode.NONFINITE


def test_a_worker_killed_without_a_word_is_told() -> None:
    with pytest.raises(BevctlError, match="without a word"):
        _combined([_outcome(0)][:0], 0)


def test_an_outcome_is_left_only_where_someone_reads_it(tmp_path: Path) -> None:
    assert not leave_outcome({}, 0)
    assert leave_outcome({OUTCOME_DIR: str(tmp_path), "RANK": "3"}, 4, BevctlError("m", "h", ExitCode.RUN_FAILED))
    left = json.loads((tmp_path / "rank_00003.json").read_text())
    assert left == {"code": 4, "message": "m", "hint": "h", "expected": True}


@pytest.mark.parametrize("endpoint", ["nohost", "host:", ":29500", "host:99999"])
def test_a_malformed_endpoint_is_told(endpoint: str) -> None:
    with pytest.raises(BevctlError, match="is not HOST:PORT"):
        check_cluster(Cluster(2, 1, endpoint), "cpu")
