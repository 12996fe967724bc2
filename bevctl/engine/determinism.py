"""Whether torch uses algorithms that give the same result each time, or the fastest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms inside the block, or the fastest: shapes stay the same, so cuDNN may try them all."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
