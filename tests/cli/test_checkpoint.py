from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.errors import ExitCode
from tests.conftest import Outcome
from tests.engine.bad_checkpoints import SCALER, broken_bytes, mmcv, names_code, save, weights

Invoke = Callable[..., Outcome]


@pytest.mark.parametrize("action", ["show", "verify"])
def test_a_good_file(tmp_path: Path, invoke: Invoke, action: str) -> None:
    path = save(mmcv(), tmp_path / "epoch_1.pth")
    text = invoke("checkpoint", action, path)
    assert text.code == ExitCode.OK
    assert "mit layout, epoch 1, iteration 400" in text.out
    document = invoke("checkpoint", action, path, "--json").document
    assert (document["schema"], document["status"]) == ("bevctl.checkpoint/1", "ok")
    assert (document["layout"], document["epoch"], document["iter"]) == ("mit", 1, 400)
    assert document["nonfinite"] == []
    assert document["loss_scaler"] == SCALER


def test_show_lists_parts_and_optimizer(tmp_path: Path, invoke: Invoke) -> None:
    out = invoke("checkpoint", "show", save(mmcv(), tmp_path / "epoch_1.pth")).out
    for words in ("written by mmcv 1.4.0", "encoders.camera", "optimizer: 1 states in 1 groups", "loss scale: 65536"):
        assert words in out


@pytest.mark.parametrize("action", ["show", "verify"])
def test_values_that_are_not_finite(tmp_path: Path, invoke: Invoke, action: str) -> None:
    entries = weights()
    entries["fuser.1.running_var"][:2] = math.inf
    path = save(mmcv(state_dict=entries), tmp_path / "x.pth")
    outcome = invoke("checkpoint", action, path, "--json")
    assert outcome.code == ExitCode.FINDINGS
    assert outcome.document["status"] == "broken"
    assert outcome.document["nonfinite"] == [{"key": "fuser.1.running_var", "count": 2}]
    assert [f["id"] for f in outcome.document["findings"] if f["severity"] == "fail"] == ["FILE005"]
    assert "fuser.1.running_var: 2 values" in invoke("checkpoint", action, path).out


def test_a_scale_that_is_not_finite_is_strict_json(tmp_path: Path, invoke: Invoke) -> None:
    meta = {"epoch": 1, "iter": 4, "fp16": {"loss_scaler": {**SCALER, "scale": math.nan}}}
    document = invoke("checkpoint", "verify", save(mmcv(meta=meta), tmp_path / "x.pth"), "--json").document
    assert document["loss_scaler"]["scale"] is None
    assert document["loss_scaler"]["scale_nonfinite"] == "nan"


@pytest.mark.parametrize("action", ["show", "verify"])
def test_broken_files_are_findings(tmp_path: Path, invoke: Invoke, action: str) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(broken_bytes()["cut at 60 %"])
    for file in (path, tmp_path / "absent.pth", tmp_path):
        outcome = invoke("checkpoint", action, file, "--json")
        assert (outcome.code, outcome.document["status"]) == (ExitCode.FINDINGS, "broken")
        assert outcome.document["layout"] == "unknown"
        assert outcome.document["epoch"] is None
        assert outcome.document["findings"][0]["id"] == "FILE003"
        assert "Traceback" not in outcome.err


def test_code_is_never_run(tmp_path: Path, invoke: Invoke) -> None:
    mark = tmp_path / "mark"
    path = names_code(tmp_path / "x.pth", mark)
    assert invoke("checkpoint", "verify", path).code == ExitCode.FINDINGS
    assert invoke("checkpoint", "show", path).code == ExitCode.FINDINGS
    assert not mark.exists()


def test_a_file_name_cannot_colour_the_terminal(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "x\x1b[31m.pth"
    path.write_bytes(b"")
    assert "\x1b" not in invoke("checkpoint", "verify", path).out
