from __future__ import annotations

import io

import pytest

from bevctl.console import Console

from .fakes import Bench


@pytest.fixture
def console() -> Console:
    return Console(io.StringIO(), io.StringIO())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, console: Console) -> Bench:
    return Bench(monkeypatch, console)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
