"""The profiler records, and says nothing itself."""

from __future__ import annotations

import subprocess
import sys

PROFILING = """
import torch
from torch.profiler import ProfilerActivity
from bevctl.measure.profiler import profiled

with profiled(ProfilerActivity.CPU) as profiler:
    torch.ones(3) + 1
print(*(event.key for event in profiler.key_averages() if event.key == "aten::add"))
"""


def test_nothing_is_said_on_the_screen() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILING], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("aten::add", "")
