"""The choice between our sparse convolution and spconv, and the bridge to it, with a stand-in for spconv."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.schema import LidarConfig
from bevctl.errors import BevctlError
from bevctl.models.lidar import VoxelLidarEncoder
from bevctl.ops import backend, spconv_bridge
from bevctl.ops.rulebook import Triple, output_shape, ravel
from bevctl.ops.sparse_conv import SparseTensor, sparse_conv
from tests.ops.test_sparse_conv import SHAPE, STRIDED, random_sites

CPU = torch.device("cpu")
SMALL = LidarConfig(voxel_size=(0.5, 0.5, 0.2), channels=(4, 4, 8, 8), blocks=1, out_channels=6, max_voxels=(300, 400))


class FakeTensor:
    """spconv.pytorch.SparseConvTensor: features and int32 indices, which need no order."""

    def __init__(self, features: Tensor, indices: Tensor, spatial_shape: list[int], batch_size: int) -> None:
        assert indices.dtype == torch.int32
        self.features, self.indices = features, indices
        self.spatial_shape, self.batch_size = spatial_shape, batch_size

    @property
    def shape(self) -> Triple:
        x, y, z = self.spatial_shape
        return x, y, z

    def replace_feature(self, features: Tensor) -> FakeTensor:
        return FakeTensor(features, self.indices, self.spatial_shape, self.batch_size)

    def dense(self) -> Tensor:
        return SparseTensor.build(self.features, self.indices, self.shape, self.batch_size).dense()


class FakeSubmanifold(nn.Module):
    """spconv.pytorch.SubMConv3d."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: Triple, bias: bool, device: str, indice_key: str
    ) -> None:
        super().__init__()
        assert not bias
        self.key = indice_key
        self.weight = nn.Parameter(torch.empty(channels_out, *kernel, channels_in, device=device))

    def forward(self, x: FakeTensor) -> FakeTensor:
        ours = SparseTensor.build(x.features, x.indices, x.shape, x.batch_size)
        rules = ours.sites.submanifold_rules(tuple(self.weight.shape[1:4]))  # type: ignore[arg-type]
        out = sparse_conv(ours.features, self.weight.permute(1, 2, 3, 4, 0), rules)
        rank = torch.argsort(torch.argsort(ravel(x.indices.long(), x.shape)))
        return x.replace_feature(out[rank])


class FakeStrided(nn.Module):
    """spconv.pytorch.SparseConv3d; output sites in no order."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: Triple, stride: Triple, padding: Triple,
        bias: bool, device: str,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        self.window = spconv_bridge.Window(kernel, stride, padding)
        self.weight = nn.Parameter(torch.empty(channels_out, *kernel, channels_in, device=device))

    def forward(self, x: FakeTensor) -> FakeTensor:
        ours = SparseTensor.build(x.features, x.indices, x.shape, x.batch_size)
        sites, rules = ours.sites.strided_rules(self.window)
        out = sparse_conv(ours.features, self.weight.permute(1, 2, 3, 4, 0), rules)
        shape = list(output_shape(x.shape, *self.window))
        return FakeTensor(out.flip(0), sites.coords.flip(0).int(), shape, x.batch_size)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An installed spconv."""
    package, library = types.ModuleType("spconv"), types.ModuleType("spconv.pytorch")
    package.__spec__ = importlib.machinery.ModuleSpec("spconv", None)
    fakes: dict[str, Any] = {
        "SparseConvTensor": FakeTensor, "SubMConv3d": FakeSubmanifold, "SparseConv3d": FakeStrided,
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(library, name, fake)
    monkeypatch.setitem(sys.modules, "spconv", package)
    monkeypatch.setitem(sys.modules, "spconv.pytorch", library)
    _forget()
    yield library
    _forget()


def _forget() -> None:
    for cached in (spconv_bridge._installed, spconv_bridge._probe, spconv_bridge._convolution):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    _forget()
    yield
    _forget()


def reason(dtype: torch.dtype = torch.float32) -> str:
    return spconv_bridge.reason(CPU, dtype)


def test_without_spconv_ours_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spconv", None)
    assert reason() == "Sparse convolution by bevctl: spconv is not installed"
    monkeypatch.setenv(spconv_bridge.VARIABLE, "spconv")
    with pytest.raises(BevctlError, match="spconv is not installed") as raised:
        spconv_bridge.use_spconv(CPU, torch.float32)
    assert "BEVCTL_SPARSE=auto" in raised.value.hint


def test_an_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spconv_bridge.VARIABLE, "spcnv")
    with pytest.raises(BevctlError, match="'spcnv'") as raised:
        reason()
    assert "spconv" in raised.value.hint


