"""A LiDAR-only data set on disk and the nano config that trains on it, for tests that start real processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bevctl.config.load import to_yaml
from bevctl.config.schema import Config

from ..models.nano import RANGE, nano_config


def write_run_files(folder: Path, samples: int = 8, **overrides: object) -> Path:
    """Writes point clouds, info files and `nano.yaml` below `folder`; returns the config's path."""
    rng = np.random.default_rng(0)
    entries = [_sample(folder, number, rng) for number in range(samples)]
    for split in ("train", "val"):
        document = {"infos": entries, "metadata": {"version": "v1.0-mini"}}
        (folder / f"nuscenes_infos_{split}.pkl").write_bytes(pickle.dumps(document))
    path = folder / "nano.yaml"
    path.write_text(to_yaml(lidar_config(folder, **overrides)))
    return path


def lidar_config(folder: Path, **overrides: object) -> Config:
    """Detection from LiDAR alone on the CPU: 4 iterations an epoch of 8 samples, two epochs."""
    values: dict[str, object] = {
        "model.camera": None,
        "model.map": None,
        "data.root": str(folder),
        "data.sweeps": 0,
        "train.batch": 2,
        "train.workers": 0,
        "train.epochs": 2,
        "train.eval_interval": 0,
        "train.log_interval": 2,
        "optim.warmup": 0,
        "precision.dtype": "fp32",
    }
    return nano_config(**{**values, **overrides})


def _sample(folder: Path, number: int, rng: np.random.Generator) -> dict[str, Any]:
    low, high = np.array(RANGE[:3]) + 0.1, np.array(RANGE[3:]) - 0.1
    points = np.zeros((400, 5), dtype=np.float32)
    points[:, :3] = rng.uniform(low, high, (400, 3))
    points[:, 3] = rng.uniform(0, 255, 400)
    points.tofile(folder / f"{number}.bin")
    boxes = np.array([[2.0, 1.0, -1.0, 3.0, 1.5, 1.5, 0.3], [-3.0, -2.0, -1.0, 1.0, 1.0, 1.8, 0.0]])
    identity = {"translation": [0.0, 0.0, 0.0], "rotation": [1.0, 0.0, 0.0, 0.0]}
    poses = {f"{name}_{key}": value for name in ("lidar2ego", "ego2global") for key, value in identity.items()}
    return {
        "token": f"sample-{number}",
        "timestamp": 1_500_000_000_000_000 + number * 500_000,
        "lidar_path": f"{number}.bin",
        "cams": {},
        "sweeps": [],
        "gt_boxes": boxes,
        "gt_names": np.array(["car", "pedestrian"]),
        "gt_velocity": np.zeros((2, 2)),
        "num_lidar_pts": np.array([20, 20]),
        "num_radar_pts": np.zeros(2),
        "valid_flag": np.ones(2, dtype=bool),
        **poses,
    }
