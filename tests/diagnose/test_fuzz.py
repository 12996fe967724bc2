"""Whatever the files hold, a topic answers or says in one sentence why it cannot."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bevctl.console import strict_json
from bevctl.diagnose.report import document
from bevctl.diagnose.source import scan_source
from bevctl.errors import BevctlError

from .cases import ASSIGNER, CRASHING_FP16, ask, header, mmcv_config, windows

TOPICS = ("nan", "unstable-loss", "fp16-inactive", "oom", "hang", "no-speedup")
LOG = "\n".join([*header(mmcv_config(more=CRASHING_FP16), "0,1"), *windows(30, {9: {"loss": "nan"}}), *ASSIGNER])
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _answers(path: Path, **given: Any) -> None:
    for topic in TOPICS:
        with contextlib.suppress(BevctlError):
            json.dumps(strict_json(document(topic, ask(topic, path, **given))), allow_nan=False)


@quick
@given(st.binary(max_size=300), st.integers(0, len(LOG)), st.integers(0, len(LOG)))
def test_spliced_logs(tmp_path: Path, noise: bytes, start: int, end: int) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(LOG[:start].encode() + noise + LOG[end:].encode())
    _answers(path)


SCALARS = st.sampled_from([float("nan"), float("inf"), 0.0, -1.0, 1e30, 3, "x", None, True])


@quick
@given(st.lists(st.tuples(SCALARS, SCALARS, SCALARS), min_size=1, max_size=40))
@example([(float("nan"), None, float("nan"))])  # a part of the loss that never is a number
def test_any_numbers_in_a_run_of_our_own(tmp_path: Path, rows: list[tuple[object, object, object]]) -> None:
    lines = [
        json.dumps({"epoch": 1, "iter": n, "loss": a, "losses": {"loss/map/focal": b}, "grad_norm": c, "loss_scale": a})
        for n, (a, b, c) in enumerate(rows, 1)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("train: [no config")
    event = {
        "kind": "nonfinite",
        "message": "x",
        "time": 1.79e9,
        "iter": 1,
        "data": {"tokens": [1, None], "class": [2]},
    }
    (tmp_path / "events.jsonl").write_text((json.dumps(event) + "\n") * 4)
    _answers(tmp_path)


@quick
@given(st.text(alphabet="abnx =()[]:.\n'!_{}", max_size=120))
def test_any_source(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"{text}\nx = torch.nan_to_num(x)\n")
    assert len(scan_source(tmp_path)) <= 20


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor(1e30, dtype=torch.float64),
        torch.ones(3, dtype=torch.int64),
    ],
)
def test_any_tensor_in_a_checkpoint(tmp_path: Path, tensor: torch.Tensor) -> None:
    config = tmp_path / "a.py"
    config.write_text(mmcv_config(more=CRASHING_FP16))
    for epoch in (1, 2):
        content = {"state_dict": {"a": tensor, "a.running_var": tensor}, "meta": {"epoch": epoch, "iter": "x"}}
        torch.save(content, tmp_path / f"epoch_{epoch}.pth")
    _answers(tmp_path, config=str(config))
    ask("nan", tmp_path, config=str(config))
    ask("unstable-loss", tmp_path, config=str(config))
