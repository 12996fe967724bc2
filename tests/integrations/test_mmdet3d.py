"""Our parts under mmdet3d's registry (a fake of it): signature, names and numbers of those they stand for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.models.lidar import SparseEncoder
from bevctl.ops.sites import Sites
from bevctl.ops.sparse_conv import SparseTensor

from ..engine.mmdet3d_stage import fake_mmdet3d

SHAPE = (24, 24, 41)
BOUNDS: dict[str, Any] = {
    "xbound": [-8.0, 8.0, 0.5],
    "ybound": [-8.0, 8.0, 0.5],
    "zbound": [-10.0, 10.0, 20.0],
    "dbound": [1.0, 9.0, 1.0],
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The registry after the integration was imported."""
    with fake_mmdet3d(monkeypatch):
        name = "bevctl.integrations.mmdet3d"
        monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
        importlib.import_module(name)
        yield importlib.import_module("mmdet3d.registry").MODELS


def _geometry(count: int = 2, cameras: int = 2) -> list[Tensor]:
    """lidar2image, intrinsics, camera2lidar, image and LiDAR augmentation: cameras that look along x."""
    camera2lidar = torch.eye(4).repeat(count, cameras, 1, 1)
    camera2lidar[..., :3, :3] = torch.tensor([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])
    camera2lidar[:, 1, :3, :3] = torch.tensor([[0.0, 0, -1], [1, 0, 0], [0, -1, 0]])
    intrinsics = torch.eye(4).repeat(count, cameras, 1, 1)
    intrinsics[..., 0, 0] = intrinsics[..., 1, 1] = 40.0
    intrinsics[..., :2, 2] = torch.tensor([32.0, 16.0])
    eye = torch.eye(4)
    return [
        intrinsics @ torch.linalg.inv(camera2lidar),
        intrinsics,
        camera2lidar,
        eye.repeat(count, cameras, 1, 1),
        eye.repeat(count, 1, 1),
    ]


@pytest.mark.parametrize("name", ["BevctlLSSTransform", "BevctlDepthLSSTransform"])
def test_a_view_transform_puts_features_where_they_are_seen(parts: Any, name: str) -> None:
    """With depth known to be in one bin, a camera's features lie at that distance along its axis, and nowhere else."""
    options = {"in_channels": 4, "out_channels": 3, "image_size": [32, 64], "feature_size": [4, 8], **BOUNDS}
    transform = parts.build({"type": name, **options}).eval()
    last = transform.depthnet if name == "BevctlLSSTransform" else transform.depthnet[-1]
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, 0.0)
    last.bias.data[2] = 50.0  # the third of eight bins: 3 m
    last.bias.data[8:] = torch.tensor([1.0, 2.0, 3.0])
    points = [torch.rand(20, 5, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    before = [cloud.clone() for cloud in points]
    lidar2image, intrinsics, camera2lidar, image_aug, lidar_aug = _geometry()
    features = torch.zeros(2, 2, 4, 4, 8)
    bev = transform(features, points, lidar2image, intrinsics, camera2lidar, image_aug, lidar_aug, [])
    assert bev.shape == (2, 3, 32, 32)
    occupied = (bev[0, 0] > 1e-6).nonzero()
    assert set(occupied[:, 0].tolist()) == {16 + 6, 16 - 6}  # x = ±3 m in cells of 0.5 m
    torch.testing.assert_close(bev.sum((2, 3)), torch.tensor([[64.0, 128.0, 192.0]] * 2))
    assert all(torch.equal(cloud, kept) for cloud, kept in zip(points, before, strict=True))


def test_three_by_three_intrinsics_and_wrong_sizes(parts: Any) -> None:
    options = {"in_channels": 4, "out_channels": 3, "image_size": [32, 64], **BOUNDS}
    transform = parts.build({"type": "BevctlLSSTransform", "feature_size": [4, 8], **options}).eval()
    lidar2image, intrinsics, *rest = _geometry()
    features = torch.rand(2, 2, 4, 4, 8)
    whole = transform(features, [], lidar2image, intrinsics, *rest)
    assert torch.equal(transform(features, [], lidar2image, intrinsics[..., :3, :3], *rest), whole)
    with pytest.raises(ValueError, match=r"feature_size must be image_size \(32, 64\) / 8, got \(8, 16\)"):
        parts.build({"type": "BevctlLSSTransform", "feature_size": [8, 16], **options})


def test_names_of_a_view_transform_are_those_of_the_original(parts: Any) -> None:
    options = {"in_channels": 4, "out_channels": 3, "image_size": [32, 64], "feature_size": [4, 8], **BOUNDS}
    names = set(parts.build({"type": "BevctlDepthLSSTransform", "downsample": 2, **options}).state_dict())
    assert {"dx", "bx", "nx", "frustum", "dtransform.0.weight", "depthnet.6.bias", "downsample.7.running_var"} <= names


def _voxels(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.stack([torch.randint(0, n, (300,), generator=generator) for n in (2, *SHAPE)], dim=1)
    cells = torch.unique(cells, dim=0)
    return torch.rand(len(cells), 5, generator=generator), cells


def test_the_sparse_encoder_takes_voxels_in_any_order(parts: Any) -> None:
    torch.manual_seed(0)
    encoder = parts.build({"type": "BevctlSparseEncoder", "in_channels": 5, "sparse_shape": list(SHAPE)})
    own = SparseEncoder(5, (16, 32, 64, 128), 2, 128, SHAPE)
    assert list(own.state_dict()) == list(encoder.state_dict())
    own.load_state_dict(encoder.state_dict())
    features, cells = _voxels()
    shuffled = torch.randperm(len(cells), generator=torch.Generator().manual_seed(1))
    bev = encoder(features[shuffled], cells[shuffled].int(), 2)
    expected = own(SparseTensor(features, Sites(cells, SHAPE, 2)))
    assert bev.shape == (2, 256, 3, 3)
    torch.testing.assert_close(bev, expected)
    bev.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_kernels_of_spconv_are_taken(parts: Any) -> None:
    encoder = parts.build({"type": "BevctlSparseEncoder", "in_channels": 5, "sparse_shape": list(SHAPE)})
    theirs = {k: v.permute(4, 0, 1, 2, 3) if v.dim() == 5 else v for k, v in encoder.state_dict().items()}
    other = parts.build({"type": "BevctlSparseEncoder", "in_channels": 5, "sparse_shape": list(SHAPE)})
    other.load_state_dict(theirs)
    assert all(torch.equal(value, encoder.state_dict()[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"block_type": "conv_module"},
        {"return_middle_feats": True},
        {"encoder_paddings": [[1], [1, 1, 1], [1, 1, 1], [[0, 1, 1], 1, 1]]},
        {"encoder_channels": [[16], [32, 32, 32], [64, 64, 64], [64, 64, 64]]},
        {"norm_cfg": {"type": "BN1d", "eps": 1e-5}},
    ],
)
def test_another_arrangement_is_refused(parts: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="BEVFusion's encoder"):
        parts.build({"type": "BevctlSparseEncoder", "in_channels": 5, "sparse_shape": list(SHAPE), **change})
