"""Two gloo processes that train together, with trouble on one of them only."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing

from bevctl.batch import Batch
from bevctl.console import Console
from bevctl.engine import run as engine_run
from bevctl.engine.dist import World, gather, on_main, process_group, world_from_environment
from bevctl.errors import BevctlError, ExitCode

from .fakes import Bench, point_config

OVERFLOW_AT, SIGNAL_AT = 3, 6
REPEATED = 1
"""Forward passes done again: the one after a step that was not finite."""
CPU = torch.device("cpu")


class _Trouble:
    """Makes one loss infinite and sends one signal, by the number of the call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: Batch, loss: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == SIGNAL_AT + REPEATED:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss * float("inf") if self.calls == OVERFLOW_AT else loss


def _rank(rank: int, folder: Path, ports: list[int]) -> None:
    """One rank: trains, fails on purpose, and writes down what it saw."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    world = World(rank, 2, rank)
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch, Console(io.StringIO(), io.StringIO()))
        if rank == 1:
            bench.sabotage = _Trouble()
        config = point_config(folder / "run", train={"epochs": 4})
        result = engine_run.train(config, engine_run.RunOptions(), world, bench.console)
    report = {
        "code": result.code,
        "iteration": result.iteration,
        "tokens": bench.order,
        "parameters": {name: value.tolist() for name, value in bench.models[-1].named_parameters()},
    }
    os.environ["MASTER_PORT"] = str(ports[1])
    with process_group(world, CPU):
        report["gathered"] = gather(world, rank)
        try:
            on_main(world, _refuse)
        except BevctlError as error:
            report["refused"] = [error.message, error.code]
    (folder / f"rank_{rank}.json").write_text(json.dumps(report))


def _refuse() -> None:
    raise BevctlError("rank 0 says no", "", ExitCode.RUN_FAILED)


def test_ranks_share_skips_stops_and_weights(tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        ports = []
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    multiprocessing.spawn(_rank, (tmp_path, ports), nprocs=2)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [r["code"] for r in ranks] == [ExitCode.PREEMPTED] * 2
    assert ranks[0]["iteration"] == ranks[1]["iteration"] == SIGNAL_AT + 1, "the flag is read one step late"
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert not {t for batch in ranks[0]["tokens"][:4] for t in batch} & {
        t for batch in ranks[1]["tokens"][:4] for t in batch
    }, "an epoch's samples are divided"
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1, 1, 1]
    assert records[2]["loss"] is None, "the mean over ranks shows the other rank's overflow"
    assert (tmp_path / "run" / f"iter_{SIGNAL_AT + 1}.pth").exists()
    assert "Stopped by a signal to another rank" in (tmp_path / "run" / "log.txt").read_text()
    assert [r["gathered"] for r in ranks] == [[0, 1]] * 2
    assert [r["refused"] for r in ranks] == [["rank 0 says no", ExitCode.RUN_FAILED]] * 2


def test_the_world_comes_from_torchruns_variables() -> None:
    assert world_from_environment({}) == World(0, 1, 0)
    assert world_from_environment({"WORLD_SIZE": "4"}) == World(0, 1, 0), "a cluster's leftover, not a rank"
    assert world_from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == World(3, 8, 1)
    for broken in ({"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}):
        with pytest.raises(BevctlError):
            world_from_environment(broken)
