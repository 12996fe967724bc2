"""A PETRv2 run whose positions are computed in half precision: `diagnose nan` names the operation and the cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from bevctl.config.load import to_yaml
from bevctl.config.schema import Config, DataConfig, ImageAugmentConfig, PreviousFrameConfig
from bevctl.diagnose import trials
from bevctl.errors import ExitCode
from bevctl.models.build import build_model
from tests.models.nano import with_value
from tests.models.nano_petrv2 import nano_petrv2_config
from tests.numerics.half_positions import BEYOND_RANGE, MODULE, half_positions

from ..conftest import Outcome
from . import faults

FIRST_ATTENTION = "heads.object.transformer.layers.0.self_attn"
"""Its equal queries would overflow in the backward pass, as a second fault beside the one that is looked for."""
pytestmark = pytest.mark.usefixtures("one_thread")


def config_for(data: Path) -> Config:
    """One step in FP16 on a synthetic set, with an earlier keyframe."""
    config = nano_petrv2_config(**BEYOND_RANGE, **{"model.map": None, "precision.dtype": "fp16"})
    section = DataConfig(
        root=str(data),
        info_train="synth_infos_train.pkl",
        info_val="synth_infos_val.pkl",
        previous=PreviousFrameConfig(source="keyframes", train=(0, 1), eval=0),
        image=ImageAugmentConfig(shared=True, rotate=(0.0, 0.0), draft=False),
    )
    config = dataclasses.replace(config, data=section)
    settings: dict[str, object] = {
        "train.batch": 1,
        "train.workers": 0,
        "optim.warmup": 0,
        "precision.init_scale": 256.0,
        "precision.fp32_modules": (FIRST_ATTENTION,),
    }
    for path, value in settings.items():
        config = with_value(config, path, value)
    return config


def build_with_fault(config: Config) -> nn.Module:
    model = build_model(config)
    half_positions(model)
    return model


def test_positions_in_half_precision_are_named_and_cured(
    synth_root: Path, invoke: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "FOLLOWING", 1)
    faults.use(build_with_fault, monkeypatch)
    Path("c.yaml").write_text(to_yaml(config_for(synth_root)))
    trained = invoke("train", "c.yaml", "--work-dir", "run", "--no-preflight", "--max-iters", "1")
    assert trained.code == ExitCode.NONFINITE, trained.err
    done = invoke("diagnose", "nan", "run", "--replay", "--json")
    assert done.code == ExitCode.FINDINGS, done.err
    finding = done.document["findings"][0]
    assert finding["id"] == "NAN201"
    assert f"FP16 overflow in {MODULE}: aten.div.Tensor" in finding["title"]
    assert "petrv2_position.py" in finding["evidence"][0]["where"]
    cures = [remedy["set"] for remedy in finding["fix"] if remedy["verified"] is True]
    assert {"precision.fp32_modules": [FIRST_ATTENTION, MODULE]} in cures
