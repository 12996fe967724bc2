"""`diagnose hang`: stalled or dead, and who waits for whom, with real processes where they are needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bevctl.diagnose import hang, rank_processes
from bevctl.diagnose.hang import gpu_pattern
from bevctl.diagnose.rank_findings import cannot_run, where_they_stand
from bevctl.diagnose.rank_processes import RankProcess, doing, main_thread
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Status
from bevctl.diagnose.subject import read_subject
from bevctl.finding import Severity
from bevctl.monitor.gpus import Gpu
from tests.conftest import Outcome
from tests.runs.logs import START, mmcv_line, mmcv_message, write

from .cases import ask, evidence, found, header, mmcv_config, own_run, the, windows

MINUTE = 60.0
EVALUATION_S = 11 * MINUTE


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "live_gpus", tuple)


def _two_epochs(last: str | None = "Saving checkpoint at 2 epochs") -> list[str]:
    """Two epochs of 400 s with an evaluation of 11 min after the first, and the last line."""
    first = [mmcv_line(1, inner, inner, time="1.000") for inner in range(50, 401, 50)]
    score = mmcv_message(400 + EVALUATION_S, "Epoch(val) [1][100]\tmAP: 0.2100")
    second = [mmcv_line(2, inner, 400 + EVALUATION_S + inner, time="1.000") for inner in range(50, 401, 50)]
    saved = [mmcv_message(401, "Saving checkpoint at 1 epochs"), score]
    return [*first, *saved, *second, *([mmcv_message(801 + EVALUATION_S, last)] if last is not None else [])]


def _later(monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    """The clock so long after the last line of `_two_epochs`."""
    now = START.timestamp() + 801 + EVALUATION_S + minutes * MINUTE
    monkeypatch.setattr(time, "time", lambda: now)


@pytest.mark.parametrize(("minutes", "is_found"), [(20, False), (60, True), (90, True)])
def test_silence_after_saving_is_measured_by_earlier_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, is_found: bool
) -> None:
    path = write(tmp_path / "a.log", _two_epochs())
    _later(monkeypatch, minutes)
    answer = ask("hang", path)
    assert found(answer) == ({"RUN001": "fail", "HANG101": "warn"} if is_found else {})
    assert answer.status is (Status.FOUND if is_found else Status.CLEAR)
    told = the(answer, "HANG101")
    assert "after it began to save a checkpoint" in told.title
    assert "evaluations took up to 11 min here; a stall from 33 min on" in evidence(told)


def test_silence_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.log", _two_epochs(None)[:-3])
    _later(monkeypatch, 30)
    answer = ask("hang", path)
    assert found(answer) == {"RUN001": "fail", "HANG101": "warn"}
    assert "in training" in the(answer, "HANG101").title
    assert "py-spy" in the(answer, "RUN001").fix[0].why
    _later(monkeypatch, -1)
    assert ask("hang", path).status is Status.CLEAR


@pytest.mark.parametrize(("iteration", "expected"), [(50, hang.TRAINING), (60, hang.SAVING)])
def test_a_checkpoint_that_is_written_while_training_goes_on(tmp_path: Path, iteration: int, expected: str) -> None:
    data = {"iteration": iteration, "epoch": 1}
    event = {"kind": "checkpoint", "message": "Saved", "time": 1.79e9 + 99, "data": data}
    run = own_run(tmp_path, {"loss": [2.0] * 60}, 60, [event])
    view = read_subject(DiagnoseRequest(run)).view
    assert view is not None
    assert hang.last_act(view) == expected


def test_an_old_log_does_not_tell_a_hang_from_an_end(tmp_path: Path) -> None:
    answer = ask("hang", write(tmp_path / "a.log", windows(8)))
    assert (answer.status, found(answer)) == (Status.INCONCLUSIVE, {})


def test_a_dead_run_does_not_hang(tmp_path: Path) -> None:
    lines = [*windows(8), "Traceback (most recent call last):", "KeyError: 'infos'"]
    answer = ask("hang", write(tmp_path / "a.log", lines))
    assert answer.status is Status.CLEAR
    assert "is dead and does not hang: KeyError" in answer.looked_at[-1]


NCCL = (
    "[rank1]:[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, "
    "OpType=ALLREDUCE, NumelIn=4096, Timeout(ms)=600000) ran for 600123 milliseconds before timing out."
)
UNUSED = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."


@pytest.mark.parametrize("line", [NCCL, UNUSED])
def test_what_the_log_says_of_ranks_that_waited(tmp_path: Path, line: str) -> None:
    assert found(ask("hang", write(tmp_path / "a.log", [*windows(8), line])))["RUN004"] == "fail"


def test_a_lost_connection_sends_to_the_rank_that_is_gone(tmp_path: Path) -> None:
    line = "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer"
    told = the(ask("hang", write(tmp_path / "a.log", [*windows(8), line])), "RUN004")
    assert "its exit code (-9: killed" in told.fix[0].why


@pytest.mark.parametrize(("checkpointed", "advice"), [(True, "does not go with with_cp"), (False, "=True")])
def test_unused_parameters_are_searched_only_without_checkpointing(
    tmp_path: Path, checkpointed: bool, advice: str
) -> None:
    config = mmcv_config().replace("model = dict(", f"model = dict(neck=dict(with_cp={checkpointed}),")
    answer = ask("hang", write(tmp_path / "a.log", [*header(config, "0,1"), *windows(8), UNUSED]))
    assert advice in the(answer, "RUN004").fix[0].why


@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_settings_that_exclude_each_other(tmp_path: Path, unused: bool, checkpointed: bool) -> None:
    config = mmcv_config(more=f"find_unused_parameters = {unused}\n")
    config = config.replace("model = dict(", f"model = dict(neck=dict(with_cp={checkpointed}),")
    answer = ask("hang", write(tmp_path / "a.log", [*header(config, "0,1"), *windows(8), NCCL]))
    assert ("HANG105" in found(answer)) == (unused and checkpointed)


@pytest.mark.parametrize(("norm", "gpus", "is_found"), [("SyncBN", "0,1", True), ("GN", "0,1", False)])
def test_a_norm_that_waits_for_all_ranks(tmp_path: Path, norm: str, gpus: str, is_found: bool) -> None:
    config = mmcv_config().replace("model = dict(", f"model = dict(head=dict(norm_cfg=dict(type='{norm}')),")
    answer = ask("hang", write(tmp_path / "a.log", [*header(config, gpus), *windows(8), NCCL]))
    assert ("HANG105" in found(answer)) == is_found


@pytest.mark.parametrize(
    ("utilization", "title"),
    [
        ((100, 0, 100, 100), "GPU 1 idle, 0, 2, 3 busy"),
        ((0, 0), "All GPUs are idle"),
        ((100, 99), "All GPUs are busy"),
        ((55, 60), None),
        ((100,), None),
    ],
)
def test_patterns_of_gpus(utilization: tuple[float, ...], title: str | None) -> None:
    gpus = [Gpu(index, "card", 9.0, 24.0, share) for index, share in enumerate(utilization)]
    titles = [finding.title for finding in gpu_pattern(gpus, True)]
    assert [t for t in titles if title is not None and t.startswith(title)] == titles
    assert bool(titles) == (title is not None)
    assert list(gpu_pattern(gpus, False)) == []


DUMP = """Process 812: python train.py
Python v3.11.9 (/usr/bin/python3.11)

