"""`diagnose unstable-loss`: each kind of instability, and healthy runs that stay silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bevctl.diagnose.fix import write_fix
from bevctl.diagnose.report import Status

from .cases import ask, ask_log, evidence, found, header, mmcv_checkpoint, mmcv_config, own_run, the, windows


def _losses(values: Any) -> dict[int, dict[str, str]]:
    return {number: {"loss": f"{value:.4f}"} for number, value in enumerate(values, 1)}


def _healthy(records: int, seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    loss = 2 + 6 * np.exp(-np.arange(records) / records * 5)
    norms = 12 * generator.lognormal(0, 0.2, records)
    noise = 1 + 0.05 * generator.standard_normal(records)
    return {
        "loss": loss * noise,
        "grad_norm": norms,
        "lr": np.full(records, 2e-5),
        "loss_scale": np.full(records, 512.0),
    }


def test_divergence_without_nan_is_the_rate_for_a_larger_batch(tmp_path: Path) -> None:
    losses = [*(8 - 0.12 * n for n in range(50)), *(2 + 0.12 * n for n in range(40))]
    norms = {n: {**change, "grad_norm": f"{10 + max(n - 50, 0):.4f}"} for n, change in _losses(losses).items()}
    lines = [*header(mmcv_config(3, model="BEVFusion"), "0,1"), *windows(90, norms)]
    answer = ask_log("unstable-loss", tmp_path, lines)
    assert found(answer) == {"LOSS004": "warn", "LR002": "warn"}
    assert "grew from" in evidence(the(answer, "LOSS004"))
    assert "made for a batch of 32; this run has 6" in the(answer, "LR002").title


def test_a_jump_in_the_middle(tmp_path: Path) -> None:
    losses = [*(5 - 0.03 * n for n in range(60)), *[16.0] * 20]
    answer = ask_log(
        "unstable-loss", tmp_path, [*header(mmcv_config(4), "0,1,2,3,4,5,6,7"), *windows(80, _losses(losses))]
    )
    assert found(answer) == {"LOSS001": "fail"}


def test_swings_that_grow_are_cured_by_a_lower_rate_a_longer_warm_up_or_a_clip(tmp_path: Path) -> None:
    records = 4000
    columns = _healthy(records)
    columns["loss"][2600:] *= np.where(np.arange(1400) // 50 % 2, 0.6, 1.5)
    answer = ask("unstable-loss", own_run(tmp_path / "run", columns, records, warmup=1200))
    finding = the(answer, "LOSS003")
    settings = [dict(remedy.set) for remedy in finding.fix]
    assert {"optim.lr": 1.5e-5, "optim.lr_scaling": "none"} in settings
    assert {"optim.warmup": 2400} in settings
    assert {"optim.clip": 12.0} in settings
    assert write_fix(tmp_path / "fix.yaml", answer.findings)[0].set["optim.lr"] == 1.5e-5


def test_swings_from_the_start(tmp_path: Path) -> None:
    losses = [(3 + 5 / n) * (1.4 if n % 2 else 0.6) for n in range(1, 61)]
    answer = ask_log("unstable-loss", tmp_path, [*header(mmcv_config(1), "0,1"), *windows(60, _losses(losses))])
    assert found(answer) == {"LOSS102": "warn", "LR002": "warn"}
    assert "swings by 40% all the time" in the(answer, "LOSS102").title


def test_a_scale_that_goes_down_and_up_again_and_again(tmp_path: Path) -> None:
    records = 4000
    columns = _healthy(records)
    columns["loss_scale"] = np.where(np.arange(records) // 100 % 2, 16384.0, 32768.0)
    finding = the(ask("unstable-loss", own_run(tmp_path, columns, records)), "SCALE101")
    assert "between 16384 and 32768" in evidence(finding)
    assert {"precision.loss_scale": 16384.0} in [dict(remedy.set) for remedy in finding.fix]


def test_a_scale_that_grows_and_is_halved_now_and_then_is_healthy(tmp_path: Path) -> None:
    records = 12000
    columns = _healthy(records)
    columns["loss_scale"] = np.where(np.arange(records) // 1000 % 2, 16384.0, 32768.0)
    answer = ask("unstable-loss", own_run(tmp_path, columns, records))
    assert (answer.status, list(answer.findings)) == (Status.CLEAR, [])


def test_weights_that_grow_between_checkpoints(tmp_path: Path) -> None:
    for epoch, size in ((1, 1.0), (2, 2.0), (3, 30.0)):
        head = {"head.weight": torch.full((8, 8), size)}
        mmcv_checkpoint(tmp_path / f"epoch_{epoch}.pth", None, epoch, **head)
    finding = the(ask("unstable-loss", tmp_path), "LOSS101")
    assert finding.severity.value == "warn"
    assert "head.weight: norm 8 to 240" in evidence(finding)
    (tmp_path / "epoch_3.pth").unlink()
    assert ask("unstable-loss", tmp_path).findings == []


def test_nan_is_left_to_the_other_topic(tmp_path: Path) -> None:
    answer = ask_log("unstable-loss", tmp_path, windows(20, loss="nan"))
    assert "diagnose nan" in the(answer, "NAN001").fix[0].why


@pytest.mark.parametrize(("count", "status"), [(5, Status.INCONCLUSIVE), (60, Status.CLEAR)])
def test_healthy_runs_are_silent_and_short_ones_not_judged(tmp_path: Path, count: int, status: Status) -> None:
    answer = ask_log("unstable-loss", tmp_path, [*header(mmcv_config(4), "0,1,2,3,4,5,6,7"), *windows(count)])
    assert (answer.status, list(answer.findings)) == (status, [])
