"""What two ranks learn together, in every way of exchanging gradients."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

from bevctl.config.schema import TrainConfig
from bevctl.console import Console
from bevctl.engine import run as engine_run
from bevctl.engine.data_parallel import data_parallel
from bevctl.engine.dist import World

from .fakes import Bench, point_config

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"static_graph": False},
    "static": {},
    "small_buckets": {"bucket_mb": 1e-4},
    "fp16": {"gradient_compression": "fp16"},
    "bf16": {"gradient_compression": "bf16"},
    "accumulated": {"accumulate": 2, "batch": 1},
}


def _rank(rank: int, folder: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, Tensor]] = {}
    for name, train in VARIANTS.items():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[name]))
        with pytest.MonkeyPatch.context() as patch:
            bench = Bench(patch, Console(io.StringIO(), io.StringIO()))
            bench.plain = True
            config = point_config(folder / name, train=train)
            engine_run.train(config, engine_run.RunOptions(max_iters=3), World(rank, 2, rank), bench.console)
            found[name] = bench.weights
    torch.save(found, folder / f"rank_{rank}.pth")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Of every variant, by rank, after three steps."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    ports = {name: first + number for number, name in enumerate(VARIANTS)}
    multiprocessing.spawn(_rank, (folder, ports), nprocs=2)
    return [torch.load(folder / f"rank_{rank}.pth") for rank in (0, 1)]


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[key] - b[key]).abs().max()) for key in a)


@pytest.mark.parametrize("name", VARIANTS)
def test_both_ranks_have_the_same_weights(weights: list[dict[str, dict[str, Tensor]]], name: str) -> None:
    assert _distance(weights[0][name], weights[1][name]) == 0


@pytest.mark.parametrize("name", ["static", "small_buckets"])
def test_how_gradients_are_packed_changes_nothing(weights: list[dict[str, dict[str, Tensor]]], name: str) -> None:
    assert _distance(weights[0][name], weights[0]["plain"]) == 0


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_rounds(weights: list[dict[str, dict[str, Tensor]]], name: str) -> None:
    assert 0 < _distance(weights[0][name], weights[0]["plain"]) < 1e-3


def test_alone_there_is_nothing_to_exchange() -> None:
    model = nn.Linear(2, 2)
    train = TrainConfig(gradient_compression="fp16")
    assert data_parallel(model, World(), torch.device("cpu"), train) is model
