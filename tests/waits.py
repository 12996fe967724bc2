"""A check that the host never waits for the GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def host_never_waits() -> Iterator[None]:
    """Raises RuntimeError where the block makes the host wait for the device; needs CUDA.

    Run the block's work once before: kernels are compiled and workspaces allocated in the first call.
    """
    _switch("error")
    try:
        yield
    finally:
        _switch("default")


def _switch(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # "is a prototype feature"
        torch.cuda.set_sync_debug_mode(mode)
