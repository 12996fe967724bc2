"""The quickstart's plan: which commands run, what is read from them, and what happens when one fails.

The commands themselves are tested elsewhere; here a fake process stands in for each and leaves what the real one would.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.cli.quickstart import command
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode
from bevctl.quickstart import CONFIGS, Quickstart, Scores


class FakeCommands:
    """Stands in for `subprocess.run`: remembers each command, writes a log, scores the untrained model lower."""

    def __init__(self, fail_on: str = "") -> None:
        self.calls: list[list[str]] = []
        self.fail_on = fail_on
        self.failure = 4
        self.maps = True

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        arguments = command[3:]
        self.calls.append(arguments)
        if self.fail_on and self.fail_on in arguments:
            return subprocess.CompletedProcess(command, self.failure, "")
        if arguments[0] == "train":
            self._train(Path(arguments[arguments.index("--work-dir") + 1]))
        score = 0.25 if "--show" in arguments else 0.0
        found = {"detection": {"mAP": score}, "map": {"mIoU": 2 * score} if self.maps else None}
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    def _train(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        losses = [10.0] * 10 + [5.0] * 20 + [2.0] * 10
        records: list[dict[str, Any]] = [{"mode": "train", "loss": loss} for loss in losses]
        lines = [json.dumps(record) for record in [*records, {"mode": "val", "mAP": 0.1}]]
        (run / "log.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCommands]:
    def install(fail_on: str = "") -> FakeCommands:
        fake = FakeCommands(fail_on)
        monkeypatch.setattr("bevctl.quickstart.subprocess.run", fake)
        monkeypatch.setattr(Quickstart, "_fastest_precision", lambda _: "bf16")
        return fake

    return install


def test_trains_in_two_parts_and_evaluates_before_and_after(
    tmp_path: Path, commands: Callable[..., FakeCommands]
) -> None:
    fake = commands()
    summary = Quickstart(tmp_path, "cpu", Console(quiet=True)).run()
    names = ["data", "preflight", "train", "eval", "train", "train", "monitor", "eval"]
    assert [call[0] for call in fake.calls] == names
    start, stop, rest = (call for call in fake.calls if call[0] == "train")
    assert "--resume" not in start
    assert stop[-4:] == ["--resume", "auto", "--max-iters", "40"]
    assert rest[-2:] == ["--resume", "iter_40.pth"]
    assert all("--bf16" in call for call in fake.calls if call[0] not in ("data", "monitor"))
    assert (summary.first_loss, summary.last_loss) == (10.0, 2.0)
    assert (summary.untrained, summary.trained) == (Scores(0.0, 0.0), Scores(0.25, 0.5))
    assert [step.exit for step in summary.steps] == [0] * 8


def test_the_model_chooses_the_config(tmp_path: Path, commands: Callable[..., FakeCommands]) -> None:
    fake = commands()
    Quickstart(tmp_path, "cpu", Console(quiet=True), "petrv2").run()
    assert {call[1] for call in fake.calls if call[0] not in ("data", "monitor")} == {"petrv2_tiny"}


def test_the_command_offers_every_model() -> None:
    (option,) = [parameter for parameter in command.params if parameter.name == "model"]
    assert tuple(option.type.choices) == tuple(CONFIGS)  # type: ignore[attr-defined]


def test_document_has_the_promised_fields(tmp_path: Path, commands: Callable[..., FakeCommands]) -> None:
    commands()
    document = Quickstart(tmp_path, "cpu", Console(quiet=True)).run().document()
    assert set(document) == {"steps", "loss", "mAP", "mIoU", "run"}
    assert document["loss"] == {"first": 10.0, "last": 2.0}
    assert set(document["steps"][0]) == {"command", "exit", "seconds"}


def test_a_model_without_a_map_has_no_score_of_it(tmp_path: Path, commands: Callable[..., FakeCommands]) -> None:
    fake = commands()
    fake.maps = False
    document = Quickstart(tmp_path, "cpu", Console(quiet=True)).run().document()
    assert document["mIoU"] == {"untrained": None, "trained": None}


def test_a_second_call_keeps_the_first_run(tmp_path: Path, commands: Callable[..., FakeCommands]) -> None:
    commands()
    first = Quickstart(tmp_path, "cpu", Console(quiet=True)).run()
    second = Quickstart(tmp_path, "cpu", Console(quiet=True)).run()
    assert (Path(first.run).name, Path(second.run).name) == ("run", "run-2")


def test_a_failing_command_is_named_and_ends_it(tmp_path: Path, commands: Callable[..., FakeCommands]) -> None:
    fake = commands(fail_on="--resume")
    with pytest.raises(BevctlError, match=r"--resume auto.*exit code 4") as caught:
        Quickstart(tmp_path, "cpu", Console(quiet=True)).run()
    assert caught.value.code == ExitCode.RUN_FAILED
    assert fake.calls[-1][0] == "train"


@pytest.mark.parametrize(
    ("command", "code", "goes_on"), [("preflight", 3, True), ("preflight", 1, False), ("monitor", 1, True)]
)
def test_what_could_not_be_checked_is_no_reason_to_stop(
    tmp_path: Path, commands: Callable[..., FakeCommands], command: str, code: int, goes_on: bool
) -> None:
    fake = commands(fail_on=command)
    fake.failure = code
    quickstart = Quickstart(tmp_path, "cpu", Console(quiet=True))
    if goes_on:
        assert code in [step.exit for step in quickstart.run().steps]
    else:
        with pytest.raises(BevctlError, match=f"exit code {code}"):
            quickstart.run()
