"""Numbers recorded from mmdet3d 1.4's BEVFusion, with the weights and inputs that gave them.

They lie beside the checkout; `needs_golden` skips a test where they are absent.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bevctl.batch import Calibration

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not (GOLDEN / "golden.npz").is_file(), reason=f"no recorded numbers at {GOLDEN}")


@functools.cache
def _generator() -> ModuleType:
    """The script that makes weights and inputs."""
    spec = importlib.util.spec_from_file_location("golden_make_inputs", GOLDEN / "make_inputs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def recorded() -> dict[str, NDArray[Any]]:
    """Every array of the record, by name."""
    with np.load(GOLDEN / "golden.npz") as archive:
        return {name: archive[name] for name in archive.files}


@functools.cache
def summary() -> dict[str, Any]:
    """`stats` (shape, mean, std, absmax of each tensor) and `losses`."""
    content: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return content


@functools.cache
def inputs() -> dict[str, Any]:
    """images (2, 6, 3, 256, 704), points [(P, 5)], calibration [dict], boxes [(30, 9)] with bottom centre, labels."""
    made: dict[str, Any] = _generator().batch()
    return made


def images() -> Tensor:
    """(2, 6, 3, 256, 704) float32, normalised."""
    return torch.from_numpy(inputs()["images"].copy())


def points() -> list[Tensor]:
    """2 × (P, 5) float32."""
    return [torch.from_numpy(cloud.copy()) for cloud in inputs()["points"]]


def calibration() -> Calibration:
    """Calibration of the two samples."""
    samples = inputs()["calibration"]

    def stacked(key: str) -> Tensor:
        return torch.from_numpy(np.stack([sample[key] for sample in samples])).float()

    return Calibration(
        intrinsics=stacked("cam2img"),
        camera2lidar=stacked("cam2lidar"),
        lidar2image=stacked("lidar2img"),
        image_aug=stacked("img_aug_matrix"),
        lidar_aug=stacked("lidar_aug_matrix"),
        times=torch.zeros(len(samples), 6),
    )


def depth_raster() -> Tensor:
    """(2, 6, 256, 704) depth image that went into the recorded run, m; 0 where no point fell."""
    raster = torch.zeros(12, 1, 256, 704)
    index = torch.from_numpy(recorded()["depth_raster/index"].astype(np.int64))
    raster[tuple(index.T)] = torch.from_numpy(recorded()["depth_raster/value"])
    return raster.view(2, 6, 256, 704)


def load_weights(module: nn.Module, prefix: str = "", rename: Callable[[str], str] = lambda key: key) -> None:
    """Fill `module` with the recorded run's weights.

    The name that a state-dict key had in that run is `prefix + rename(key)`, mmdet3d layout ("pts_middle_encoder.").
    Entries that kept the model's own value there keep it here.
    """
    with torch.no_grad():
        for key, value in module.state_dict().items():
            weight = _generator().weight(prefix + rename(key), tuple(value.shape))
            if weight is not None:
                value.copy_(torch.from_numpy(np.asarray(weight)))


def assert_matches(name: str, tensor: Tensor, tolerance: float = 1e-3, outliers: float = 0.005) -> None:
    """Compare `tensor` with the record `name`: errors in recorded stds, all but a share `outliers` below."""
    stats = summary()["stats"][name]
    assert list(tensor.shape) == stats["shape"], f"{name}: {tuple(tensor.shape)} != {stats['shape']}"
    expected = recorded()[f"{name}/values"].astype(np.float64)
    positions = _generator().sample_positions(name, tensor.numel())
    ours = tensor.detach().double().flatten()[torch.from_numpy(positions)].numpy()
    errors = np.abs(ours - expected) / stats["std"]
    # Written so that a NaN counts as an error.
    wrong = ~(errors <= tolerance)
    assert wrong.mean() <= outliers, f"{name}: {wrong.sum()} of {wrong.size} off, worst {errors.max():.3g} std"
