"""What is said about checkpoint files: good ones of every origin, and every way to be broken."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.engine.checkpoint_report import CheckpointReport, inspect_checkpoint
from bevctl.finding import Severity

from .bad_checkpoints import SCALER, broken_bytes, mmcv, mmengine_history, names_code, save, weights


def worst(report: CheckpointReport) -> dict[str, str]:
    return {finding.id: finding.severity.value for finding in report.findings if finding.severity != Severity.INFO}


def test_a_good_file(tmp_path: Path) -> None:
    report = inspect_checkpoint(save(mmcv(), tmp_path / "epoch_1.pth"))
    assert not report.is_broken
    assert worst(report) == {}
    assert report.layout == "mit"
    assert report.parts["encoders.camera"] == (1, 8)
    assert report.parts["fuser.1"] == (3, 17)
    assert report.loss_scaler == SCALER


@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod."])
@pytest.mark.parametrize(
    ("entry", "meta", "layout"),
    [
        ("heads.object.shared_conv.weight", {}, "mit"),
        ("img_backbone.norm.weight", {"mmengine_version": "0.10.7"}, "mmdet3d"),
        ("backbone.conv1.weight", {"mmcv_version": "1.7.0"}, "mmcv"),
        ("backbone.conv1.weight", {"mmengine_version": "0.10.7"}, "mmengine"),
        ("backbone.conv1.weight", {}, "unknown"),
        ("layers.0.blocks.0.attn.qkv.weight", {}, "swin_backbone"),
        ("backbone.stages.0.blocks.0.attn.w_msa.qkv.weight", {"mmcv_version": "1.7.0"}, "mmdet_backbone"),
        ("heads.object.shared_conv.weight", {"format": "bevctl"}, "bevctl"),
    ],
)
def test_layouts(tmp_path: Path, wrapper: str, entry: str, meta: dict[str, Any], layout: str) -> None:
    content = {"state_dict": {wrapper + entry: torch.ones(1)}, "meta": meta}
    report = inspect_checkpoint(save(content, tmp_path / "x.pth"))
    assert report.layout == layout
    assert not report.is_broken


@pytest.mark.parametrize(
    ("scale", "severity"),
    [
        (65536.0, None),
        (128.0, None),
        (64.0, "warn"),
        (1.0, "warn"),
        (0.5, "fail"),
        (0.0, "fail"),
        (3.1e-23, "fail"),
        (math.inf, "fail"),
        (math.nan, "fail"),
        ("65536", "fail"),
        (torch.tensor(1024.0), None),
        (torch.ones(3), "fail"),
    ],
)
def test_loss_scales(tmp_path: Path, scale: Any, severity: str | None) -> None:
    content = mmcv(meta={"epoch": 1, "iter": 400, "fp16": {"loss_scaler": {**SCALER, "scale": scale}}})
    report = inspect_checkpoint(save(content, tmp_path / "x.pth"))
    assert worst(report).get("FILE008") == severity
    assert report.is_broken == (severity == "fail")


def test_where_mmengine_keeps_its_scaler(tmp_path: Path) -> None:
    content = {
        "optimizer": {"loss_scaler": dict(SCALER), "state": {}, "param_groups": []},
        "message_hub": {},
        "meta": {"epoch": 1, "iter": 400},
        "state_dict": {"backbone.conv1.weight": torch.ones(1)},
    }
    report = inspect_checkpoint(save(content, tmp_path / "x.pth"))
    assert report.layout == "mmengine"
    assert report.loss_scaler == SCALER
    assert "optimizer state" in report.of("FILE007")[0].title


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_one_value_that_is_not_finite(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    entries = weights()
    entries["fuser.1.running_var"] = torch.ones(8, dtype=dtype)
    entries["fuser.1.running_var"][3] = bad
    report = inspect_checkpoint(save(mmcv(state_dict=entries), tmp_path / "x.pth"))
    assert [(entry.key, entry.count) for entry in report.nonfinite] == [("fuser.1.running_var", 1)]
    assert worst(report) == {"FILE005": "fail"}
    assert "BatchNorm" in report.of("FILE005")[0].cause


def test_optimizer_state_that_is_not_finite(tmp_path: Path) -> None:
    content = mmcv()
    content["optimizer"]["state"][0]["exp_avg_sq"][0] = math.inf
    report = inspect_checkpoint(save(content, tmp_path / "x.pth"))
    assert [(entry.key, entry.count) for entry in report.nonfinite] == [("optimizer.state.0.exp_avg_sq", 2)]
    assert report.is_broken


def test_objects_of_mmengine_are_read_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = inspect_checkpoint(mmengine_history(tmp_path / "x.pth", monkeypatch))
    assert not report.is_broken
    assert report.checkpoint is not None
    assert report.checkpoint.origin == "mmengine"
    (finding,) = report.of("FILE004")
    assert finding.severity == Severity.INFO
    assert "HistoryBuffer" in finding.evidence[0].what


@pytest.mark.parametrize("legacy", [False, True])
def test_code_is_named_and_never_run(tmp_path: Path, legacy: bool) -> None:
    mark = tmp_path / "mark"
    report = inspect_checkpoint(names_code(tmp_path / "x.pth", mark, legacy))
    assert worst(report) == {"FILE004": "fail"}
    assert "system" in report.findings[0].title
    assert not mark.exists()


@pytest.mark.parametrize("name", broken_bytes())
def test_broken_bytes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(broken_bytes()[name])
    report = inspect_checkpoint(path)
    assert report.is_broken
    assert worst(report) == {"FILE003": "fail"}
    assert report.findings[0].fix


@pytest.mark.parametrize(
    "content",
    [{}, [1, 2], "text", 7, None, {"state_dict": {}}, {0: 1}, {"state_dict": [torch.ones(1)]}, torch.ones(3)],
)
def test_data_that_is_no_checkpoint(tmp_path: Path, content: Any) -> None:
    assert worst(inspect_checkpoint(save(content, tmp_path / "x.pth"))) == {"FILE003": "fail"}


def test_a_file_without_weights_is_a_warning(tmp_path: Path) -> None:
    report = inspect_checkpoint(save({"meta": {"epoch": 3, "iter": 9}}, tmp_path / "x.pth"))
    assert worst(report) == {"FILE003": "warn"}


@pytest.mark.parametrize(
    "entries",
    [
        {0: torch.ones(1)},
        {"a": torch.empty(0)},
        {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
        {"a": torch.ones(2, dtype=torch.complex64)},
        {"a": torch.ones(2, dtype=torch.bool), "": torch.ones(1)},
        {"a.b.c.d.e": torch.ones(1), "a" * 5000: torch.ones(1)},
    ],
)
def test_odd_entries_make_no_traceback(tmp_path: Path, entries: dict[Any, Any]) -> None:
    report = inspect_checkpoint(save({"state_dict": entries, "meta": {"epoch": "one"}}, tmp_path / "x.pth"))
    assert report.size_bytes > 0


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    link = tmp_path / "dangling.pth"
    link.symlink_to(tmp_path / "gone.pth")
    loop = tmp_path / "loop.pth"
    loop.symlink_to(loop)
    pipe = tmp_path / "pipe.pth"
    os.mkfifo(pipe)
    said = {path.name: inspect_checkpoint(path).findings[0].title for path in (link, loop, pipe, tmp_path)}
    assert "link to a file that does not exist" in said["dangling.pth"]
    assert "cannot be read" in said["loop.pth"]
    assert "no regular file" in said["pipe.pth"]
    assert "is a folder" in said[tmp_path.name]
    assert "does not exist" in inspect_checkpoint(tmp_path / "absent.pth").findings[0].title
    assert "cannot be read" in inspect_checkpoint(Path("a\0b")).findings[0].title


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(mmcv(), tmp_path / "x.pth")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    report = inspect_checkpoint(path)
    assert worst(report) == {"FILE003": "fail"}
    assert "Permission denied" in report.findings[0].title
