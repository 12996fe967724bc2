"""Negative controls: healthy runs in many shapes, with which no topic finds anything wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from bevctl.diagnose.report import Status
from tests.monitor.test_healthy import columns_of, healthy_runs

from .cases import ask, found, own_run


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(healthy_runs())
def test_healthy_runs_in_many_shapes(tmp_path: Path, shape: dict[str, Any]) -> None:
    records = int(shape["records"])
    columns = {name: np.broadcast_to(values, records) for name, values in columns_of(shape).items()}
    run = own_run(tmp_path, columns, records, interval=int(shape["interval"]))
    for topic in ("nan", "unstable-loss", "fp16-inactive"):
        answer = ask(topic, run)
        assert found(answer) == {}
        assert answer.status is not Status.FOUND


@pytest.mark.parametrize("topic", ["nan", "unstable-loss"])
def test_a_long_healthy_run_is_clear(tmp_path: Path, topic: str) -> None:
    records = 2000
    generator = np.random.default_rng(3)
    loss = (2 + 6 * np.exp(-np.arange(records) / 300)) * (1 + 0.05 * generator.standard_normal(records))
    answer = ask(topic, own_run(tmp_path, {"loss": loss, "grad_norm": generator.lognormal(2.5, 0.2, records)}, records))
    assert (answer.status, list(answer.findings)) == (Status.CLEAR, [])
