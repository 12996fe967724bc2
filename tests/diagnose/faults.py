"""Runs of the nano model that meet a fault, as users have them on disk, and how the faults are put in."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.load import to_yaml
from bevctl.config.schema import Config
from bevctl.data import index
from bevctl.engine import parts as engine_parts
from bevctl.engine.checkpoint import FORMAT, read_checkpoint, write_checkpoint
from bevctl.models.build import build_model

from ..engine.disk import lidar_config, write_run_files

Build = Callable[[Config], nn.Module]


def write_config(data: Path, path: Path, **overrides: object) -> Path:
    """The config of LiDAR detection on the data set in `data`, at `path`."""
    values = {"train.log_interval": 100, **overrides}
    path.write_text(to_yaml(lidar_config(data, **values)))
    return path


def scaled_weights(config: Config, name: str, factor: float, path: Path) -> Path:
    """Initial weights of a config with one entry multiplied, as a file for --load-from."""
    torch.manual_seed(0)
    state = build_model(config).state_dict()
    state[name] = state[name] * factor
    write_checkpoint(path, {"state_dict": state, "meta": {"format": FORMAT}})
    return path


def corrupt(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a checkpoint with its content changed."""
    content = read_checkpoint(checkpoint).content
    change(content)
    write_checkpoint(checkpoint, content)


def as_second_rank(bundle: Path) -> None:
    """Makes an incident of one process look as if it were of two: the first rank's batches are the second's too."""
    path = bundle / "incident.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "world": 2, "tokens": document["tokens"] * 2}))
    (bundle / "batch_1.pth").write_bytes((bundle / "batch_0.pth").read_bytes())

    def double(content: dict[str, Any]) -> None:
        content["rng"] = content["rng"] * 2
        content["meta"]["setting"]["world"] = 2

    corrupt(bundle / "state.pth", double)


def spoil_box(data: Path, number: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a sample's first annotated box a length, and lets boxes through that are left out when info files are read.

    What else may hand such boxes to the model (a pasted object, a data set of another project) is not looked at there.
    """
    monkeypatch.setattr(index, "_without_broken", lambda samples: (samples, ""))
    path = data / "nuscenes_infos_train.pkl"
    document = pickle.loads(path.read_bytes())
    document["infos"][number]["gt_boxes"][0, 3] = size
    path.write_bytes(pickle.dumps(document))


class Hostile(nn.Module):
    """Passes on what `inner` gives, after `change`."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.change = change

    def forward(self, *inputs: Any) -> Any:
        return self.change(self.inner(*inputs))


def built_with(change: Callable[[Tensor], Tensor]) -> Build:
    """Builds models whose BEV features go through `change`."""

    def build(config: Config) -> nn.Module:
        model = build_model(config)
        model.decoder = Hostile(model.get_submodule("decoder"), change)
        return model

    return build


def use(build: Build, monkeypatch: Any) -> None:
    """Lets runs and replays of this process build their models so."""
    monkeypatch.setattr(engine_parts, "build_model", build)


def write_data(folder: Path, samples: int = 16) -> Path:
    """The data set that the configs name."""
    folder.mkdir()
    write_run_files(folder, samples)
    return folder
