"""Trouble that was reported in public about FP16 without effect (B), memory (C) and hangs (D): what is said of each.

Orphans of a killed run (D13) and SyncBN without a launcher (D11) are preflight's, and tested with it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bevctl.diagnose import hang
from bevctl.diagnose.report import Diagnosis
from bevctl.monitor.gpus import Gpu
from tests.runs.logs import START, mmcv_line, mmcv_message, write

from .cases import CRASHING_FP16, ask, found, header, mmcv_config, windows

A100, V100, P40, RTX2080, RTX3090 = (
    "NVIDIA A100-SXM4-40GB",
    "Tesla V100-SXM2-32GB",
    "Tesla P40",
    "NVIDIA GeForce RTX 2080 Ti",
    "NVIDIA GeForce RTX 3090",
)
FP16, FP32 = mmcv_config(4, more=CRASHING_FP16), mmcv_config(4, more="fp16 = None\n")
TRACE = ["Traceback (most recent call last):", '  File "models/lss.py", line 71, in forward', "    x()"]


def oom(tried: float, allocated: float, reserved: float, free: float = 0.6) -> list[str]:
    return [
        *TRACE,
        f"RuntimeError: CUDA out of memory. Tried to allocate {tried} GiB (GPU 1; 23.70 GiB total capacity; "
        f"{allocated} GiB already allocated; {free} GiB free; {reserved} GiB reserved in total by PyTorch)",
    ]


def worker(how: str) -> list[str]:
    return [*TRACE, f"RuntimeError: DataLoader worker (pid 812) is {how}"]


OOM_2 = [
    *TRACE,
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 300.00 MiB is free. Process 4242 has 23.30 GiB memory in use. Of the allocated memory 20.10 "
    "GiB is allocated by PyTorch, and 2.40 GiB is reserved by PyTorch but unallocated.",
]
BUS = worker(
    "killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to "
    "raise your shared memory limit."
)
UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
    "Parameter indices which did not receive grad for rank 0: 12 13"
)
TWICE = (
    "RuntimeError: Expected to mark a variable ready only once. Parameter at index 142 has been marked as ready twice."
)
WATCHDOG = "[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812)"


@dataclass(frozen=True)
class Case:
    """A reported case: a log, perhaps the FP32 run to compare it with, and what the answer must hold."""

    id: str
    topic: str
    expected: str
    """The finding that comes first; "" for none above information."""
    words: tuple[str, ...] = ()
    """In the findings and tables."""
    config: str = FP16
    gpu: str = V100
    gpus: str = "0,1"
    log: dict[str, str] = field(default_factory=dict)
    against: dict[str, str] | None = None
    end: Sequence[str] = ()
    count: int = 30


CASES = (
    Case(
        "B01",
        "no-speedup",
        "PREC106",
        ("memory x 0.65",),
        gpu=RTX2080,
        log={"time": "0.670", "memory": "6000"},
        against={},
    ),
    Case("B02", "no-speedup", "PREC106", ("TF32",), gpu=A100, log={"time": "0.600", "memory": "6000"}, against={}),
    Case("B03", "no-speedup", "PREC001", ("TF32",), gpu=A100, log={"time": "0.606", "memory": "9200"}, against={}),
    Case(
        "B05",
        "no-speedup",
        "PREC001",
        log={"time": "0.890", "memory": "10980"},
        against={"time": "0.900", "memory": "11000"},
    ),
    Case(
        "B06",
        "fp16-inactive",
        "PREC001",
        log={"time": "0.890", "memory": "10980"},
        against={"time": "0.900", "memory": "11000"},
    ),
    Case(
        "B06 active",
        "fp16-inactive",
        "",
        log={"time": "0.620", "memory": "7100"},
        against={"time": "0.900", "memory": "11000"},
    ),
    Case("B08", "fp16-inactive", "PREC102", ("6.1",), gpu=P40),
    Case(
        "B09",
        "no-speedup",
        "TASK002",
        ("losses of map are missing", "no gain of FP16"),
        log={"loss": "1.4000", "memory": "5100", "time": "0.420"},
        against={"loss": "2.9000", "loss/map/divider/focal": "0.4700"},
    ),
    Case("B11", "no-speedup", "TIME002", log={"time": "9.500", "data_time": "0.900"}),
    Case("B12", "no-speedup", "TIME002", gpu=A100, gpus="0,1,2,3", log={"time": "11.000", "data_time": "0.300"}),
    Case(
        "B13",
        "no-speedup",
        "SPEED101",
        ("77%", "no loading processes"),
        config=FP16.replace("workers_per_gpu=2", "workers_per_gpu=0"),
        log={"time": "3.100", "data_time": "2.400"},
    ),
    Case("B14", "no-speedup", "", ("10 to 15 %",), log={"time": "0.525", "memory": "6000"}, against={}),
    Case(
        "C01",
        "oom",
        "MEM002",
        ("never fitted", "image backbone recomputed"),
        mmcv_config(2),
        RTX3090,
        "0,1,2,3",
        end=oom(0.5, 22.0, 22.6),
        count=0,
    ),
    Case("C02", "oom", "MEM002", ("7.7 GiB lay idle", "max_split_size_mb"), end=oom(1.1, 14.2, 21.9)),
    Case("C02 torch 2", "oom", "MEM002", ("2.4 GiB lay idle",), end=OOM_2),
    Case(
        "C03",
        "oom",
        "MEM002",
        ("the batch is 1 already", "BEVFusion detection of mmdet3d"),
        mmcv_config(1),
        end=oom(0.3, 22.4, 22.6),
        count=0,
    ),
    Case(
        "C06",
        "oom",
        "MEM002",
        ("BatchNorm then sees one sample",),
        mmcv_config(2, more=CRASHING_FP16),
        end=oom(1.1, 20.9, 21.9),
    ),
    Case("D01", "oom", "LOAD002", ("shared memory",), end=BUS),
    Case("D02", "oom", "LOAD002", ("memory",), end=worker("killed by signal: Killed. "), count=40),
    Case("D03", "oom", "LOAD002", end=worker("killed by signal: Killed. "), count=2),
    Case(
        "D03 exit", "oom", "LOAD002", end=[*TRACE, "RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly"]
    ),
    Case("D08", "hang", "RUN004", end=[*TRACE, TWICE]),
    Case("D09", "hang", "RUN004", ("find_unused_parameters=True",), end=[*TRACE, UNUSED]),
    Case(
        "D07",
        "hang",
        "RUN004",
        ("find_unused_parameters", "with_cp"),
        FP16.replace("model = dict(", "model = dict(neck=dict(with_cp=True),") + "find_unused_parameters = True\n",
        end=[WATCHDOG],
    ),
    Case(
        "D12",
        "hang",
        "RUN004",
        ("SyncBN", "GroupNorm"),
        FP16.replace("model = dict(", "model = dict(map_head=dict(norm_cfg=dict(type='SyncBN')),"),
        end=[WATCHDOG],
    ),
)


def said(answer: Diagnosis) -> str:
    """Everything that the answer says."""
    findings = [str(dataclasses.asdict(finding)) for finding in answer.findings]
    return " ".join([*findings, *(table.title for table in answer.tables), *answer.looked_at])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_is_said_of_a_reported_case(tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "live_gpus", tuple)
    lines = [*header(case.config, case.gpus, case.gpu), *windows(case.count, **case.log), *case.end]
    against = None
    if case.against is not None:
        base = [*header(FP32, case.gpus, case.gpu), *windows(30, **case.against)]
        against = write(tmp_path / "fp32.log", base)
    answer = ask(case.topic, write(tmp_path / "run.log", lines), against=against)
    assert next(iter(found(answer)), "") == case.expected
    for word in case.words:
        assert word in said(answer)


def test_d05_one_gpu_idle_and_the_others_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(index, "card", 9.0, 24.0, 0.0 if index == 2 else 100.0) for index in range(4))
    monkeypatch.setattr(hang, "live_gpus", lambda: cards)
    monkeypatch.setattr(time, "time", lambda: START.timestamp() + 8 * 50 + 3600)
    answer = ask("hang", write(tmp_path / "a.log", windows(6)))
    assert {"RUN001", "HANG102"} <= set(found(answer))
    assert "GPU 2 idle, 0, 1, 3 busy: the idle rank is the culprit" in said(answer)


@pytest.mark.parametrize(("minutes", "is_found"), [(20, False), (60, True), (90, True)])
def test_d06_stuck_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, is_found: bool
) -> None:
    monkeypatch.setattr(hang, "live_gpus", tuple)
    evaluated = mmcv_message(400 + 660, "Epoch(val) [1][100]\tmAP: 0.2100")
    second = [mmcv_line(2, inner, 1060 + inner, time="1.000") for inner in range(50, 401, 50)]
    first = [mmcv_line(1, inner, inner, time="1.000") for inner in range(50, 401, 50)]
    path = write(tmp_path / "a.log", [*first, evaluated, *second, mmcv_message(1461, "Saving checkpoint at 2 epochs")])
    monkeypatch.setattr(time, "time", lambda: START.timestamp() + 1461 + 60 * minutes)
    assert ("RUN001" in found(ask("hang", path))) == is_found
