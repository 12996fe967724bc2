from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.engine.checkpoint import read_checkpoint
from bevctl.errors import ExitCode
from bevctl.models.layouts import mmdet3d_name
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


def test_show_of_a_bare_backbone(tmp_path: Path, invoke: Invoke) -> None:
    swin = {"layers.0.blocks.0.attn.qkv.weight": weights()["fuser.1.running_var"]}
    out = invoke("checkpoint", "show", save({"model": swin}, tmp_path / "swin.pth")).out
    assert "weights alone, which do not say who wrote them" in out
    assert "swin_backbone layout, epoch unknown" in out


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


def test_convert_writes_beside_the_file_and_says_what(tmp_path: Path, invoke: Invoke) -> None:
    path = save(mmcv(), tmp_path / "epoch_1.pth")
    outcome = invoke("checkpoint", "convert", path, "--to", "mmdet3d")
    assert outcome.code == ExitCode.OK, outcome.err
    assert "encoders.camera" in outcome.out
    assert "epoch_1_mmdet3d.pth: " in outcome.out.replace("\n", "")
    assert read_checkpoint(tmp_path / "epoch_1_mmdet3d.pth").state_dict.keys() == {
        mmdet3d_name(key) for key in weights()
    }
    document = invoke("checkpoint", "convert", path, "--to", "mit", "--json").document
    assert (document["schema"], document["status"]) == ("bevctl.checkpoint/1", "ok")
    assert (document["from"], document["to"], document["entries"]) == ("mit", "mit", len(weights()))
    assert sum(part["written"] for part in document["parts"].values()) == len(weights())


def test_convert_replaces_nothing_unasked(tmp_path: Path, invoke: Invoke) -> None:
    path = save(mmcv(), tmp_path / "x.pth")
    before = path.read_bytes()
    (tmp_path / "x_mit.pth").write_bytes(b"mine")
    refused = invoke("checkpoint", "convert", path, "--to", "mit")
    assert refused.code == ExitCode.FINDINGS
    assert "--yes" in refused.err
    assert (tmp_path / "x_mit.pth").read_bytes() == b"mine"
    assert invoke("checkpoint", "convert", path, "--to", "mit", "--out", path, "--yes").code == ExitCode.USAGE
    assert path.read_bytes() == before
    dry = invoke("checkpoint", "convert", path, "--to", "mit", "--dry-run")
    assert (dry.code, (tmp_path / "x_mit.pth").read_bytes()) == (ExitCode.OK, b"mine")
    assert "not written" in dry.out
    assert invoke("checkpoint", "convert", path, "--to", "mit", "--yes").code == ExitCode.OK
    assert (tmp_path / "x_mit.pth").read_bytes() != b"mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.pth", "x_mit.pth"]


def test_convert_runs_nothing_and_needs_a_whole_file(tmp_path: Path, invoke: Invoke) -> None:
    mark = tmp_path / "mark"
    evil = names_code(tmp_path / "evil.pth", mark)
    cut = tmp_path / "cut.pth"
    cut.write_bytes(broken_bytes()["cut at 60 %"])
    for path in (evil, cut, tmp_path / "absent.pth", tmp_path):
        outcome = invoke("checkpoint", "convert", path, "--to", "bevctl", "--out", tmp_path / "out.pth")
        assert (outcome.code, outcome.out) == (ExitCode.USAGE, "")
        assert "Traceback" not in outcome.err
    assert not mark.exists()
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "mmcv"], "mmcv"),
        ([], "--to"),
        (["--to", "mit", "--out", "no/such/folder/x.pth"], "no/such/folder"),
        (["--to", "bevctl", "--config", "bevfusion_dett"], "bevfusion_det"),
        (["--to", "bevctl", "--task", "map"], "no head for the task 'map'"),
    ],
)
def test_mistakes_with_convert_are_one_sentence(
    tmp_path: Path, invoke: Invoke, arguments: list[str], words: str
) -> None:
    path = save(mmcv(), tmp_path / "x.pth")
    outcome = invoke("checkpoint", "convert", path, *arguments)
    assert (outcome.code, outcome.out) == (ExitCode.USAGE, "")
    assert words in outcome.err
