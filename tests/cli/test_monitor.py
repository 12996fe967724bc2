"""`bevctl monitor` from the command line: documents, exit codes, pages, following."""

from __future__ import annotations

import http.client
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.runs.records import EventRecord, StepRecord
from bevctl.runs.writer import RunWriter
from tests.conftest import Outcome

Invoke = Callable[..., Outcome]
ROOT = Path(__file__).parents[2]


def mmcv_log(path: Path, windows: int = 40, **changes: list[str]) -> Path:
    """A text log of mmcv whose last line was written now; `changes` are texts of an item by window."""
    now = time.time()
    lines = []
    for window in range(windows):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 30 * (windows - window)))
        loss = 2 + 6 * math.exp(-window / 8)
        items = {"time": "0.600", "data_time": "0.020", "memory": "18637", "loss/object/cls": f"{loss / 2:.4f}"}
        items |= {"loss": f"{loss:.4f}", "grad_norm": f"{12 + window % 3:.4f}"}
        items |= {name: texts[window] for name, texts in changes.items()}
        tail = ", ".join(f"{name}: {text}" for name, text in items.items())
        lines.append(
            f"{stamp},000 - mmdet3d - INFO - Epoch [1][{50 * (window + 1)}/4000]\tlr: 2.000e-04, eta: 1:02:03, {tail}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return mmcv_log(tmp_path / "train.log")


@pytest.fixture
def nan_log(tmp_path: Path) -> Path:
    return mmcv_log(tmp_path / "nan.log", loss=["4.0000"] * 30 + ["nan"] * 10)


def own_run(folder: Path, iterations: int = 120, **meta: Any) -> Path:
    """A run folder as training leaves it."""
    writer = RunWriter(folder, 50)
    segment = {"started": 0.0, "iter": 0, "precision": "fp16", "batch": 4, "world": 1, "loss_scale": "dynamic"}
    facts = {
        "name": folder.name,
        "status": "finished",
        "iters_per_epoch": 60,
        "total_iters": 120,
        "segments": [segment],
    }
    writer.update(**{**facts, **meta})
    start = time.time() - iterations
    for i in range(1, iterations + 1):
        loss = 2 + 6 * math.exp(-i / 30)
        record = StepRecord(1 + (i - 1) // 60, i, start + i, lr=2e-4, loss=loss, losses={"loss/object/cls": loss})
        record.grad_norm, record.loss_scale, record.skipped_steps = (math.inf if i == 1 else 9.0), 32768.0, 1
        record.iter_time_s, record.data_time_s, record.memory_gib = 1.0, 0.02, 18.2
        writer.step(record, (i - 1) % 60 + 1, 60)
    writer.event(
        EventRecord("evaluation", "Epoch 2 evaluated", start + 125, data={"metrics": {"mAP": 0.4}, "epoch": 2})
    )
    writer.close()
    return folder


def test_the_document(invoke: Invoke, log: Path) -> None:
    outcome = invoke("monitor", str(log), "--json")
    document = outcome.document
    assert outcome.code == 0
    assert document["schema"] == "bevctl.monitor/1"
    assert (document["status"], document["state"]) == ("pass", "running")
    assert document["source"]["format"] == "mmcv-text"
    assert document["source"]["path"] == str(log)
    assert document["window"]["records"] == 40
    progress = document["progress"]
    assert (progress["epoch"], progress["iter"], progress["iters_per_epoch"]) == (1, 2000, 4000)
    assert document["metrics"]["memory_gib"] == pytest.approx(
        dict.fromkeys(("last", "mean", "min", "max", "p50", "p95"), 18637 / 1024) | {"nonfinite": 0}
    )
    assert set(document["precision"]) == {"fp16", "dtype", "loss_scale", "skipped_steps", "scale_drops"}
    assert document["validation"] == []
    assert document["alarms"] == []


def test_an_alarm_decides_the_exit_code_and_is_in_the_document(invoke: Invoke, nan_log: Path) -> None:
    outcome = invoke("monitor", str(nan_log), "--json")
    assert outcome.code == 1
    (alarm,) = outcome.document["alarms"]
    assert (alarm["id"], alarm["severity"]) == ("NAN001", "fail")
    assert alarm["first_record"]["iter"] == 1550
    assert set(alarm) == {"id", "severity", "title", "first_record", "evidence", "cause", "fix"}
    assert all(set(evidence) == {"where", "what"} for evidence in alarm["evidence"])
    loss = outcome.document["metrics"]["loss"]
    assert (loss["last"], loss["last_nonfinite"], loss["nonfinite"]) == (None, "nan", 10)
    assert invoke("monitor", str(nan_log)).code == 1


def test_fail_on(invoke: Invoke, tmp_path: Path) -> None:
    slow = mmcv_log(tmp_path / "slow.log", data_time=["0.300"] * 40)
    assert invoke("monitor", str(slow)).code == 0
    assert invoke("monitor", str(slow), "--fail-on", "warn").code == 1
    benign = mmcv_log(tmp_path / "benign.log", grad_norm=["nan"] + ["12.0"] * 39)
    assert invoke("monitor", str(benign), "--fail-on", "warn").code == 0
    assert invoke("monitor", str(benign), "--fail-on", "info").code == 1


def test_a_readable_file_without_anything_to_judge_is_unknown(invoke: Invoke, tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("Environment info:\nnothing yet\n")
    outcome = invoke("monitor", str(empty), "--json")
    assert (outcome.code, outcome.document["status"]) == (3, "unknown")


def test_what_cannot_be_read_is_a_usage_error(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("monitor", str(tmp_path / "no.log"), "--json")
    assert (outcome.code, outcome.document["status"]) == (2, "error")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--expect", "memory_gib"),
        ("--expect", "memory_gib=20:18"),
        ("--since", "yesterday"),
        ("--serve", "nowhere"),
        ("--notify", ""),
        ("--once", "--follow"),
        ("--against", "no.log"),
        ("--fail-on", "bad"),
    ],
)
def test_options_that_make_no_sense(invoke: Invoke, log: Path, arguments: tuple[str, ...]) -> None:
    outcome = invoke("monitor", str(log), *arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_expected_ranges(invoke: Invoke, log: Path) -> None:
    assert invoke("monitor", str(log), "--expect", "memory_gib=18:20", "--expect", "iter_time_s=:0.7").code == 0
    outcome = invoke("monitor", str(log), "--expect", "memory_gib=14:16", "--json")
    assert outcome.code == 1
    assert outcome.document["alarms"][0]["title"] == "memory_gib is 18.2, expected 14 to 16"


def test_windows_count_back_from_now_or_from_the_end(invoke: Invoke, log: Path) -> None:
    assert invoke("monitor", str(log), "--since", "5m", "--json").document["window"]["records"] in (9, 10)
    ends = invoke("monitor", str(log), "--since", "5m", "--from-end", "--json").document["window"]
    assert ends["records"] == 11
    nothing = invoke("monitor", str(log), "--since", "10s", "--json")
    assert (nothing.code, nothing.document["state"], nothing.document["progress"]["iter"]) == (3, "running", 2000)
    earlier = invoke("monitor", str(log), "--until", "5m", "--json").document["window"]["records"]
    assert earlier in (30, 31)


def test_a_run_of_bevctl_and_the_newest_below_runs(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("monitor").code == 2
    own_run(tmp_path / "runs" / "older")
    os.utime(tmp_path / "runs" / "older" / "log.jsonl", (1, 1))
    own_run(tmp_path / "runs" / "newer")
    outcome = invoke("monitor", "--json")
    document = outcome.document
    assert outcome.code == 0, document["alarms"]
    assert "newer" in outcome.err
    assert document["source"] == {"path": str(Path("runs/newer")), "format": "bevctl", "unknown_lines": 0}
    assert document["state"] == "finished"
    scale = {"loss_scale": 32768.0, "skipped_steps": 1, "scale_drops": 0}
    assert document["precision"] == {"fp16": True, "dtype": "fp16", **scale}
    assert document["progress"]["eta_s"] == 0
    assert document["validation"][0]["metrics"]["mAP"] == 0.4
    assert [alarm["id"] for alarm in document["alarms"]] == ["NAN002"]


def test_the_config_of_a_run_holds_what_is_expected(invoke: Invoke, tmp_path: Path) -> None:
    run = own_run(tmp_path / "run")
    (run / "config.yaml").write_text("name: run\nexpect:\n  memory_gib: '14:16'\n")
    assert [alarm["id"] for alarm in invoke("monitor", str(run), "--json").document["alarms"]] == ["EXP001", "NAN002"]


def test_two_runs(invoke: Invoke, log: Path, nan_log: Path) -> None:
    outcome = invoke("monitor", str(log), str(nan_log), "--json")
    document = outcome.document
    assert (outcome.code, document["status"]) == (1, "fail")
    assert [run["source"]["path"] for run in document["runs"]] == [str(log), str(nan_log)]
    assert [run["status"] for run in document["runs"]] == ["pass", "fail"]
    table = invoke("monitor", str(log), str(nan_log))
    assert "median of the last records" in table.out
    assert "loss over iterations" in table.out


def test_a_page_on_disk(invoke: Invoke, log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert invoke("monitor", str(log), "--html", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert invoke("monitor", str(log), "--html", str(tmp_path)).code == 2


def test_a_broken_log_is_no_traceback(invoke: Invoke, tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"\x00\xff" * 5000, os.urandom(4096), b"{" * 3000)):
        path = tmp_path / f"{number}.log"
        path.write_bytes(content)
        outcome = invoke("monitor", str(path), "--json")
        assert outcome.code in (2, 3)


def started(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "bevctl", "monitor", *arguments, "--interval", "0.2"]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TERM": "xterm"}, **options)


def append(path: Path, iteration: int) -> None:
    line = path.read_text().splitlines()[-1].replace("[2000/", f"[{iteration}/")
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with path.open("a") as file:
        file.write(f"{stamp}{line[19:]}\n")


def test_following_prints_a_line_or_a_document_for_what_is_new(log: Path) -> None:
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with started("--follow", str(log), **piped) as lines, started("--follow", "--json", str(log), **piped) as documents:
        assert lines.stdout is not None
        assert documents.stdout is not None
        assert "iteration 2,000" in lines.stdout.readline()
        assert json.loads(documents.stdout.readline())["progress"]["iter"] == 2000
        append(log, 2050)
        assert "iteration 2,050" in lines.stdout.readline()
        assert json.loads(documents.stdout.readline())["progress"]["iter"] == 2050
        for process in (lines, documents):
            process.send_signal(signal.SIGINT)
        assert lines.wait(10) == 0
        assert documents.wait(10) == 0
        assert documents.stdout.read() == ""


def test_following_ends_with_the_run(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("monitor", "--follow", str(own_run(tmp_path / "run")))
    assert outcome.code == 0
    assert "finished" in outcome.out


class Terminal:
    """A pseudo-terminal and what was written to it so far."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.text = ""

    def read_until(self, pattern: str, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self.ours], [], [], 0.1)[0]:
                self.text += os.read(self.ours, 65536).decode(errors="replace")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_redrawn_and_put_back(log: Path, ending: signal.Signals) -> None:
    terminal = Terminal()
    with started("--follow", str(log), stdout=terminal.theirs, stderr=subprocess.DEVNULL) as process:
        terminal.read_until("2,000")
        assert "\x1b[?1049h" in terminal.text
        append(log, 2050)
        terminal.read_until("2,050")
        process.send_signal(ending)
        terminal.read_until(re.escape("\x1b[?1049l"))
        terminal.read_until(re.escape("\x1b[?25h"))
        code = process.wait(10)
    assert code == (0 if ending is signal.SIGINT else 143)


def test_serving(log: Path) -> None:
    with started(
        "--serve", "127.0.0.1:0", str(log), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        assert found is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        connection.request("GET", "/")
        assert b"train.log" in connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_torch_is_never_imported(log: Path) -> None:
    script = (
        f"import sys; from bevctl.cli.main import run; run(['monitor', {str(log)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
