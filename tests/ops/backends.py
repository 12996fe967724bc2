"""Devices and backends that an operation's tests run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from bevctl.errors import BevctlError
from bevctl.ops import backend

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)
DEVICES = ["cpu", CUDA]
BACKENDS = ["torch", "triton"]


@contextlib.contextmanager
def running(name: str, device: str) -> Iterator[None]:
    """Runs the block with backend `name`; skips the test where that cannot run on `device`."""
    with backend.forced(name):
        try:
            backend.use_triton(torch.empty(0, device=device))
        except BevctlError as error:
            pytest.skip(str(error))
        yield
