"""How far FP16 and BF16 are from FP32, part by part, on the nano model: each part alone, fed with the same numbers.

A distance is a root mean square over that of the FP32 result. With u the format's rounding (2⁻¹¹ and 2⁻⁸), results of
a few layers are a few u apart. Gradients are further: rounding turns a ReLU on or off at a share of places of about u,
and what then comes or goes is √u of a gradient in root mean square. Both laws hold for both formats, unless something
over- or underflows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.models.bevfusion import BEVFusion
from bevctl.models.build import build_bevfusion
from bevctl.models.lidar import VoxelLidarEncoder
from bevctl.models.view_geometry import rasterize_depth
from bevctl.models.view_transform import LiftSplat
from bevctl.ops.sparse_conv import SparseTensor
from tests.models.nano import nano_batch, nano_config

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LOSS_SCALE = 1024.0
PARTS = {
    "encoders.camera.backbone": (3, 0.3),
    "encoders.camera.neck": (3, 2),
    "encoders.camera.vtransform.dtransform": (3, 3),
    "encoders.camera.vtransform.depthnet": (2, 2),
    "encoders.camera.vtransform": (2, 4),
    "encoders.lidar": (4, 5),
    "fuser": (2, 2),
    "decoder.backbone": (3, 4),
    "decoder.neck": (2, 3),
    "heads.object.shared_conv": (2, 0.2),
    "heads.object.heatmap_head": (2, 2),
    "heads.object.decoder.0": (2, 2),
    "heads.object.prediction_heads.0.center": (4, 5),
    "heads.object.prediction_heads.0.height": (5, 5),
    "heads.object.prediction_heads.0.dim": (3, 5),
    "heads.object.prediction_heads.0.rot": (4, 5),
    "heads.object.prediction_heads.0.vel": (4, 5),
    "heads.object.prediction_heads.0.heatmap": (2, 4),
    "heads.map": (3, 4),
}
"""Largest distance of the result, in u, and of the gradients of the part's weights, in √u."""


@functools.cache
def settled() -> BEVFusion:
    """A model in evaluation mode whose norms have seen some batches."""
    torch.manual_seed(0)
    model = build_bevfusion(nano_config(**{"model.norm_momentum": 0.3})).train()
    with torch.no_grad():
        for seed in range(10):
            model(nano_batch(nano_config(), seed=seed))
    return model.eval()


def batch() -> Batch:
    return nano_batch(nano_config(), seed=100)


def inputs_of(model: BEVFusion, names: list[str]) -> dict[str, tuple[Any, ...]]:
    """What each part is called with in FP32."""
    seen: dict[str, tuple[Any, ...]] = {}

    def keep(_module: nn.Module, inputs: tuple[Any, ...], name: str) -> None:
        seen[name] = inputs

    hooks = [model.get_submodule(name).register_forward_pre_hook(functools.partial(keep, name=name)) for name in names]
    with torch.no_grad():
        model(batch())
    for hook in hooks:
        hook.remove()
    return seen


def result_and_gradients(part: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All results of a part in one row, and the gradients of its weights for a random gradient of the results."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = part(*inputs)
    results = [out] if isinstance(out, Tensor) else list(out)
    row = torch.cat([result.float().flatten() for result in results])
    upstream = torch.randn(len(row), generator=torch.Generator().manual_seed(0)) / len(row) ** 0.5
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad((row * upstream).sum() * scale, weights, allow_unused=True)
    return row.detach(), torch.cat([g.flatten() for g in gradients if g is not None]) / scale


def distance(values: Tensor, exact: Tensor) -> float:
    return float((values - exact).norm() / exact.norm())


@functools.cache
def part_inputs() -> dict[str, tuple[Any, ...]]:
    return inputs_of(settled(), list(PARTS))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_alone(name: str, dtype: torch.dtype) -> None:
    part, inputs = settled().get_submodule(name), part_inputs()[name]
    exact, exact_gradient = result_and_gradients(part, inputs, torch.float32)
    rounded, gradient = result_and_gradients(part, inputs, dtype)
    result_bound, gradient_bound = PARTS[name]
    assert 0 < distance(rounded, exact) < result_bound * ROUNDING[dtype]
    assert 0 < distance(gradient, exact_gradient) < gradient_bound * ROUNDING[dtype] ** 0.5


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_the_losses_of_the_whole(dtype: torch.dtype) -> None:
    """Within two roundings; the box loss further where queries that cost about the same are matched differently."""
    with torch.no_grad():
        exact = settled()(batch())
        with torch.autocast("cpu", dtype):
            rounded = settled()(batch())
    distances = {name: abs(float(rounded[name] / exact[name]) - 1) for name in exact if name.startswith("loss/")}
    assert distances.pop("loss/object/layer_-1_loss_bbox") < 50 * ROUNDING[dtype]
    assert {name: far for name, far in distances.items() if far > 2 * ROUNDING[dtype]} == {}


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_geometry_is_not_rounded(dtype: torch.dtype) -> None:
    """Voxels, the depth raster and the cells of the frustum are the same bits under autocast."""
    model, samples = settled(), batch()
    points = samples.points
    assert points is not None
    lidar, view = (model.get_submodule(f"encoders.{name}") for name in ("lidar", "camera.vtransform"))
    assert isinstance(lidar, VoxelLidarEncoder)
    assert isinstance(view, LiftSplat)

    def geometry() -> list[Tensor]:
        # A copy of the calibration, so that nothing remembered is returned.
        copied = dataclasses.replace(samples.calibration, lidar_aug=samples.calibration.lidar_aug.clone())
        voxels = lidar.prepare(points)
        assert isinstance(voxels, SparseTensor)
        raster = rasterize_depth(points, copied, view.image_size)
        return [voxels.features, voxels.coords, raster, view._index(copied).rows]

    exact = geometry()
    with torch.autocast("cpu", dtype):
        rounded = geometry()
    assert all(torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))
