"""Failures in logs: what they mean, and which of several came first."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.runs.readers.events import FAILURES, classify, describe, memory_figures
from bevctl.runs.records import EventRecord, RunLog
from bevctl.runs.source import open_source
from tests.runs.logs import mmcv_line, mmcv_lines, mmcv_message, write

OOM = (
    "CUDA out of memory. Tried to allocate 1.10 GiB (GPU 1; 23.70 GiB total capacity; 14.20 GiB already allocated; "
    "0.60 GiB free; 21.90 GiB reserved in total by PyTorch)"
)
OOM_2 = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 300.00 MiB is "
    "free. Process 4242 has 23.30 GiB memory in use. Of the allocated memory 20.10 GiB is allocated by PyTorch, and "
    "2.40 GiB is reserved by PyTorch but unallocated."
)


def _failures(path: Path, lines: list[str]) -> list[EventRecord]:
    log = _read(path, lines)
    return [event for event in log.events if event.kind == "failure"]


def _read(path: Path, lines: list[str]) -> RunLog:
    return open_source(write(path / "train.log", lines)).read()


def _traceback(last: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "train.py", line 7, in main', "    train()", last]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (f"RuntimeError: {OOM}", "cuda_oom"),
        (f"torch.cuda.OutOfMemoryError: {OOM_2}", "cuda_oom"),
        ("RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It is possible", "shared_memory"),
        ("RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed. ", "worker_killed"),
        ("RuntimeError: DataLoader worker (pid(s) 41, 42) exited unexpectedly", "worker_exited"),
        ("OSError: [Errno 28] No space left on device: 'epoch_3.pth'", "disk_full"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk_full"),
        ("ValueError: matrix contains invalid numeric entries", "nonfinite_input"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no_kernel"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal_access"),
        ("ImportError: /x/mmcv/_ext.so: undefined symbol: _ZNK2at10TensorBase", "undefined_symbol"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration before", "unused_parameters"),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 3] Watchdog caught collective operation timeout: W", "nccl_timeout"),
        ("RuntimeError: NCCL error in: /x/ProcessGroupNCCL.cpp:1269, unhandled system error", "nccl_error"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "rank_failed"),
        ("./train.sh: line 12:  8123 Killed                  python tools/train.py", "killed"),
        ("Killed", "killed"),
        ("Segmentation fault (core dumped)", "segfault"),
        ("slurmstepd: error: *** JOB 7 ON gpu3 CANCELLED AT 2026-02-03T04:05:06 DUE TO TIME LIMIT ***", "time_limit"),
        ("KeyboardInterrupt", "interrupted"),
        ("MemoryError", "host_oom"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "connection_lost"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to", "weights_only"),
    ],
)
def test_every_failure_is_named(tmp_path: Path, line: str, cause: str) -> None:
    (failure,) = _failures(tmp_path, [*mmcv_lines(3), line])
    assert failure.data["cause"] == cause
    assert (failure.data["meaning"], failure.data["fix"]) == (FAILURES[cause].meaning, FAILURES[cause].fix)
    assert (failure.iter, failure.epoch, failure.where) == (150, 1, "train.log:4")
    assert failure.data["role"] == "cause", "the only one there is"


@pytest.mark.parametrize(
    "line",
    [
        "memory: 4000, loss: 0.5",
        "x.py:3: UserWarning: retrying after Connection reset by peer",
        "  RuntimeError: indented, so part of something else",
        "The Killed Game",
        "A shape mismatch is normal here, and so is a Broken pipe.",
        "",
        mmcv_message(1, "caught MemoryError, went on"),
    ],
)
def test_harmless_lines_are_no_failures(tmp_path: Path, line: str) -> None:
    assert _failures(tmp_path, [*mmcv_lines(3), line]) == []


def test_an_error_that_a_logger_wrote(tmp_path: Path) -> None:
    (failure,) = _failures(tmp_path, [*mmcv_lines(3), mmcv_message(200, f"failed: {OOM}", level="ERROR")])
    assert failure.data["cause"] == "cuda_oom"


def test_any_other_traceback_is_an_exception_with_its_frames(tmp_path: Path) -> None:
    lines = [*mmcv_lines(2), *_traceback("my.own.Problem: it broke"), *mmcv_lines(4)[2:]]
    log = _read(tmp_path, lines)
    (failure,) = [event for event in log.events if event.kind == "failure"]
    assert (failure.data["cause"], failure.data["exception"]) == ("exception", "my.own.Problem")
    assert failure.data["frames"] == ['File "train.py", line 7, in main']
    assert failure.message == "my.own.Problem: it broke"
    assert (log.records, log.unknown_lines) == (4, 0)


def test_a_header_does_not_swallow_a_crash(tmp_path: Path) -> None:
    lines = [mmcv_message(0, "Config:"), "a = 1", *_traceback("KeyError: 'a'")]
    log = _read(tmp_path, lines)
    assert [event.data["cause"] for event in log.events] == ["exception"]
    assert log.header["config"] == "a = 1"


def test_the_first_cause_among_what_it_dragged_along(tmp_path: Path) -> None:
    lines = [
        *mmcv_lines(3),
        "[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=X)",
        *(f"[rank2]: {line}" for line in _traceback(f"torch.cuda.OutOfMemoryError: {OOM_2}")),
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 12 closing signal SIGTERM",
        *_traceback("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "),
    ]
    roles = {event.data["cause"]: event.data["role"] for event in _failures(tmp_path, lines)}
    assert roles == {"nccl_timeout": "consequence", "cuda_oom": "cause", "rank_failed": "consequence"}


def test_of_chained_exceptions_the_first_is_the_cause(tmp_path: Path) -> None:
    lines = [
        *mmcv_lines(3),
        *_traceback("FileNotFoundError: [Errno 2] No such file: 'samples/1.jpg'"),
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *_traceback("AttributeError: 'NoneType' object has no attribute 'shape'"),
    ]
    first, second = _failures(tmp_path, lines)
    assert (first.data["role"], second.data["role"]) == ("cause", "consequence")
    assert first.data["cluster"] == second.data["cluster"]


def test_failures_of_two_moments_have_two_causes(tmp_path: Path) -> None:
    lines = [
        *mmcv_lines(2),
        *_traceback(f"RuntimeError: {OOM}"),
        mmcv_message(300, "Start running, host: me@here, work_dir: /runs/a"),
        *mmcv_lines(2),
        *_traceback(f"RuntimeError: {OOM}"),
    ]
    one, two = _failures(tmp_path, lines)
    assert (one.data["role"], two.data["role"]) == ("cause", "cause")
    assert one.data["cluster"] != two.data["cluster"]


def test_ranks_that_say_the_same_are_one_event(tmp_path: Path) -> None:
    crash = _traceback("RuntimeError: Sizes of tensors must match except in dimension 0")
    mixed = [f"[rank{rank}]: {line}" for line in crash for rank in range(4)]
    (failure,) = _failures(tmp_path, [*mmcv_lines(2), *mixed])
    assert (failure.data["cause"], failure.data["count"]) == ("size_mismatch", 4)


def test_memory_figures_of_both_wordings() -> None:
    assert memory_figures(OOM) == {
        "tried_gib": 1.1,
        "capacity_gib": 23.7,
        "free_gib": 0.6,
        "allocated_gib": 14.2,
        "reserved_gib": 21.9,
    }
    figures = memory_figures(OOM_2)
    assert (figures["tried_gib"], figures["capacity_gib"], figures["allocated_gib"]) == (0.5, 23.65, 20.1)
    assert figures["reserved_gib"] == pytest.approx(22.5)
    assert memory_figures("CUDA out of memory") == {}


def test_figures_and_signals_are_in_the_data() -> None:
    found = describe(OOM, "RuntimeError")
    assert found is not None
    assert found.data["tried_gib"] == 1.1
    killed = describe("DataLoader worker (pid 7) is killed by signal: Killed. ", "RuntimeError")
    assert killed is not None
    assert killed.data["signal"] == "Killed"


def test_every_pattern_is_reachable() -> None:
    assert classify("nothing") is None
    assert all(failure.meaning.endswith(".") for failure in FAILURES.values())


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    lines = [
        mmcv_message(0, "The model and loaded state dict do not match exactly", level="WARNING"),
        "",
        "size mismatch for heads.map.a.weight: copying a param with shape torch.Size([2]) from checkpoint, the shape",
        "unexpected key in source state_dict: heads.map.b, heads.map.c, encoders.camera.d",
        "",
        "missing keys in source state_dict: heads.object.e",
        *mmcv_lines(1),
    ]
    log = _read(tmp_path, lines)
    (event,) = log.events
    assert event.kind == "checkpoint_mismatch"
    assert (event.data["size_mismatch"], event.data["unexpected"], event.data["missing"]) == (1, 3, 1)
    assert event.data["prefixes"]["unexpected"] == {"heads.map": 2, "encoders.camera": 1}
    assert log.unknown_lines == 0


def test_a_harmless_warning_of_the_first_skipped_step(tmp_path: Path) -> None:
    warning = (
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later"
    )
    log = _read(tmp_path, [f"/x/lr_scheduler.py:129: {warning}", mmcv_line(1, 50)])
    (event,) = log.events
    assert (event.kind, event.data["topic"]) == ("warning", "scheduler_order")
