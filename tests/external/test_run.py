"""A run from its start to its exit code, with a script that pretends to train."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bevctl.cli.main import run as run_command
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode
from bevctl.external import follow
from bevctl.external.checkpoints import checkpoints
from bevctl.external.interpreter import RUN_MARK
from bevctl.external.process import StopSignals, left_behind
from bevctl.external.run import OUTPUT, ExternalRun, Policy, Result
from bevctl.monitor.state import state_of
from bevctl.monitor.watch import Question, Watch

from . import fakes


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.05)


def start(folder: Path, mode: str, policy: Policy | None = None, resume: Path | None = None, **options: Any) -> Result:
    console = Console(io.StringIO(), io.StringIO())
    return ExternalRun(fakes.launch(folder, mode, **options), policy or Policy(pause_s=0.0), console).run(resume)


def failing(folder: Path, mode: str, policy: Policy | None = None) -> BevctlError:
    with pytest.raises(BevctlError) as caught:
        start(folder, mode, policy)
    return caught.value


def record(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return document


def test_a_run_to_its_end(tmp_path: Path) -> None:
    stderr = io.StringIO()
    launch = fakes.launch(tmp_path, "fine", batch=3)
    result = ExternalRun(launch, Policy(), Console(io.StringIO(), stderr)).run(None)
    assert (result.code, result.restarts) == (ExitCode.OK, 0)
    assert result.checkpoint == tmp_path / "run" / "epoch_2.pth"
    raw = (tmp_path / "run" / OUTPUT).read_bytes()
    assert raw.count(b"Epoch [") == 8
    assert b"\x1b[A" in raw
    shown = stderr.getvalue()
    assert shown.count("Epoch [") == 8
    assert "\x1b" not in shown
    assert "bevctl: epoch " in shown
    assert (tmp_path / "run" / "bevctl" / "tiny.py").read_text().endswith("data = dict(samples_per_gpu=3)\n")
    document = record(tmp_path)
    assert (document["status"], document["engine"], document["tree"]["kind"]) == ("finished", "external", "mmdet3d-0.x")
    segment = document["segments"][0]
    assert (segment["exit"], segment["batch"], segment["precision"], segment["lr"]) == (0, 3, "fp32", 1e-4)
    assert segment["command"][1] == "tools/train.py"


def test_nothing_is_written_into_the_tree(tmp_path: Path) -> None:
    launch = fakes.launch(tmp_path, "fine", batch=3)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "tree").rglob("*"))
    ExternalRun(launch, Policy(), Console(io.StringIO(), io.StringIO())).run(None)
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "tree").rglob("*")) == before


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("startup", ExitCode.RUN_FAILED, "exit code 1: ImportError: cannot import name 'Config' from 'mmcv'"),
        ("nan", ExitCode.NONFINITE, "matrix contains invalid numeric entries"),
        ("oom", ExitCode.RUN_FAILED, "CUDA out of memory"),
        ("torn", ExitCode.RUN_FAILED, "ended with signal SIGKILL"),
    ],
)
def test_failures_and_their_codes(tmp_path: Path, mode: str, code: ExitCode, said: str) -> None:
    error = failing(tmp_path, mode)
    assert error.code == code
    assert said in error.message
    assert str(tmp_path / "run" / OUTPUT) in error.hint
    assert record(tmp_path)["status"] == ("nonfinite" if code == ExitCode.NONFINITE else "failed")


def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    result = start(tmp_path, "once", Policy(max_restarts=2, pause_s=0.0))
    assert (result.code, result.restarts) == (ExitCode.OK, 1)
    segments = record(tmp_path)["segments"]
    assert [segment["resume"] for segment in segments] == [None, str(tmp_path / "run" / "epoch_1.pth")]
    assert [segment["exit"] for segment in segments] == [1, 0]


@pytest.mark.parametrize(
    ("mode", "policy", "starts", "said"),
    [
        ("always", Policy(max_restarts=5, pause_s=0.0), 2, "no checkpoint was written since the last time"),
        ("startup", Policy(max_restarts=5, pause_s=0.0), 1, "had not begun to train"),
        ("nan", Policy(max_restarts=5, pause_s=0.0), 1, "would meet it again"),
        ("oom", Policy(max_restarts=5, pause_s=0.0), 1, "would meet it again"),
        ("always", Policy(), 1, "--max-restarts N"),
        ("always", Policy(max_restarts=1, pause_s=0.0), 2, "no checkpoint was written"),
    ],
)
def test_restarts_end(tmp_path: Path, mode: str, policy: Policy, starts: int, said: str) -> None:
    assert said in failing(tmp_path, mode, policy).hint
    assert len(record(tmp_path)["segments"]) == starts


def test_restarts_are_used_up(tmp_path: Path) -> None:
    """Each start gets an epoch further and dies: the cap counts, whatever the progress."""
    root, _ = fakes.tree(tmp_path)
    launch = fakes.launch(tmp_path, "torn", epochs=9)
    script = root / "tools" / "train.py"
    script.write_text(script.read_text().replace("epoch == 2 and step == 3", "epoch == start + 2"))
    with pytest.raises(BevctlError) as caught:
        ExternalRun(launch, Policy(max_restarts=2, pause_s=0.0), Console(io.StringIO(), io.StringIO())).run(None)
    assert "All 2 restarts are used up" in caught.value.hint
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["epoch_3.pth", "epoch_2.pth", "epoch_1.pth"]


def test_what_a_run_leaves_behind_is_ended(tmp_path: Path) -> None:
    stderr = io.StringIO()
    ExternalRun(fakes.launch(tmp_path, "orphan"), Policy(), Console(io.StringIO(), stderr)).run(None)
    assert "Ended 1 process that it left behind" in stderr.getvalue()
    assert left_behind(str(tmp_path / "run")) == []


def test_orphans_of_an_earlier_start_are_ended_before_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, RUN_MARK: str(tmp_path / "run")}
    orphan = subprocess.Popen(command, env=environment, start_new_session=True)
    stderr = io.StringIO()
    ExternalRun(fakes.launch(tmp_path, "fine"), Policy(), Console(io.StringIO(), stderr)).run(None)
    orphan.wait(10)
    assert "Ended 1 process of an earlier start" in stderr.getvalue()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`bevctl train --engine external` as a process, at its second epoch."""
    yield from _begun(tmp_path, "fine", "epoch_1.pth")


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The same with a script that ignores signals, before its first checkpoint."""
    yield from _begun(tmp_path, "stubborn", OUTPUT)


def _begun(tmp_path: Path, mode: str, until: str) -> Iterator[subprocess.Popen[str]]:
    _, config = fakes.tree(tmp_path)
    command = [sys.executable, "-m", "bevctl", "train", str(config), "--engine", "external", "--no-preflight"]
    command += ["--work-dir", str(tmp_path / "run"), "--cfg-options", f"mode={mode}", "pause=0.1", "epochs=99"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    sign = tmp_path / "run" / until
    while not (sign.exists() and b"Epoch [" in (tmp_path / "run" / OUTPUT).read_bytes()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()
    for left in left_behind(str(tmp_path / "run")):
        left.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_ends_the_group(slow: subprocess.Popen[str], tmp_path: Path, number: signal.Signals) -> None:
    slow.send_signal(number)
    _, said = slow.communicate(timeout=30)
    assert slow.returncode == ExitCode.PREEMPTED
    assert f"Stopped by {number.name}. epoch_" in said
    assert "Continue with --resume auto" in said
    assert left_behind(str(tmp_path / "run")) == []
    assert record(tmp_path)["status"] == "preempted"
    report = Watch(tmp_path / "run", Question()).look()
    state = state_of(report.log, report.progress, time.time())
    assert (state.name, "stopped by a signal" in state.why) == ("ended", True)


def test_a_second_signal_kills(stubborn: subprocess.Popen[str], tmp_path: Path) -> None:
    stubborn.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert stubborn.poll() is None
    stubborn.send_signal(signal.SIGTERM)
    stubborn.communicate(timeout=30)
    assert stubborn.returncode == ExitCode.TERMINATED
    assert left_behind(str(tmp_path / "run")) == []


def test_a_folder_in_use_is_refused(slow: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match=f"in use by process {slow.pid}"):
        start(tmp_path, "fine")
    assert slow.poll() is None


def test_a_stubborn_group_is_killed_after_its_grace(tmp_path: Path) -> None:
    """In this process: the handler only counts, whoever sends the signal."""
    output = tmp_path / "run" / OUTPUT

    def send() -> None:
        while not (output.exists() and b"Epoch [" in output.read_bytes()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    started = time.monotonic()
    result = start(tmp_path, "stubborn", Policy(grace_s=0.3), epochs=99, pause=0.5)
    thread.join()
    assert result.code == ExitCode.TERMINATED
    assert time.monotonic() - started < 20
    assert left_behind(str(tmp_path / "run")) == []


def test_hangups_stay_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.first is None
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.first is signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    launch = fakes.launch(tmp_path, "fine")
    (tmp_path / "tree" / "tools" / "train.py").unlink()
    with pytest.raises(BevctlError, match="ended with exit code 2"):
        ExternalRun(launch, Policy(), Console(io.StringIO(), io.StringIO())).run(None)


def test_monitor_reads_such_a_run(tmp_path: Path) -> None:
    start(tmp_path, "fine")
    report = Watch(tmp_path / "run", Question()).look()
    assert report.log.format == "mmcv-text"
    assert report.log.records == 8
    assert state_of(report.log, report.progress, time.time()).name == "finished"


def test_monitor_tells_what_it_died_of(tmp_path: Path) -> None:
    failing(tmp_path, "oom")
    report = Watch(tmp_path / "run", Question()).look()
    state = state_of(report.log, report.progress, time.time())
    assert state.name == "died"
    assert "CUDA out of memory" in state.why


def test_the_newest_run_may_be_one_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fakes.tree(tmp_path)
    arguments = ["train", "tree/configs/tiny.py", "--engine", "external", "--no-preflight", "--set", "mode=fine"]
    assert run_command(arguments) == ExitCode.OK
    capsys.readouterr()
    run_command(["monitor", "--once", "--json"])
    assert json.loads(capsys.readouterr().out)["source"]["path"] == "runs/tiny"


def test_psutil_sees_the_environment_of_processes() -> None:
    """What finding processes by their mark rests on."""
    assert psutil.Process().environ().get("PATH")
