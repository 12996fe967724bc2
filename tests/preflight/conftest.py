"""Contexts for checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.config.load import load
from bevctl.preflight.checks import Context
from bevctl.preflight.request import context_of_config

MakeContext = Callable[..., Context]


@pytest.fixture(autouse=True)
def _every_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def make_context(tmp_path: Path) -> MakeContext:
    """Makes the context of packaged config `tiny`; `sets` change the config, other arguments the context."""

    def make(*sets: str, **options: Any) -> Context:
        config = load("tiny", sets=[f"work_dir={tmp_path / 'run'}", *sets]).config
        return context_of_config(config, **options)

    return make
