"""Which launches of a kernel look for a variant, and what the others pass on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
module = importlib.import_module("bevctl.ops.kernels.launch")


class FakeKernel(triton.JITFunction):  # type: ignore[name-defined]
    """Counts searches for a variant, and keeps what compiled variants are called with."""

    def __init__(self) -> None:
        self.arg_names = ["tensor", "other", "rows", "FLAG", "WIDTH"]
        self.searches: list[dict[str, Any]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def search(*_: Any, **constants: Any) -> Compiled:
            self.searches.append(constants)
            return Compiled(self)

        return search


class Compiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.direct.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(module, "_DIRECT", True)
    monkeypatch.setattr(module, "_variants", {})
    return FakeKernel()


def test_the_second_launch_is_direct_whatever_the_sizes(kernel: FakeKernel) -> None:
    tensor = torch.zeros(8)
    module.launch(kernel, (3,), tensor, tensor, 8, WIDTH=16, FLAG=True, num_warps=2)
    assert kernel.searches == [{"WIDTH": 16, "FLAG": True, "num_warps": 2}]
    other = torch.zeros(1)
    module.launch(kernel, (5, 2), other, tensor, 1, WIDTH=16, FLAG=True, num_warps=2)
    assert len(kernel.searches) == 1
    # All arguments in the order of the signature, without the options of the compiler.
    ((grid, *arguments),) = kernel.direct
    assert grid == (5, 2, 1)
    assert arguments[0] is other
    assert arguments[2:] == [1, True, 16]


@pytest.mark.parametrize(
    ("tensor", "width"),
    [(torch.zeros(8, dtype=torch.float16), 16), (torch.zeros(9)[1:], 16), (torch.zeros(8), 32)],
    ids=["type", "alignment", "constant"],
)
def test_another_variant_is_looked_for(kernel: FakeKernel, tensor: torch.Tensor, width: int) -> None:
    for used, wide in ((torch.zeros(8), 16), (tensor, width), (tensor, width)):
        module.launch(kernel, (1,), used, used, 8, WIDTH=wide, FLAG=False)
    assert len(kernel.searches) == 2
    assert len(kernel.direct) == 1


def test_older_versions_launch_in_the_ordinary_way(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DIRECT", False)
    for _ in range(2):
        module.launch(kernel, (1,), torch.zeros(8), torch.zeros(8), 8, WIDTH=16, FLAG=False)
    assert len(kernel.searches) == 2
    assert not kernel.direct
