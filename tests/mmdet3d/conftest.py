"""Tests with the real mmengine, mmcv, mmdet and mmdet3d: see run.sh. Without being asked they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ASKED = "BEVCTL_TEST_MMDET3D" in os.environ
REASON = "needs mmdet3d 1.4 with mmcv's ops: run tests/mmdet3d/run.sh"
CONFIG = Path(__file__).parent / "centerpoint_synth.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/mmdet3d/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not ASKED:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic set with info files in mmdet3d's format (about half a minute)."""
    from bevctl.cli.main import run
    from bevctl.console import Console

    folder = tmp_path_factory.mktemp("data") / "synth"
    assert run(["data", "synth", str(folder)], Console()) == 0
    return folder
