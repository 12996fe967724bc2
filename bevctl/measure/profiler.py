"""torch's profiler, without its words on the screen."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

_FATAL = "6"
"""Kineto's level above its notes of each start and stop, and above an error where PyTorch knows CUDA and finds none."""


@contextlib.contextmanager
def profiled(*activities: ProfilerActivity) -> Iterator[profile]:
    """Records what the block does; asked for its events after the block."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _FATAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of cycles, of which there is one
        with profile(activities=activities) as profiler:
            yield profiler
