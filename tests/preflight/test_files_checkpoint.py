"""Checks of the checkpoint that a run continues from, and of its pretrained weights."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

import bevctl
from bevctl.config.foreign import read_foreign
from bevctl.config.load import to_dict
from bevctl.config.schema import Config
from bevctl.finding import CheckStatus
from bevctl.models.build import build_model
from bevctl.preflight import files_checkpoint
from bevctl.preflight.checks import Context, Outcome
from bevctl.preflight.request import context_of_config
from tests.engine.bad_checkpoints import SCALER, broken_bytes, mmcv, mmengine_history, names_code, save
from tests.models.nano import nano_config
from tests.models.nano_petrv2 import nano_petrv2_config


def judge(context: Context, id: str) -> Outcome:
    (spec,) = [spec for spec in files_checkpoint.CHECKS if spec.id == id]
    return spec.function(context)


def statuses(context: Context) -> dict[str, str]:
    """Every outcome that is neither a pass nor skipped."""
    found = {spec.id: spec.function(context).status for spec in files_checkpoint.CHECKS}
    return {id: status.value for id, status in found.items() if status not in (CheckStatus.PASS, CheckStatus.SKIP)}


CONFIG = nano_config()


def own(config: Config = CONFIG, **meta: object) -> dict[str, object]:
    """A checkpoint of ours after the second epoch."""
    model = build_model(config)
    states = {i: {"step": torch.tensor(8.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)} for i in range(2)}
    return {
        "state_dict": model.state_dict(),
        "optimizer": {"state": states, "param_groups": [{"lr": 1e-4, "params": [0, 1]}]},
        "scaler": dict(SCALER),
        "meta": {
            "format": "bevctl",
            "version": bevctl.__version__,
            "epoch": 2,
            "iter": 8,
            "config": to_dict(config),
            **meta,
        },
    }


def context(tmp_path: Path, resume: str | None, config: Config = CONFIG) -> Context:
    return context_of_config(dataclasses.replace(config, work_dir=str(tmp_path)), resume=resume)


def test_nothing_is_resumed(tmp_path: Path) -> None:
    outcomes = [spec.function(context(tmp_path, None)).status for spec in files_checkpoint.CHECKS]
    assert set(outcomes) == {CheckStatus.SKIP}
    assert "starts afresh" in judge(context(tmp_path, "auto"), "FILE003").found


def test_our_own_checkpoint_passes(tmp_path: Path) -> None:
    save(own(), tmp_path / "epoch_2.pth")
    for resume in ("epoch_2.pth", str(tmp_path / "epoch_2.pth"), "auto"):
        found = context(tmp_path, resume)
        outcomes = [spec.function(found) for spec in files_checkpoint.CHECKS[:6]]
        assert {outcome.status for outcome in outcomes} == {CheckStatus.PASS}
    assert "everything is there" in outcomes[4].found


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    absent = context(tmp_path, "epoch_7.pth")
    assert statuses(absent) == {"FILE003": "fail"}
    assert "epoch_7.pth does not exist" in judge(absent, "FILE003").found


@pytest.mark.parametrize("name", ["cut at 60 %", "empty", "a flipped bit in a tensor", "a web page"])
def test_a_broken_file_fails_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(broken_bytes()[name])
    assert statuses(context(tmp_path, str(path))) == {"FILE003": "fail"}


def test_auto_passes_over_what_cannot_be_read(tmp_path: Path) -> None:
    good, bad = save(own(), tmp_path / "epoch_2.pth"), tmp_path / "epoch_3.pth"
    bad.write_bytes(broken_bytes()["cut at 60 %"])
    os.utime(good, (1, 1))
    outcome = judge(context(tmp_path, "auto"), "FILE003")
    assert outcome.status == CheckStatus.WARN
    assert "epoch_2.pth" in outcome.found
    assert "passed over" in outcome.found
    good.unlink()
    assert judge(context(tmp_path, "auto"), "FILE003").status == CheckStatus.FAIL


def test_code_fails_and_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = names_code(tmp_path / "x.pth", mark)
    assert statuses(context(tmp_path, str(path))) == {"FILE004": "fail"}
    assert not mark.exists()


def test_objects_of_mmengine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mmengine_history(tmp_path / "x.pth", monkeypatch)
    assert judge(context(tmp_path, str(path)), "FILE004").status == CheckStatus.PASS
    script = tmp_path / "config.py"
    script.write_text("optim_wrapper = dict(type='AmpOptimWrapper')\n")
    legacy = dataclasses.replace(context(tmp_path, str(path)), config=None, foreign=read_foreign(script))
    outcome = judge(legacy, "FILE004")  # this interpreter's torch is newer than 2.6
    assert outcome.status == CheckStatus.FAIL
    assert "HistoryBuffer" in outcome.found or "mmengine" in outcome.found


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    content = own()
    name = next(key for key in content["state_dict"] if key.endswith("running_var"))  # type: ignore[attr-defined]
    content["state_dict"][name][0] = math.inf  # type: ignore[index]
    outcome = judge(context(tmp_path, str(save(content, tmp_path / "x.pth"))), "FILE005")
    assert outcome.status == CheckStatus.FAIL
    assert "1 values in 1 tensors" in outcome.found


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model.map": None}, "warn", "unexpected: heads.map"),
        ({"model.decoder.neck_channels": 24}, "fail", "mismatched"),
    ],
)
def test_another_model(tmp_path: Path, change: dict[str, object], status: str, words: str) -> None:
    path = save(own(), tmp_path / "x.pth")
    outcome = judge(context(tmp_path, str(path), nano_config(**change)), "FILE006")
    assert outcome.status == status
    assert words in outcome.found


def test_a_head_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    path = save(own(nano_config(**{"model.map": None})), tmp_path / "x.pth")
    outcome = judge(context(tmp_path, str(path)), "FILE006")
    assert outcome.status == CheckStatus.WARN
    assert "missing: heads.map" in outcome.found


def test_not_one_entry_fits(tmp_path: Path) -> None:
    path = save({"state_dict": {"fc.weight": torch.ones(2)}, "meta": {"epoch": 1}}, tmp_path / "x.pth")
    outcome = judge(context(tmp_path, str(path)), "FILE006")
    assert outcome.status == CheckStatus.FAIL
    assert "Not one of the 1 entries" in outcome.found


def test_what_a_foreign_checkpoint_loses_is_listed(tmp_path: Path) -> None:
    outcome = judge(context(tmp_path, str(save(mmcv(), tmp_path / "a.pth"))), "FILE007")
    assert outcome.status == CheckStatus.PASS
    assert "data order and random state" in outcome.found
    bare = save({"state_dict": mmcv()["state_dict"]}, tmp_path / "b.pth")
    outcome = judge(context(tmp_path, str(bare)), "FILE007")
    assert outcome.status == CheckStatus.WARN
    for words in ("no epoch", "no optimizer state"):
        assert words in outcome.found


def test_an_optimizer_of_other_parameters(tmp_path: Path) -> None:
    content = mmcv()
    content["optimizer"]["param_groups"][0]["params"] = [0, 1, 2]
    outcome = judge(context(tmp_path, str(save(content, tmp_path / "x.pth"))), "FILE007")
    assert outcome.status == CheckStatus.WARN
    assert "no optimizer state of these weights" in outcome.found


def test_without_fp16_no_loss_scale_is_missed(tmp_path: Path) -> None:
    path = save({**own(), "scaler": None}, tmp_path / "x.pth")
    for dtype, status in (("fp16", "warn"), ("fp32", "pass"), ("bf16", "pass"), ("auto", "pass")):
        config = nano_config(**{"precision.dtype": dtype, "device": "cpu"})
        assert judge(context(tmp_path, str(path), config), "FILE007").status == status


@pytest.mark.parametrize(("scale", "status"), [(1024.0, "pass"), (8.0, "warn"), (0.0, "fail"), (math.nan, "fail")])
def test_the_saved_loss_scale(tmp_path: Path, scale: float, status: str) -> None:
    path = save({**own(), "scaler": {**SCALER, "scale": scale}}, tmp_path / "x.pth")
    assert judge(context(tmp_path, str(path)), "FILE008").status == status


def test_resume_from_of_an_mmcv_config(tmp_path: Path) -> None:
    script = tmp_path / "config.py"
    script.write_text(f"data = dict()\nresume_from = {str(tmp_path / 'gone.pth')!r}\n")
    legacy = dataclasses.replace(context(tmp_path, None), config=None, foreign=read_foreign(script))
    assert judge(legacy, "FILE003").status == CheckStatus.FAIL
    save(mmcv(), tmp_path / "gone.pth")
    legacy = dataclasses.replace(context(tmp_path, None), config=None, foreign=read_foreign(script))
    assert judge(legacy, "FILE003").status == CheckStatus.PASS
    assert judge(legacy, "FILE006").status == CheckStatus.SKIP


# FILE009


def with_backbone(tmp_path: Path, path: Path) -> Context:
    return context(tmp_path, None, nano_config(**{"model.camera.pretrained": str(path)}))


def test_pretrained_backbone(tmp_path: Path) -> None:
    prefix = "encoders.camera.backbone."
    state = build_model(CONFIG).state_dict()
    backbone = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    path = save({"state_dict": backbone}, tmp_path / "swin.pth")
    outcome = judge(with_backbone(tmp_path, path), "FILE009")
    assert outcome.status == CheckStatus.PASS
    learned = [key for key in backbone if not key.endswith("relative_position_index")]
    assert f"{len(learned)} entries fit (mmdet_backbone layout)" in outcome.found


def test_pretrained_backbone_that_is_missing_or_another(tmp_path: Path) -> None:
    assert judge(with_backbone(tmp_path, tmp_path / "gone.pth"), "FILE009").status == CheckStatus.FAIL
    other = save({"state_dict": {"conv1.weight": torch.ones(64, 3, 7, 7)}}, tmp_path / "resnet.pth")
    outcome = judge(with_backbone(tmp_path, other), "FILE009")
    assert outcome.status == CheckStatus.FAIL
    assert "Not one of the 1 entries" in outcome.found


def test_statistics_that_stand_still_want_pretrained_weights(tmp_path: Path) -> None:
    config = nano_petrv2_config(**{"model.camera.norm_eval": True})
    outcome = judge(context(tmp_path, None, config), "FILE009")
    assert outcome.status == CheckStatus.WARN
    assert "of no pretrained weights" in outcome.found
    assert "model.camera.pretrained" in outcome.fix
    weights = save({"state_dict": build_model(config).state_dict()}, tmp_path / "start.pth")
    loaded = nano_petrv2_config(**{"model.camera.norm_eval": True, "model.load_from": (str(weights),)})
    assert judge(context(tmp_path, None, loaded), "FILE009").status == CheckStatus.PASS
    assert judge(context(tmp_path, str(weights), config), "FILE009").status == CheckStatus.SKIP
    assert judge(context(tmp_path, None, nano_petrv2_config()), "FILE009").status == CheckStatus.SKIP


def test_weights_that_a_new_run_starts_from(tmp_path: Path) -> None:
    here, gone = save({"state_dict": build_model(CONFIG).state_dict()}, tmp_path / "here.pth"), tmp_path / "gone.pth"

    def outcome(*names: object, resume: str | None = None) -> Outcome:
        config = nano_config(**{"model.load_from": tuple(map(str, names))})
        return judge(context(tmp_path, resume, config), "FILE009")

    assert outcome(here, here).status == CheckStatus.PASS
    assert outcome(here, gone).status == CheckStatus.FAIL
    assert "gone.pth does not exist" in outcome(here, gone).found
    assert outcome(here, gone, resume=str(here)).status == CheckStatus.SKIP, "a resumed run has weights"


def test_weights_of_a_foreign_config(tmp_path: Path) -> None:
    script = tmp_path / "config.py"

    def status(text: str) -> CheckStatus:
        script.write_text("data = dict()\n" + text)
        legacy = dataclasses.replace(context(tmp_path, None), config=None, foreign=read_foreign(script))
        return judge(legacy, "FILE009").status

    assert status("load_from = None") == CheckStatus.SKIP
    assert status("load_from = 'https://download.openmmlab.com/x.pth'") == CheckStatus.WARN
    assert status(f"load_from = {os.fspath(tmp_path / 'gone.pth')!r}") == CheckStatus.FAIL
    save(mmcv(), tmp_path / "here.pth")
    assert status(f"load_from = {os.fspath(tmp_path / 'here.pth')!r}") == CheckStatus.PASS
