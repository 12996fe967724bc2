from __future__ import annotations

from pathlib import Path

import pytest

from . import faults


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set for runs with an injected fault."""
    return faults.write_data(tmp_path_factory.mktemp("set") / "data")
