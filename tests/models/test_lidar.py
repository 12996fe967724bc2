"""The LiDAR branch: names, sizes, empty clouds, the recorded run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.schema import LidarConfig
from bevctl.engine.cuda_graphs import record_parts
from bevctl.errors import BevctlError
from bevctl.models.lidar import WINDOWS, ConvNormAct, ResidualBlock, SparseEncoder, VoxelLidarEncoder
from bevctl.ops.site_norm import SiteNorm
from bevctl.ops.sites import Room, fit_rows, plan_sites
from bevctl.ops.sparse_conv import Sparse, SparseConv3d, SparseTensor, SubMConv3d
from tests import golden
from tests.ops.backends import DEVICES, running

RANGE = (-8.0, -8.0, -5.0, 8.0, 8.0, 3.0)
SMALL = LidarConfig(voxel_size=(0.5, 0.5, 0.2), channels=(4, 4, 8, 8), blocks=1, out_channels=6, max_voxels=(300, 400))


def cloud(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 5, generator=generator) * torch.tensor([16.0, 16, 8, 255, 0.5]) - torch.tensor(
        [8.0, 8, 5, 0, 0]
    )


def test_parameters_and_names_of_the_full_encoder() -> None:
    encoder = VoxelLidarEncoder(LidarConfig(), (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0))
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 2_694_352
    shapes = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    assert shapes["backbone.conv_input.0.weight"] == (3, 3, 3, 5, 16)
    assert shapes["backbone.encoder_layers.encoder_layer2.1.conv2.weight"] == (3, 3, 3, 32, 32)
    assert shapes["backbone.encoder_layers.encoder_layer3.2.0.weight"] == (3, 3, 3, 64, 128)
    assert shapes["backbone.encoder_layers.encoder_layer3.2.1.running_var"] == (128,)
    assert shapes["backbone.conv_out.0.weight"] == (1, 1, 3, 128, 128)
    assert "backbone.encoder_layers.encoder_layer4.2.0.weight" not in shapes
    assert encoder.out_channels == 256
    assert encoder.backbone.out_shape == (180, 180, 2)


@pytest.mark.parametrize("sizes", [[300, 0], [0, 0], [1, 0], [500, 700]])
@pytest.mark.parametrize("training", [True, False])
def test_any_cloud_runs_forward_and_backward(sizes: list[int], training: bool) -> None:
    torch.manual_seed(0)
    encoder = VoxelLidarEncoder(SMALL, RANGE).train(training)
    out = encoder([cloud(i, size) for i, size in enumerate(sizes)])
    assert out.shape == (2, 12, 4, 4)
    assert out.isfinite().all()
    out.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert all(value.isfinite().all() for value in encoder.state_dict().values())
    reached = any(p.grad.any() for p in encoder.parameters() if p.grad is not None)
    assert reached == (sum(sizes) > 0)


def test_channels_are_feature_then_slice() -> None:
    """A point in the upper half of the range reaches the upper z slice (odd channels) only."""
    encoder = VoxelLidarEncoder(SMALL, RANGE).eval()
    with torch.no_grad():
        for norm in encoder.modules():
            if isinstance(norm, SiteNorm):
                norm.bias.fill_(0.1)
    out = encoder([torch.tensor([[2.0, -6.0, 2.5, 10.0, 0.0]])])
    reached = out[0].amax(dim=0) > 0
    assert out[0, 1::2].any()
    assert not out[0, 0::2].any()
    # x = 2 m is the third of four 4 m cells (stride 8), y = -6 m the first.
    assert reached[2, 0]
    assert not reached[:, 2:].any()


def test_voxel_limit_depends_on_the_mode() -> None:
    encoder = VoxelLidarEncoder(SMALL, RANGE)
    seen = []
    encoder.backbone.register_forward_pre_hook(lambda _, args: seen.append(len(args[0].features)))
    for training in (True, False):
        encoder.train(training)([cloud(0, 2000)])
    assert seen == [300, 400]


def test_autocast_trains() -> None:
    encoder = VoxelLidarEncoder(SMALL, RANGE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = encoder([cloud(0, 400)])
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_same_seed_same_bits() -> None:
    encoder = VoxelLidarEncoder(SMALL, RANGE)
    grads = []
    for _ in range(2):
        encoder.zero_grad()
        encoder([cloud(0, 400)]).square().sum().backward()
        grads.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def both_gradients(encoder: VoxelLidarEncoder, points: list[Tensor]) -> list[Tensor]:
    """The map, gradients of all parameters, and buffers afterwards."""
    encoder.zero_grad(set_to_none=True)
    out = encoder(points)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    out.backward(weights)
    gradients = [parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None]
    return [out.detach().clone(), *gradients, *(buffer.clone() for buffer in encoder.buffers())]


@pytest.mark.parametrize("device", DEVICES)
def test_padded_sites_change_nothing(device: str) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        [ConvNormAct(SubMConv3d(5, 4)), ResidualBlock(4), ConvNormAct(SparseConv3d(4, 6, *WINDOWS[1]))]
    )
    layers.to(device)
    coords = torch.tensor([[b, x, y, z] for b in (0, 1) for x in (0, 2, 3) for y in (1, 2) for z in range(b, 5)])
    features = torch.randn(len(coords), 5)
    room, results = Room(), []
    room.rows = [len(coords) + 5, 150]
    for rows in (None, room):
        modules = copy.deepcopy(layers)
        with running("triton", device):
            sites = plan_sites(coords.to(device), (5, 4, 7), 2, WINDOWS[1:2], rows)
            x: Sparse = SparseTensor(fit_rows(features.to(device), len(sites), 0), sites)
            for module in modules:
                x = module(x)
            out = x.dense()
            out.backward(torch.arange(out.numel(), device=device).view_as(out) / out.numel())
        assert sites.coarser is not None
        assert rows is None or [len(sites), len(sites.coarser)] == room.rows
        results.append([out, *(p.grad for p in modules.parameters()), *(b.float() for b in modules.buffers())])
    assert room.rows == [len(coords) + 5, 150]
    for exact, padded in zip(*results, strict=True):
        assert exact is not None
        torch.testing.assert_close(padded, exact, rtol=1e-4, atol=1e-4)


def test_room_grows_where_it_is_too_small() -> None:
    room = Room()
    assert room.fit([100, 40_000]) == [4096, 45_056]
    assert room.fit([4096, 45_000]) == [4096, 45_056]
    assert room.fit([4097, 0]) == [8192, 45_056]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_recorded_encoder_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bevctl.ops.sites._STEP", 16)
    torch.manual_seed(0)
    plain = VoxelLidarEncoder(SMALL, RANGE).cuda()
    recorded = copy.deepcopy(plain)
    reports: list[str] = []
    record_parts(recorded, ["backbone"], reports.append)
    # Sites that need more room than the steps before; then the shapes stay.
    for step, size in enumerate([100, 80, 90, 250, 240, 1, 200, 230, 240]):
        points = [cloud(step, size).cuda(), cloud(100 + step, size // 2).cuda()]
        with torch.autocast("cuda", dtype=torch.float16):
            expected, found = both_gradients(plain, points), both_gradients(recorded, points)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), step
    assert not reports


def test_site_norm_of_one_site_uses_running_statistics() -> None:
    norm = SiteNorm(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(1.0)
    torch.testing.assert_close(norm(torch.full((1, 3), 2.0)), torch.full((1, 3), 1 / 1.001**0.5))
    assert norm.running_mean.tolist() == [1.0] * 3


def test_too_small_a_grid_is_refused() -> None:
    with pytest.raises(BevctlError, match=r"\(32, 32, 5\)"):
        SparseEncoder(5, (4, 4, 8, 8), 1, 8, (32, 32, 5))


@golden.needs_golden
def test_recorded_encoder_output() -> None:
    encoder = VoxelLidarEncoder(LidarConfig(), (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)).eval()
    golden.load_weights(encoder.backbone, "pts_middle_encoder.")
    with torch.no_grad():
        golden.assert_matches("pts_middle_encoder", encoder(golden.points()))
