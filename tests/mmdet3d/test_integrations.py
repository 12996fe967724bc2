"""Our parts against mmdet3d's own BEVFusion project, which its wheel lacks: its source is read where it lies.

Set MMDET3D_SOURCE to a checkout of mmdetection3d 1.4, and for the encoder install spconv 2.3.8, whose CPU build runs it
forward.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SOURCE = os.environ.get("MMDET3D_SOURCE", "")
PROJECT = Path(SOURCE) / "projects" / "BEVFusion" / "bevfusion"
pytestmark = pytest.mark.skipif(not SOURCE, reason="MMDET3D_SOURCE names no checkout of mmdetection3d")

RANGE = (-16.0, 16.0, 0.25)
VIEW: dict[str, Any] = {
    "in_channels": 32,
    "out_channels": 16,
    "image_size": [64, 176],
    "feature_size": [8, 22],
    "xbound": RANGE,
    "ybound": RANGE,
    "zbound": (-10.0, 10.0, 20.0),
    "dbound": (1.0, 30.0, 0.5),
    "downsample": 2,
}
ENCODER: dict[str, Any] = {
    "in_channels": 5,
    "sparse_shape": [64, 64, 41],
    "order": ("conv", "norm", "act"),
    "norm_cfg": {"type": "BN1d", "eps": 0.001, "momentum": 0.01},
    "encoder_channels": ((16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128)),
    "encoder_paddings": ((0, 0, 1), (0, 0, 1), (0, 0, (1, 1, 0)), (0, 0)),
    "block_type": "basicblock",
}


def _theirs(module: str) -> Any:
    """A module of the project; its CUDA pooling is replaced by a plain sum."""
    package = types.ModuleType("their_bevfusion")
    package.__path__ = [str(PROJECT)]
    pooling = types.ModuleType("their_bevfusion.ops")
    pooling.bev_pool = _pool  # type: ignore[attr-defined]
    sys.modules |= {"their_bevfusion": package, "their_bevfusion.ops": pooling}
    name = f"their_bevfusion.{module}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, PROJECT / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _pool(x: Tensor, cells: Tensor, batch: int, depth: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(M, C) features summed into cells x, y, z, b → (B, C, Z, X, Y)."""
    shape = (batch, int(depth), int(rows), int(columns), x.shape[1])
    out = x.new_zeros(shape).index_put((cells[:, 3], cells[:, 2], cells[:, 0], cells[:, 1]), x, accumulate=True)
    return out.permute(0, 4, 1, 2, 3)


def _rotation(generator: torch.Generator, size: float) -> Tensor:
    axis = size * torch.randn(3, generator=generator)
    zero = torch.zeros(())
    x, y, z = axis
    return torch.linalg.matrix_exp(torch.stack([zero, -z, y, z, zero, -x, -y, x, zero]).view(3, 3))


def _matrices(generator: torch.Generator, batch: int = 2, cameras: int = 3) -> list[Tensor]:
    """lidar2image, intrinsics, camera2lidar, image and LiDAR augmentation of rigs that look all round."""
    axes = torch.tensor([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])
    camera2lidar = torch.eye(4).repeat(batch, cameras, 1, 1)
    image_aug = torch.eye(4).repeat(batch, cameras, 1, 1)
    lidar_aug = torch.eye(4).repeat(batch, 1, 1)
    for b in range(batch):
        lidar_aug[b, :3, :3] = 1.05 * _rotation(generator, 0.2)
        lidar_aug[b, :3, 3] = torch.randn(3, generator=generator)
        for c in range(cameras):
            turn = torch.eye(3)
            angle = torch.tensor(2.0 * torch.pi * c / cameras)
            turn[:2, :2] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            camera2lidar[b, c, :3, :3] = turn @ axes
            camera2lidar[b, c, :3, 3] = torch.randn(3, generator=generator)
            image_aug[b, c, :2, :2] = 0.9 * _rotation(generator, 0.05)[:2, :2]
            image_aug[b, c, :2, 3] = 3.0 * torch.randn(2, generator=generator)
    intrinsics = torch.eye(4).repeat(batch, cameras, 1, 1)
    intrinsics[..., 0, 0] = intrinsics[..., 1, 1] = 120.0
    intrinsics[..., :2, 2] = torch.tensor([88.0, 32.0])
    return [intrinsics @ torch.linalg.inv(camera2lidar), intrinsics, camera2lidar, image_aug, lidar_aug]


