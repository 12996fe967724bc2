"""A replay on a GPU: the first bad operation is the same each time, and remedies have a cost in time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bevctl.diagnose import trials
from bevctl.diagnose.bundle import open_bundle
from bevctl.diagnose.replay import trace_step
from bevctl.engine.incident import find_incidents
from bevctl.errors import ExitCode

from ..conftest import Outcome
from . import faults

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_an_overflow_on_the_gpu(
    invoke: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "FOLLOWING", 1)
    data = faults.write_data(Path("data"), samples=6)
    half: dict[str, object] = {"device": "cuda", "precision.dtype": "fp16", "precision.init_scale": 256.0}
    config = faults.write_config(data, Path("c.yaml"), **half)
    name = "decoder.backbone.blocks.0.0.weight"  # a norm follows it, which brings its numbers back
    weights = faults.scaled_weights(faults.lidar_config(data), name, 1e5, Path("scaled.pth"))
    options = ("--no-preflight", "--load-from", weights, "--max-iters", "1")
    assert invoke("train", config, "--work-dir", "run", *options).code == ExitCode.NONFINITE
    done = invoke("diagnose", "nan", "run", "--replay", "--json")
    assert done.code == ExitCode.FINDINGS, done.err
    finding = done.document["findings"][0]
    assert (finding["id"], "decoder.backbone.blocks.0.0" in finding["title"]) == ("NAN201", True)
    module = {"precision.fp32_modules": ["decoder.backbone.blocks.0.0"]}
    cure = next(remedy for remedy in finding["fix"] if remedy["set"] == module)
    assert cure["verified"] is True, finding["fix"]
    assert cure["step_time"] > 0
    assert cure["memory"] > 0
    bundle = open_bundle(find_incidents(Path("run"))[0], "cuda")
    culprits = [trace_step(bundle).culprit for _ in range(3)]
    found = {(c.record.index, c.record.op, c.module, c.verdict.kind) for c in culprits if c is not None}
    assert len(culprits) == 3
    assert len(found) == 1
