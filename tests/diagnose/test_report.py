"""The shapes that every topic answers in: exit codes, JSON, the screen, the file of settings."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.config.load import load
from bevctl.console import Console
from bevctl.diagnose import accuracy_drop, cause, nan, nan_forecast
from bevctl.diagnose.fix import write_fix
from bevctl.diagnose.report import (
    DiagnoseFinding,
    DiagnoseRequest,
    Diagnosis,
    Remedy,
    Status,
    Table,
    exit_code,
    status_of,
)
from bevctl.diagnose.screen import picture
from bevctl.errors import ExitCode
from bevctl.explain import explanations
from bevctl.finding import Evidence, Severity

from ..conftest import Outcome

Invoke = Callable[..., Outcome]


def _finding(severity: Severity = Severity.FAIL, *fix: Remedy) -> DiagnoseFinding:
    evidence = (Evidence("neck.lateral", "largest input 70,000"),)
    return DiagnoseFinding("NAN020", severity, 0.9, "FP16 overflow in neck.lateral", evidence, "The sum.", fix)


FP32_NECK = Remedy({"precision.fp32_modules": ["neck"]}, "neck in FP32", True, step_time=1.04, memory=1.5)
STATIC = Remedy({"precision.loss_scale": 128.0}, "a fixed loss scale", False)
SLOWER = Remedy({"optim.lr": 1e-5, "optim.lr_scaling": "none"}, "a smaller learning rate")


@pytest.mark.parametrize(
    ("diagnosis", "fail_on", "expected"),
    [
        (Diagnosis(Status.FOUND, [_finding()]), Severity.WARN, 1),
        (Diagnosis(Status.FOUND, [_finding(Severity.WARN)]), Severity.WARN, 1),
        (Diagnosis(Status.FOUND, [_finding(Severity.WARN)]), Severity.FAIL, 0),
        (Diagnosis(Status.CLEAR, [_finding(Severity.INFO)]), Severity.WARN, 0),
        (Diagnosis(Status.CLEAR, [_finding(Severity.INFO)]), Severity.INFO, 1),
        (Diagnosis(Status.INCONCLUSIVE, [_finding(Severity.WARN)]), Severity.WARN, 3),
        (Diagnosis(Status.CLEAR), Severity.WARN, 0),
    ],
)
def test_exit_codes(diagnosis: Diagnosis, fail_on: Severity, expected: int) -> None:
    assert exit_code(diagnosis, fail_on) == expected


def test_information_alone_is_clear() -> None:
    assert status_of([_finding(Severity.INFO)]) is Status.CLEAR
    assert status_of([_finding(Severity.INFO), _finding(Severity.WARN)]) is Status.FOUND


def test_the_first_verified_setting_is_written_and_the_config_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "fix.yaml"
    remedies = write_fix(path, [_finding(Severity.FAIL, STATIC, SLOWER, FP32_NECK), _finding(Severity.WARN, SLOWER)])
    assert remedies == [FP32_NECK, SLOWER]
    text = path.read_text()
    assert "# neck in FP32 (tried on the replay: cures it)" in text
    assert "# a smaller learning rate (not tried)" in text
    config = load("tiny", sets=[str(path)]).config
    assert config.precision.fp32_modules == ("neck",)
    assert (config.optim.lr, config.optim.lr_scaling) == (1e-5, "none")


def test_nothing_is_written_where_every_setting_failed(tmp_path: Path) -> None:
    path = tmp_path / "fix.yaml"
    assert write_fix(path, [_finding(Severity.FAIL, STATIC, Remedy({}, "repair the file"))]) == []
    assert not path.exists()


def test_of_two_values_for_one_key_the_first_finding_decides(tmp_path: Path) -> None:
    other = Remedy({"precision.fp32_modules": ["head"]}, "head in FP32", True)
    findings = [_finding(Severity.FAIL, FP32_NECK), _finding(Severity.FAIL, other)]
    assert write_fix(tmp_path / "fix.yaml", findings) == [FP32_NECK]


def test_the_screen_names_cause_cure_and_cost() -> None:
    out = io.StringIO()
    tables = [Table("modules", "Closest to FP16's limit", ["module", "largest"], [["neck.\x1b[2J", 65504.0]])]
    finding = _finding(Severity.FAIL, FP32_NECK, STATIC)
    Console(out).result(picture("nan", Diagnosis(Status.FOUND, [finding], ["Iteration 12 of runs/a"], tables), 100))
    text = out.getvalue()
    for part in (
        "FOUND  nan",
        "Iteration 12 of runs/a",
        "fail NAN020  FP16 overflow in neck.lateral  (90%\u00a0sure)",
        "neck.lateral: largest input 70,000",
        "precision.fp32_modules=[neck] -- neck in FP32 (cures it, time x 1.04, memory x 1.50)",
        "a fixed loss scale (does not cure it)",
        "65504",
    ):
        assert part in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("diagnosis", "first"),
    [
        (
            Diagnosis(Status.FOUND, [dataclasses.replace(_finding(Severity.WARN), title="less"), _finding()]),
            "FOUND  oom: FP16 overflow in neck.lateral",
        ),
        (Diagnosis(Status.CLEAR, said="no fault: at 90%"), "CLEAR  oom: no fault: at 90%"),
        (Diagnosis(Status.CLEAR, [_finding(Severity.INFO)]), "CLEAR  oom: nothing harmful was found"),
        (Diagnosis(Status.INCONCLUSIVE), "INCONCLUSIVE  oom: what is here does not decide it"),
    ],
)
def test_the_first_line_is_the_answer(diagnosis: Diagnosis, first: str) -> None:
    out = io.StringIO()
    Console(out).result(picture("oom", diagnosis, 100))
    assert out.getvalue().splitlines()[0] == first


def test_a_share_is_shown_in_percent() -> None:
    out = io.StringIO()
    time = Table("time", "An iteration", ("what", "seconds", "share"), [("computing", 0.5, 0.09151)])
    Console(out).result(picture("no-speedup", Diagnosis(Status.CLEAR, tables=[time]), 100))
    assert "9.2%" in out.getvalue()


def test_json_of_a_diagnosis(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DiagnoseRequest] = []

    def diagnose(request: DiagnoseRequest) -> Diagnosis:
        asked.append(request)
        rows = [["neck", float("inf")]]
        return Diagnosis(
            Status.FOUND,
            [_finding(Severity.FAIL, FP32_NECK)],
            ["the log"],
            [Table("modules", "", ["module", "largest"], rows)],
            {"iteration": 12},
        )

    monkeypatch.setattr(nan, "diagnose", diagnose)
    done = invoke("diagnose", "nan", tmp_path, "--json", "--write-fix", tmp_path / "fix.yaml", "--device", "cpu")
    assert done.code == ExitCode.FINDINGS
    document = done.document
    assert (document["schema"], document["topic"], document["status"]) == ("bevctl.diagnose/1", "nan", "found")
    finding = document["findings"][0]
    assert (finding["id"], finding["severity"], finding["confidence"]) == ("NAN020", "fail", 0.9)
    assert finding["evidence"] == [{"where": "neck.lateral", "what": "largest input 70,000"}]
    assert finding["fix"][0]["set"] == {"precision.fp32_modules": ["neck"]}
    assert finding["fix"][0]["verified"] is True
    assert document["modules"] == [{"module": "neck", "largest": None, "largest_nonfinite": "inf"}]
    assert document["iteration"] == 12
    assert (asked[0].run, asked[0].device, asked[0].replay) == (tmp_path, "cpu", False)
    assert f"Wrote {tmp_path / 'fix.yaml'}" in done.err


def test_wrong_words_are_usage_errors(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typo = invoke("diagnose", "nam", "x")
    assert (typo.code, "Did you mean 'nan'?" in typo.err) == (2, True)
    nothing = invoke("diagnose", "nan")
    assert (nothing.code, "No run is below runs/" in nothing.err) == (2, True)
    assert invoke("diagnose").code == 2
    for options, message in (
        (("nan", "x", "--write-fix", "."), "--write-fix . is a folder"),
        (("nan", "x", "--replay", "--forecast"), "--replay contradicts --forecast"),
        (("accuracy-drop", "x", "--replay"), "--replay belongs to `diagnose nan`"),
    ):
        refused = invoke("diagnose", *options)
        assert (refused.code, message in refused.err) == (2, True)


@pytest.mark.parametrize("module", [cause, nan_forecast, accuracy_drop])
def test_every_id_is_explained(module: Any) -> None:
    ids = [value for name, value in vars(module).items() if name.isupper() and re.fullmatch(r"[A-Z]+\d{3}", str(value))]
    assert len(ids) >= 3
    assert explanations().keys() >= set(ids)
