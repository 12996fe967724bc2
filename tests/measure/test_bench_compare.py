"""Two benchmark documents: regressions are told, noise is not, and broken files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bevctl.errors import BevctlError
from bevctl.measure.bench_compare import compare


def _write(path: Path, seconds: float, size: int | None = 1000, precision: str = "fp16", device: str = "X") -> Path:
    result = {"precision": precision, "batch": 4, "step_s": {"median": seconds}, "allocated_bytes": size}
    document: dict[str, Any] = {"schema": "bevctl.bench/1", "hardware": {"device": device}, "results": [result]}
    path.write_text(json.dumps(document))
    return path


def test_more_than_the_limit_is_a_regression(tmp_path: Path) -> None:
    comparison = compare(_write(tmp_path / "a", 0.1), _write(tmp_path / "b", 0.106, 1040))
    assert [change.quantity for change in comparison.regressions(0.05)] == ["step_s"]
    assert [change.quantity for change in comparison.regressions(0.03)] == ["step_s", "allocated_bytes"]
    assert comparison.changes[0].change == pytest.approx(0.06)


def test_faster_and_smaller_is_none(tmp_path: Path) -> None:
    comparison = compare(_write(tmp_path / "a", 0.1), _write(tmp_path / "b", 0.05, 500))
    assert comparison.regressions(0.0) == []
    assert comparison.notes == []


def test_what_makes_them_hard_to_compare_is_said(tmp_path: Path) -> None:
    comparison = compare(_write(tmp_path / "a", 0.1), _write(tmp_path / "b", 0.1, None, device="Y"))
    assert comparison.notes == [f"{tmp_path / 'b'} lacks fp16 at batch 4", "hardware.device differs: X and Y"]
    assert len(comparison.changes) == 1


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="share no precision"):
        compare(_write(tmp_path / "a", 0.1), _write(tmp_path / "b", 0.1, precision="bf16"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": "bevctl.bench/1"}',
        '{"schema": "bevctl.bench/1", "results": [{"precision": "fp16"}]}',
        '{"schema": "bevctl.memory/1", "results": []}',
        '{"schema": "bevctl.bench/1", "results": [{"precision": "a", "batch": 1, "step_s": 3, "allocated_bytes": 1}]}',
        "[" * 100_000,
    ],
)
def test_a_broken_document_is_refused(tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(text)
    with pytest.raises(BevctlError, match=r"broken\.json"):
        compare(broken, _write(tmp_path / "b", 0.1))
