"""The topics that work without a replay, through the command line, and the ids that they use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import bevctl.explain
from bevctl.diagnose import (
    checkpoint_scan,
    fp16_inactive,
    hang,
    learning_rate,
    nan_log,
    no_speedup,
    oom,
    rank_findings,
    signatures,
    speed_bench,
    speed_causes,
    speed_ceiling,
    throttling,
    unstable_loss,
)
from bevctl.diagnose.signatures import SIGNATURES
from bevctl.explain import explanations
from bevctl.monitor.alarms.table import ALARMS
from tests.conftest import Outcome
from tests.runs.logs import write

from .cases import ASSIGNER, windows

Invoke = Callable[..., Outcome]


def test_every_id_is_explained() -> None:
    folder = Path(bevctl.explain.__file__).parent
    explained = set(yaml.safe_load((folder / "diagnose_log.yaml").read_text()))
    modules = (checkpoint_scan, fp16_inactive, learning_rate, nan_log, signatures, unstable_loss)
    used = {id for module in modules for id in re.findall(r'"([A-Z]+\d{3})"', Path(str(module.__file__)).read_text())}
    assert {*SIGNATURES, nan_log.NAMED, unstable_loss.THRASH, fp16_inactive.TF32} <= used
    assert used - {*ALARMS} == explained
    assert explained <= {*explanations()}


@pytest.mark.parametrize(
    ("modules", "family"),
    [
        ((oom,), "diagnose_oom"),
        ((hang, rank_findings), "diagnose_hang"),
        ((no_speedup, speed_bench, speed_causes, speed_ceiling, throttling), "diagnose_speed"),
    ],
)
def test_every_id_of_memory_time_and_silence_is_explained(modules: tuple[ModuleType, ...], family: str) -> None:
    explained = set(yaml.safe_load((Path(bevctl.explain.__file__).parent / f"{family}.yaml").read_text()))
    used = {id for module in modules for id in re.findall(r'"([A-Z]+\d{3})"', Path(str(module.__file__)).read_text())}
    assert used - {*ALARMS} == explained
    assert explained <= {*explanations()}


def test_alarms_that_are_symptoms_exist() -> None:
    assert {*nan_log.SYMPTOMS, *unstable_loss.SYMPTOMS, *no_speedup.SLOW, *hang.MEANT} <= {*ALARMS}


def test_the_command_names_the_crash_of_another_projects_run(invoke: Invoke, tmp_path: Path) -> None:
    path = write(tmp_path / "nohup.out", [*windows(5, {5: {"loss": "nan"}}), *ASSIGNER])
    result = invoke("diagnose", "nan", path, "--json")
    assert result.code == 1
    document = result.document
    assert (document["schema"], document["topic"], document["status"]) == ("bevctl.diagnose/1", "nan", "found")
    finding = next(finding for finding in document["findings"] if finding["id"] == "NAN005")
    assert {"id", "severity", "confidence", "title", "evidence", "cause", "fix"} <= finding.keys()
    assert all({"set", "why", "verified"} <= remedy.keys() for remedy in finding["fix"])
    text = invoke("diagnose", "nan", path)
    assert text.code == 1
    assert "matrix contains invalid numeric entries" in text.out


def test_a_healthy_run_exits_0_and_an_empty_one_3(invoke: Invoke, tmp_path: Path) -> None:
    healthy = write(tmp_path / "a.log", windows(20))
    empty = write(tmp_path / "b.log", ["hello", "world"])
    for topic in ("nan", "unstable-loss"):
        assert invoke("diagnose", topic, healthy).code == 0
        assert invoke("diagnose", topic, empty).code == 3


def test_words_of_a_log_cannot_draw_on_the_terminal(invoke: Invoke, tmp_path: Path) -> None:
    line = "\x1b[31mAssertionError: loss become infinite or NaN! [bold]\x1b[2J<script>"
    out = invoke("diagnose", "nan", write(tmp_path / "a.log", [*windows(3), line])).out
    assert "\x1b" not in out
    assert "[bold]" in out