def _far_apart(generator: torch.Generator, matrices: list[Tensor]) -> list[Tensor]:
    """Clouds of which no two points fall into one pixel, where the original's result is a matter of luck."""
    lidar2image, _, _, image_aug, lidar_aug = (matrix.double() for matrix in matrices)
    clouds = []
    for b in range(len(lidar_aug)):
        points = 25 * torch.rand(4000, 3, generator=generator) - torch.tensor([12.5, 12.5, 14.0])
        plain = (points.double() - lidar_aug[b, :3, 3]) @ torch.linalg.inv(lidar_aug[b, :3, :3]).T
        alone = torch.ones(len(points), dtype=torch.bool)
        for c in range(lidar2image.shape[1]):
            seen = plain @ lidar2image[b, c, :3, :3].T + lidar2image[b, c, :3, 3]
            pixels = seen[:, :2] / seen[:, 2:] @ image_aug[b, c, :2, :2].T + image_aug[b, c, :2, 3]
            on_edge = (pixels - pixels.round()).abs().min(dim=1).values < 1e-3
            on_image = ((pixels >= 0) & (pixels < torch.tensor([176, 64]))).all(dim=1)
            place = torch.where(on_image, pixels[:, 1].floor() * 176 + pixels[:, 0].floor(), -1 - torch.arange(4000))
            _, where, count = place.unique(return_inverse=True, return_counts=True)
            alone &= (count[where] == 1) & ~on_edge & (seen[:, 2] > 0.5).logical_or(~on_image)
        kept = points[alone]
        clouds.append(torch.cat([kept, torch.zeros(len(kept), 2)], dim=1))
    return clouds


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the deviation of what it is compared with."""
    return float(((ours - theirs).abs().max() / theirs.std()).detach())


@pytest.mark.parametrize("name", ["LSSTransform", "DepthLSSTransform"])
@pytest.mark.parametrize("training", [False, True])
def test_view_transforms(name: str, training: bool) -> None:
    import bevctl.integrations.mmdet3d as ours

    torch.manual_seed(0)
    theirs = getattr(_theirs("depth_lss"), name)(**VIEW).train(training)
    if name == "DepthLSSTransform":
        # In our memory format: torch's BatchNorm on a CPU is off by 1 % in it where most inputs are equal.
        theirs.dtransform.register_forward_pre_hook(lambda _, depth: depth[0][:, 0, ..., None].permute(0, 3, 1, 2))
    mine = getattr(ours, f"Bevctl{name}")(**VIEW).train(training)
    mine.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 3, 32, 8, 22, generator=generator)
    matrices = _matrices(generator)
    points = _far_apart(generator, matrices)
    inputs = features.clone().requires_grad_(), features.clone().requires_grad_()
    found = mine(inputs[0], [p.clone() for p in points], *matrices, [])
    expected = theirs(inputs[1], [p.clone() for p in points], *matrices, [])
    assert found.shape == expected.shape
    gap = _apart(found, expected)
    weights = torch.randn(expected.shape, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    gradient_gap = _apart(inputs[0].grad, inputs[1].grad)
    print(f"{name}, training {training}: forward {gap:.1e} std, gradient {gradient_gap:.1e} std")
    assert gap < 1e-3
    assert gradient_gap < 1e-2


@pytest.mark.parametrize("training", [False, True])
def test_sparse_encoder(training: bool) -> None:
    pytest.importorskip("spconv.pytorch")
    import bevctl.integrations.mmdet3d as ours

    torch.manual_seed(0)
    theirs = _theirs("sparse_encoder").BEVFusionSparseEncoder(**ENCODER).train(training)
    mine = ours.BevctlSparseEncoder(**ENCODER).train(training)
    mine.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(1)
    cells = torch.stack([torch.randint(0, n, (4000,), generator=generator) for n in (2, 64, 64, 40)], dim=1)
    cells = torch.unique(cells, dim=0)
    cells = cells[torch.randperm(len(cells), generator=generator)]
    features = torch.randn(len(cells), 5, generator=generator)
    with torch.no_grad():
        found, expected = mine(features, cells, 2), theirs(features, cells, 2)
    gap = _apart(found, expected)
    print(f"sparse encoder, training {training}: forward {gap:.1e} std")
    assert found.shape == expected.shape
    assert gap < 1e-3