Thread 0x7F (idle): "MainThread"
    _wait (torch/futures/__init__.py:12)
    {inner}
    train_step (engine/trainer.py:88)
    main (tools/train.py:20)
Thread 0x7E (idle): "Thread-1"
    pin_memory_loop (torch/utils/data/_utils/pin_memory.py:54)
"""


def _rank(rank: int, inner: str) -> RankProcess:
    return RankProcess(800 + rank, rank, "sleeping", stack=tuple(main_thread(DUMP.format(inner=inner).splitlines())))


COLLECTIVE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
LOADER = "_try_get_data (torch/utils/data/dataloader.py:1251)"


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (COLLECTIVE, "waits in a collective"),
        (LOADER, "waits for data"),
        ("_engine_run_backward (torch/autograd/graph.py:769)", "computes gradients"),
        ("single_gpu_test (mmdet/apis/test.py:27)", "evaluates"),
        ("forward (models/bevfusion.py:77)", ""),
    ],
)
def test_what_a_stack_says(inner: str, expected: str) -> None:
    process = _rank(0, inner)
    assert (process.stack[2], doing(process.stack)) == ("train_step (engine/trainer.py:88)", expected)


def _stacks(*inner: str) -> Sequence[DiagnoseFinding]:
    return list(where_they_stand([_rank(rank, frame) for rank, frame in enumerate(inner)], (), 0.0, is_live=True))


def test_the_rank_that_stands_apart_is_named() -> None:
    (finding,) = _stacks(COLLECTIVE, LOADER, COLLECTIVE)
    assert finding.title.startswith("rank 1 (pid 801): waits for data, while the others")
    (alike,) = _stacks(COLLECTIVE, COLLECTIVE)
    assert alike.title == "All 2 ranks are alike: waits in a collective"
    (ended,) = where_they_stand([_rank(0, COLLECTIVE)], (), 0.0, is_live=False)
    assert ended.severity is Severity.INFO


def test_processes_at_work_are_no_finding() -> None:
    assert list(cannot_run([RankProcess(1, 0, "running"), RankProcess(2, 1, "sleeping")])) == []
    (finding,) = cannot_run([RankProcess(1, 0, "disk-sleep", ((8, "zombie"), (9, "stopped")))])
    assert "storage" in finding.fix[0].why
    assert "loading process 8 is dead" in evidence(finding)
    assert finding.fix[-1].why == "kill -CONT 9"


WRITER = "import sys, time\nfile = open(sys.argv[1], 'a')\nprint('open', flush=True)\ntime.sleep(60)\n"


@contextmanager
def _writer(path: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the log open, as a training run has."""
    command = [sys.executable, "-S", "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_stopped_process_is_found_by_the_log_that_it_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes.shutil, "which", lambda _: None)
    path = write(tmp_path / "a.log", windows(8))
    with _writer(path, RANK="1") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        answer = ask("hang", path)
    assert found(answer) == {"HANG103": "fail", "HANG106": "fail"}
    told = the(answer, "HANG103")
    assert f"rank 1 (pid {process.pid}): stopped by a signal" in told.title
    assert told.fix[0].why == f"kill -CONT {process.pid}"
    rows = [row for table in answer.tables for row in table.rows]
    assert [tuple(row[:3]) for row in rows] == [(1, str(process.pid), "stopped")]


def test_stacks_come_from_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "py-spy"
    write(program, ["#!/bin/sh", "cat <<'END'", *DUMP.format(inner=LOADER).splitlines(), "END"])
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    path = write(tmp_path / "a.log", windows(8))
    with _writer(path):
        answer = ask("hang", path)
    assert "waits for data" in the(answer, "HANG104").title
    assert "engine/trainer.py:88" in evidence(the(answer, "HANG104"))


def test_a_program_that_may_not_look_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "py-spy"
    write(program, ["#!/bin/sh", "echo 'Permission Denied' >&2", "exit 1"])
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    path = write(tmp_path / "a.log", windows(8))
    with _writer(path):
        answer: Diagnosis = ask("hang", path)
    assert any("Permission Denied" in said for said in answer.looked_at)
    assert "HANG104" not in found(answer)


def test_the_command(invoke: Callable[..., Outcome], tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", [*windows(8), NCCL])
    result = invoke("diagnose", "hang", path, "--json")
    assert (result.code, result.document["topic"]) == (1, "hang")
    assert invoke("diagnose", "hang", write(tmp_path / "b.log", windows(4))).code == 3
