"""A few samples on disk: two cameras, a small point cloud, two boxes each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bevctl.config.schema import CameraConfig, Config, DataConfig, MapHeadConfig, ModelConfig
from tests.data import infos as made

CAMERAS = ("CAM_FRONT", "CAM_BACK")


def write_set(root: Path, jpeg: bytes, count: int = 6, **changes: Any) -> Config:
    """`count` samples below `root` and the config that reads them for both splits; `changes` go into each sample."""
    entries = []
    for number in range(count):
        (entry,) = made.data_list(**changes)["data_list"]
        cloud = np.random.default_rng(number).uniform(-20, 20, (50, 5)).astype(np.float32)
        _put(root / "samples" / "LIDAR_TOP" / f"{number}.bin", cloud.tobytes())
        _put(root / "sweeps" / "LIDAR_TOP" / f"sweep-{number}.bin", cloud[::-1].tobytes())
        image = entry["images"]["CAM_FRONT"]
        entry["images"] = {name: {**image, "img_path": f"{number}.jpg"} for name in CAMERAS}
        for name in CAMERAS:
            _put(root / "samples" / name / f"{number}.jpg", jpeg)
        entry["token"] = f"sample-{number}"
        entry["lidar_points"]["lidar_path"] = f"{number}.bin"
        entry["lidar_sweeps"][0]["lidar_points"]["lidar_path"] = f"sweeps/LIDAR_TOP/sweep-{number}.bin"
        entries.append(entry)
    made.write(root / "infos.pkl", {**made.data_list(), "data_list": entries})
    return config_for(root, "infos.pkl")


def config_for(root: Path, name: str) -> Config:
    """Small images, detection and map heads."""
    return Config(
        data=DataConfig(root=str(root), info_train=name, info_val=name),
        model=ModelConfig(camera=CameraConfig(image_size=(32, 64)), map=MapHeadConfig()),
    )


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
