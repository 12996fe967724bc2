"""`bevctl bench` from the command line: document, table, picture, comparison, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

Invoke = Callable[..., Outcome]
QUICK = ("--batch", "1", "--steps", "1", "--precision", "fp32", "--device", "cpu", "--set", "data.sweeps=0")


def test_the_document_and_the_picture(invoke: Invoke, tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    outcome = invoke("bench", "tiny", *QUICK, "--set", f"data.root={tmp_path}", "--png", picture, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["schema"] == "bevctl.bench/1"
    (result,) = document["results"]
    assert result["precision"] == "fp32"
    assert result["batch"] == 1
    assert result["step_s"]["n"] == 1
    assert set(result["split"]) >= {"data", "forward", "backward", "optimizer"}
    assert document["ratios"] == {}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_tables(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("bench", "tiny", *QUICK, "--set", f"data.root={tmp_path}")
    assert outcome.code == 0, outcome.err
    assert "encoders.lidar" in outcome.out
    assert "made in memory" in outcome.err


def test_tf32_needs_a_gpu(invoke: Invoke) -> None:
    outcome = invoke("bench", "tiny", "--precision", "tf32", "--device", "cpu")
    assert outcome.code == 2
    assert "TF32" in outcome.err


def _document(path: Path, seconds: float) -> Path:
    result = {"precision": "fp16", "batch": 4, "step_s": {"median": seconds}, "allocated_bytes": None}
    path.write_text(json.dumps({"schema": "bevctl.bench/1", "results": [result]}))
    return path


@pytest.mark.parametrize(("limit", "code"), [("5%", 1), ("0.2", 0), ("20%", 0)])
def test_a_regression_beyond_the_limit_is_exit_code_1(invoke: Invoke, tmp_path: Path, limit: str, code: int) -> None:
    before, after = _document(tmp_path / "a.json", 0.1), _document(tmp_path / "b.json", 0.11)
    outcome = invoke("bench", "--compare", before, after, "--max-regression", limit, "--json")
    assert outcome.code == code
    assert outcome.document["status"] == ("fail" if code else "pass")
    assert outcome.document["changes"][0]["regression"] is bool(code)
    assert invoke("bench", "--compare", before, after, "--max-regression", limit).code == code


@pytest.mark.parametrize("limit", ["much", "-1%", "nan"])
def test_a_limit_that_is_none_is_a_usage_error(invoke: Invoke, tmp_path: Path, limit: str) -> None:
    same = _document(tmp_path / "a.json", 0.1)
    assert invoke("bench", "--compare", same, same, "--max-regression", limit).code == 2


def test_recomputed_activations_are_measured_as_such(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("bench", "tiny", *QUICK, "--set", f"data.root={tmp_path}", "--grad-checkpoint", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["settings"]["checkpointing"] == ["camera", "lidar", "decoder"]
    assert outcome.document["results"][0]["split"]["backward_by_part"]["encoders.lidar"] > 0
