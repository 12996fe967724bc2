"""spconv 2 in place of our own sparse convolution, where it is installed, right and faster.

`BEVCTL_SPARSE` is auto (a short probe decides, once a device and number format), own or spconv. spconv numbers the
sites of a strided convolution in an order of its own, and its sums need not repeat bit by bit: with deterministic
algorithms `auto` means own. It computes BF16 autocast in FP16, so that is left to our own too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevctl.errors import BevctlError, did_you_mean
from bevctl.ops import backend
from bevctl.ops.rulebook import Triple, unravel
from bevctl.ops.sites import Window
from bevctl.ops.sparse_conv import Sparse, SparseTensor

VARIABLE = "BEVCTL_SPARSE"
CHOICES = ("auto", "own", "spconv")
_PROBE_SHAPE: Triple = (128, 128, 24)
_PROBE_SITES, _PROBE_CHANNELS, _PROBE_REPEATS = 40_000, 32, 5
_TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-3}
"""Relative to the norm of the result; spconv may use TF32."""


@dataclass(frozen=True)
class SpconvTensor:
    """A `Sparse` on top of spconv's tensor."""

    tensor: Any
    """spconv.pytorch.SparseConvTensor."""
    level: int = 0
    """Strided convolutions before."""

    @staticmethod
    def build(features: Tensor, coords: Tensor, shape: Triple, batch: int) -> SpconvTensor:
        """(M, C) features at (M, 4) unique sites (b, x, y, z)."""
        return SpconvTensor(_library().SparseConvTensor(features, coords.int(), list(shape), batch))

    @property
    def features(self) -> Tensor:
        """(M, C)."""
        features: Tensor = self.tensor.features
        return features

    @property
    def count(self) -> None:
        """There is no padding."""

    def with_features(self, features: Tensor) -> SpconvTensor:
        """The same sites with other features."""
        return SpconvTensor(self.tensor.replace_feature(features), self.level)

    def submanifold(self, weight: Tensor) -> SpconvTensor:
        """See `Sparse`."""
        kernel = tuple(weight.shape[:3])
        conv = _convolution("SubMConv3d", *weight.shape[3:], kernel, indice_key=f"{self.level} {kernel}")
        return SpconvTensor(_call(conv, weight, self.tensor), self.level)

    def strided(self, weight: Tensor, window: Window) -> SpconvTensor:
        """See `Sparse`."""
        conv = _convolution("SparseConv3d", *weight.shape[3:], *window)
        return SpconvTensor(_call(conv, weight, self.tensor), self.level + 1)

    def dense(self) -> Tensor:
        """(B, C, X, Y, Z) with zeros elsewhere."""
        grid: Tensor = self.tensor.dense()
        return grid


@functools.lru_cache(maxsize=256)
def _convolution(kind: str, channels_in: int, channels_out: int, *geometry: Triple, **options: str) -> nn.Module:
    """A layer of spconv without numbers of its own."""
    layer = getattr(_library(), kind)
    conv: nn.Module = layer(channels_in, channels_out, *geometry, bias=False, device="meta", **options)
    return conv


def _call(conv: nn.Module, weight: Tensor, tensor: Any) -> Any:
    """Runs a layer with our weight (kx, ky, kz, Cin, Cout) in spconv's layout (Cout, kx, ky, kz, Cin)."""
    return torch.func.functional_call(conv, {"weight": weight.permute(4, 0, 1, 2, 3).contiguous()}, (tensor,))


def _library() -> Any:
    return importlib.import_module("spconv.pytorch")


def use_spconv(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether sparse convolutions on `device` that compute in `dtype` run in spconv.

    Raises:
        BevctlError: spconv is asked for and cannot run here, or the variable has an unknown value.
    """
    return _decide(device, dtype)[0]


def reason(device: torch.device, dtype: torch.dtype) -> str:
    """One sentence: what runs sparse convolutions, and why. The first call may measure for a second."""
    chosen, why = _decide(device, dtype)
    return f"Sparse convolution by {'spconv' if chosen else 'bevctl'}: {why}"


def _decide(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise BevctlError(f"{VARIABLE} is {wanted!r}.", did_you_mean(wanted, CHOICES))
    if wanted == "own":
        return False, f"{VARIABLE}=own"
    if backend.is_forced():
        return False, "one backend is asked for"
    if wanted == "auto" and torch.are_deterministic_algorithms_enabled():
        return False, "results must repeat bit by bit"
    able, why = _installed(device, dtype)
    if wanted == "spconv" and not able:
        raise BevctlError(f"{VARIABLE}=spconv, but {why}.", f"Install spconv 2, or use {VARIABLE}=auto or own.")
    if wanted == "spconv":
        return True, f"{VARIABLE}=spconv"
    return _probe(device, dtype) if able else (False, why)


@functools.lru_cache(maxsize=16)
def _installed(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    if importlib.util.find_spec("spconv") is None:
        return False, "spconv is not installed"
    if dtype not in _TOLERANCE:
        return False, f"spconv does not compute in {str(dtype).removeprefix('torch.')}"
    try:
        _library()
    except Exception as error:  # a build for another CUDA version fails in many ways
        return False, f"spconv does not load ({_first_line(error)})"
    return True, f"spconv is installed, for {device.type}"


@functools.lru_cache(maxsize=16)
def _probe(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Two layers forward and backward, sites and rules included, in both: equal results, then the shorter time."""
    if device.type != "cuda":
        return False, "spconv is tried on GPUs only"
    return _compare(device, dtype)


def _compare(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    cells = _PROBE_SHAPE[0] * _PROBE_SHAPE[1] * _PROBE_SHAPE[2]
    generator = torch.Generator().manual_seed(0)
    coords = unravel(torch.randperm(cells, generator=generator)[:_PROBE_SITES].sort().values, _PROBE_SHAPE).to(device)
    weights = [
        (torch.randn(3, 3, 3, _PROBE_CHANNELS, _PROBE_CHANNELS, generator=generator) / 30).to(device) for _ in range(2)
    ]
    features = torch.randn(_PROBE_SITES, _PROBE_CHANNELS, generator=generator).to(device)

    def run(build: Callable[..., Sparse]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (features, *weights)]
        with _computing_in(device, dtype):
            x = build(leaves[0], coords, _PROBE_SHAPE, 1).submanifold(leaves[1])
            grid = x.strided(leaves[2], Window((3, 3, 3), (2, 2, 2), (1, 1, 1))).dense()
        return [grid.detach(), *torch.autograd.grad(grid.float().square().sum(), leaves)]

    own = run(SparseTensor.build)
    try:
        other = run(SpconvTensor.build)
        off = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(other, own, strict=True))
        if not off < _TOLERANCE[dtype]:
            return False, f"spconv is off by {off:.1e} on this device"
        theirs = _milliseconds(lambda: run(SpconvTensor.build), device)
    except Exception as error:  # whatever another library raises on a device that it does not support
        return False, f"spconv fails on this device ({_first_line(error)})"
    ours = _milliseconds(lambda: run(SparseTensor.build), device)
    return theirs < ours, f"a probe of two layers takes {theirs:.2f} ms in spconv and {ours:.2f} ms in bevctl"


@contextlib.contextmanager
def _computing_in(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    half = dtype != torch.float32
    with torch.autocast(device.type, dtype=dtype if half else torch.float16, enabled=half):
        yield


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median wall time; the first runs of `work` were before."""
    times = []
    for _ in range(_PROBE_REPEATS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
