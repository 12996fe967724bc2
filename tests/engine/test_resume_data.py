"""A run that stops in the middle and goes on, with everything random that the data pipeline has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bevctl.config.schema import Config, PasteConfig, PasteCountsConfig
from bevctl.console import Console
from bevctl.data.gt_database import write_gt_database
from bevctl.data.index import read_info
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.dist import World
from bevctl.engine.run import RunOptions, RunResult, train
from bevctl.errors import ExitCode

from .disk import lidar_config, write_run_files


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """8 samples of two classes: 16 class-balanced draws, 8 iterations an epoch; pasting ends after the first."""
    write_run_files(tmp_path)
    info = read_info(tmp_path / "nuscenes_infos_train.pkl")
    written = write_gt_database(tmp_path / "gt.npz", info, tmp_path, ("car", "pedestrian"))
    assert written.objects > 0
    plain = lidar_config(tmp_path, **{"train.workers": 1})
    paste = PasteConfig("gt.npz", PasteCountsConfig(car=3), min_points=1, stop_epoch=1)
    return replace(plain, data=replace(plain.data, cbgs=True, paste=paste))


def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, config: Config, console: Console) -> None:
    """Stopped in the epoch that pastes and in the one that does not."""

    def run(name: str, options: RunOptions) -> RunResult:
        return train(replace(config, work_dir=str(tmp_path / name)), options, World(), console)

    straight = run("straight", RunOptions())
    assert (straight.code, straight.iteration) == (ExitCode.OK, 16)
    for stop in (3, 11):
        assert run("parts", RunOptions(resume="auto", max_iters=stop)).iteration == stop
    again = run("parts", RunOptions(resume="auto"))
    assert again.iteration == 16
    assert straight.checkpoint is not None
    assert again.checkpoint is not None
    weights, others = (read_checkpoint(r.checkpoint).content["state_dict"] for r in (straight, again) if r.checkpoint)
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("straight", "parts")
    ]
    assert losses[0] == losses[1]
