"""Makes the fake mmengine and mmdet3d importable, and writes configs for their toy detector."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bevctl.config import mmdet3d as gate

FAKE = Path(__file__).parent / "fake_mmdet3d"
CONFIG = FAKE / "toy_config.py"
_NAMES = ("mmengine", "mmdet3d", "toy")


@contextmanager
def fake_mmdet3d(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fakes can be imported inside the block, and no process-wide permission outlives it."""
    _forget()
    monkeypatch.syspath_prepend(FAKE)
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    gate._allowed.clear()
    gate.run_config.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in _NAMES]:
        del sys.modules[name]


def write_config(path: Path, more: str = "") -> Path:
    """The toy config with more lines at its end."""
    path.write_text(CONFIG.read_text(encoding="utf-8") + more, encoding="utf-8")
    return path