@pytest.mark.usefixtures("library")
def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tried on GPUs only" in reason()
    monkeypatch.setenv(spconv_bridge.VARIABLE, "spconv")
    assert reason() == "Sparse convolution by spconv: BEVCTL_SPARSE=spconv"
    with backend.forced("torch"):
        assert not spconv_bridge.use_spconv(CPU, torch.float32)
    monkeypatch.setenv(spconv_bridge.VARIABLE, "own")
    assert reason() == "Sparse convolution by bevctl: BEVCTL_SPARSE=own"


@pytest.mark.usefixtures("library")
def test_auto_leaves_determinism_and_bf16_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not compute in bfloat16" in reason(torch.bfloat16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "repeat bit by bit" in reason()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("theirs", "ours", "chosen"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_a_probe_takes_the_faster_one(
    theirs: float, ours: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([theirs, ours])
    monkeypatch.setattr(spconv_bridge, "_milliseconds", lambda *_: next(times))
    monkeypatch.setattr(spconv_bridge, "_PROBE_SITES", 500)
    used, why = spconv_bridge._compare(CPU, torch.float32)
    assert used is chosen
    assert f"{theirs:.2f} ms in spconv and {ours:.2f} ms in bevctl" in why


def test_a_probe_refuses_wrong_results(library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(FakeSubmanifold):
        def forward(self, x: FakeTensor) -> FakeTensor:
            y = super().forward(x)
            return y.replace_feature(y.features * 1.01)

    monkeypatch.setattr(library, "SubMConv3d", Wrong)
    monkeypatch.setattr(spconv_bridge, "_PROBE_SITES", 500)
    used, why = spconv_bridge._compare(CPU, torch.float32)
    assert not used
    assert why.startswith("spconv is off by")


def test_a_probe_survives_a_library_that_fails(library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(library, "SubMConv3d", fail)
    monkeypatch.setattr(spconv_bridge, "_PROBE_SITES", 500)
    assert spconv_bridge._compare(CPU, torch.float32) == (
        False,
        "spconv fails on this device (RuntimeError: no kernel image is available)",
    )


@pytest.mark.usefixtures("library")
def test_real_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spconv_bridge, "_PROBE_SITES", 200)
    assert "ms in spconv" in spconv_bridge._compare(CPU, torch.float32)[1]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("window", STRIDED)
def test_the_bridge_gives_the_same_grid_and_gradients(window: spconv_bridge.Window) -> None:
    sites, generator = random_sites(0, 50), torch.Generator().manual_seed(0)
    features = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    weights = [torch.randn(3, 3, 3, 3, 4, dtype=torch.float64, generator=generator)]
    weights.append(torch.randn(*window.kernel, 4, 5, dtype=torch.float64, generator=generator))
    results = []
    for build in (SparseTensor.build, spconv_bridge.SpconvTensor.build):
        leaves = [tensor.clone().requires_grad_() for tensor in (features, *weights)]
        x = build(leaves[0], sites, SHAPE, 2).submanifold(leaves[1])
        grid = x.with_features(x.features.relu()).strided(leaves[2], window).dense()
        results.append([grid, *torch.autograd.grad(grid.square().sum(), leaves)])
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, own)


@pytest.mark.usefixtures("library")
def test_layers_on_one_set_of_sites_share_a_key() -> None:
    x = spconv_bridge.SpconvTensor.build(torch.ones(5, 2), random_sites(1, 5), SHAPE, 2)
    weight = torch.ones(3, 3, 3, 2, 2)
    y = x.submanifold(weight).submanifold(weight)
    assert spconv_bridge._convolution.cache_info().misses == 1
    z = y.strided(weight, STRIDED[0]).submanifold(weight)
    assert (y.level, z.level) == (0, 1)
    assert spconv_bridge._convolution.cache_info().misses == 3


@pytest.mark.usefixtures("library")
def test_the_encoder_gives_the_same_map_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = VoxelLidarEncoder(SMALL, (-8.0, -8.0, -5.0, 8.0, 8.0, 3.0)).eval()
    names = list(encoder.state_dict())
    generator = torch.Generator().manual_seed(0)
    points = [torch.rand(n, 5, generator=generator) * 8 - 4 for n in (200, 0, 100)]
    own = encoder(points)
    monkeypatch.setenv(spconv_bridge.VARIABLE, "spconv")
    torch.testing.assert_close(encoder(points), own)
    assert list(encoder.state_dict()) == names
    assert spconv_bridge._convolution.cache_info().misses > 0
