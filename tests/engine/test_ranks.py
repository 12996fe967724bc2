"""Two gloo processes that train together, with trouble on one of them only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing

from bevctl.batch import Batch
from bevctl.console import Console
from bevctl.engine import parts as engine_parts
from bevctl.engine import run as engine_run
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.dist import World, gather, on_main, process_group, world_from_environment
from bevctl.engine.incident import find_incidents, read_batches, read_incident
from bevctl.engine.journal import RunJournal
from bevctl.errors import BevctlError, ExitCode
from bevctl.runs.heartbeat import read_beats
from bevctl.runs.records import Doing

from .fakes import Bench, OverflowingNet, point_config

NAN_AT, INFINITE_AT, SIGNAL_AT = 3, 5, 6
EPOCH = 4
"""Steps: 16 samples, two a rank."""
CPU = torch.device("cpu")


class _Trouble:
    """By the number of the step: a NaN loss with finite gradients, an infinite one with infinite ones, a signal."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens: list[str] = []

    def __call__(self, batch: Batch, loss: Tensor) -> Tensor:
        if batch.tokens != self.tokens:  # the step after a bad one is computed again
            self.step, self.tokens = self.step + 1, batch.tokens
            if self.step == SIGNAL_AT:
                os.kill(os.getpid(), signal.SIGTERM)
        if self.step == NAN_AT:
            return loss + float("nan")
        return loss * float("inf") if self.step == INFINITE_AT else loss


@contextlib.contextmanager
def _bench() -> Iterator[tuple[pytest.MonkeyPatch, Bench]]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch, Bench(patch, Console(io.StringIO(), io.StringIO()))


def _rank(rank: int, folder: Path, ports: list[int]) -> None:
    """One rank: trains, fails on purpose, and writes down what it saw."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    world = World(rank, 2, rank)
    with _bench() as (_, bench):
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
    report["kept"] = _keep_in_fp32(folder / "kept", world)
    os.environ["MASTER_PORT"] = str(ports[2])
    report["late"] = _stop_after_an_epoch(folder / "late", world)
    os.environ["MASTER_PORT"] = str(ports[3])
    with process_group(world, CPU):
        report["gathered"] = gather(world, rank)
        try:
            on_main(world, _refuse)
        except BevctlError as error:
            report["refused"] = [error.message, error.code]
    (folder / f"rank_{rank}.json").write_text(json.dumps(report))


def _keep_in_fp32(work_dir: Path, world: World) -> dict[str, list[float]]:
    """Trains a model that leaves the range of FP16 with one rank's samples; returns its parameters."""
    precision = {"dtype": "fp16", "init_scale": 1.0, "growth_interval": 100}
    config = point_config(work_dir, train={"on_nonfinite": "fp32_module"}, precision=precision)
    with _bench() as (patch, bench):
        model = OverflowingNet()
        patch.setattr(engine_parts, "build_model", lambda _: model)
        engine_run.train(config, engine_run.RunOptions(), world, bench.console)
    return {name: value.flatten().tolist() for name, value in model.named_parameters()}


def _stop_after_an_epoch(work_dir: Path, world: World) -> list[int]:
    """Trains until a signal that only rank 1 has when the ranks leave an epoch behind; returns code and iteration."""
    with _bench() as (patch, bench):
        if world.rank == 1:
            patch.setattr(RunJournal, "epoch_done", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        config = point_config(work_dir, train={"epochs": 4})
        result = engine_run.train(config, engine_run.RunOptions(), world, bench.console)
    return [result.code, result.iteration]


def _refuse() -> None:
    raise BevctlError("rank 0 says no", "", ExitCode.RUN_FAILED)


def test_ranks_share_skips_stops_and_weights(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(4)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    multiprocessing.spawn(_rank, (tmp_path, ports), nprocs=2)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [r["code"] for r in ranks] == [ExitCode.PREEMPTED] * 2
    assert ranks[0]["iteration"] == ranks[1]["iteration"] == SIGNAL_AT + 1, "the flag is read one step late"
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert not {t for batch in ranks[0]["tokens"][:EPOCH] for t in batch} & {
        t for batch in ranks[1]["tokens"][:EPOCH] for t in batch
    }, "an epoch's samples are divided"
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 2, 2, 2]
    assert [r["iter"] for r in records if r["loss"] is None] == [NAN_AT, INFINITE_AT]
    assert records[NAN_AT - 1]["grad_norm"] is not None, "all ranks skip, though no gradient shows why"
    assert (tmp_path / "run" / f"iter_{SIGNAL_AT + 1}.pth").exists()
    assert "Stopped by a signal to another rank" in (tmp_path / "run" / "log.txt").read_text()
    beats = read_beats(tmp_path / "run", json.loads((tmp_path / "run" / "run.json").read_text()))
    assert [(b.rank, b.doing, b.iteration) for b in beats] == [(r, Doing.LEFT, SIGNAL_AT + 1) for r in (0, 1)]
    assert beats[0].turn == beats[1].turn, "what one rank repeats, all do"
    _check_incidents(tmp_path / "run", [r["tokens"][NAN_AT - 1] for r in ranks])
    assert ranks[0]["kept"] == ranks[1]["kept"]
    told = [json.loads(line) for line in (tmp_path / "kept" / "events.jsonl").read_text().splitlines()]
    assert [event["data"]["module"] for event in told if event["kind"] == "fp32_module"] == ["gain.scale"]
    assert len([event for event in told if event["kind"] == "nonfinite"]) == 1
    assert [r["late"] for r in ranks] == [[ExitCode.PREEMPTED, EPOCH + 2]] * 2, "the step after tells, one late"
    assert [r["gathered"] for r in ranks] == [[0, 1]] * 2
    assert [r["refused"] for r in ranks] == [["rank 0 says no", ExitCode.RUN_FAILED]] * 2


def _check_incidents(work_dir: Path, tokens: list[list[str]]) -> None:
    """The bundles name the rank that was not finite and hold the batches of both."""
    folders = find_incidents(work_dir)
    assert [folder.name for folder in folders] == [str(NAN_AT), str(INFINITE_AT)]
    incidents = [read_incident(folder) for folder in folders]
    assert [(i.rank, i.world, i.kind) for i in incidents] == [(1, 2, "forward")] * 2
    assert incidents[0].tokens == tokens
    for rank in (0, 1):
        (batch,) = read_batches(folders[0], rank) or []
        assert batch.tokens == tokens[rank]
    assert len(read_checkpoint(folders[0] / "state.pth").content["rng"]) == 2
    events = [json.loads(line) for line in (work_dir / "events.jsonl").read_text().splitlines()]
    (first, second) = [event for event in events if event["kind"] == "nonfinite"]
    assert first["data"]["tokens"] == tokens[1]
    assert "samples of rank 1" in second["message"]


def test_the_world_comes_from_torchruns_variables() -> None:
    assert world_from_environment({}) == World(0, 1, 0)
    assert world_from_environment({"WORLD_SIZE": "4"}) == World(0, 1, 0), "a cluster's leftover, not a rank"
    assert world_from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == World(3, 8, 1)
    for broken in ({"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}):
        with pytest.raises(BevctlError):
            world_from_environment(broken)
