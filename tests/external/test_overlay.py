"""Overlays say what was meant: read back over the config, they give the changed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.foreign import ForeignConfig, changed, read_foreign
from bevctl.config.foreign_values import plain
from bevctl.errors import BevctlError
from bevctl.external.overlay import python_overlay, yaml_overlay

from . import trees

SCALARS = (
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
NAMES = st.sampled_from(["a", "type", "max_norm", "class", "with space", "__x__"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3) | st.tuples(inner),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["fp16", "model.neck", "optimizer.lr", "data.train", "data.samples_per_gpu", "runner.max_epochs"]
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ForeignConfig:
    return read_foreign(trees.mmdet3d_0(tmp_path_factory.mktemp("tree")))


@given(changes=st.dictionaries(KEYS, VALUES, max_size=4))
def test_python_says_what_was_changed(
    config: ForeignConfig, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    if "data.train" in changes and not isinstance(changes["data.train"], dict):
        del changes["data.train"]
    overlay = python_overlay(config, changes, tmp_path_factory.getbasetemp() / "run")
    overlay.write()
    assert max(len(line) for line in overlay.text.splitlines()) < 10_000
    read = read_foreign(overlay.path)
    assert read.files[-1] == overlay.path
    assert plain(read.values) == plain(changed(config, changes).values)


def test_long_values_are_broken_into_lines(config: ForeignConfig, tmp_path: Path) -> None:
    steps = [{"type": "CosineAnnealingLR", "T_max": 8, "eta_min": 0.001, "begin": 0, "end": 8, "by_epoch": True}] * 2
    text = python_overlay(config, {"param_scheduler": steps, "x": {1: "a"}, "y": (1,)}, tmp_path).text
    assert "param_scheduler = [\n    dict(type='CosineAnnealingLR', T_max=8," in text
    assert text.endswith("\n]\nx = {1: 'a'}\ny = (1,)\n")


def test_yaml_is_the_file_with_the_change(tmp_path: Path) -> None:
    path = trees.openpcdet(tmp_path)
    config = read_foreign(path)
    overlay = yaml_overlay(config, {"OPTIMIZATION.USE_AMP": False, "MODEL.NEW.KEY": [1]}, tmp_path / "run")
    expected = yaml.safe_load(path.read_text())
    expected["OPTIMIZATION"]["USE_AMP"] = False
    expected["MODEL"]["NEW"] = {"KEY": [1]}
    assert yaml.safe_load(overlay.text) == expected
    assert overlay.path == tmp_path / "run" / "bevctl" / path.name
    with pytest.raises(BevctlError, match=r"CLASS_NAMES\.x\.y cannot be set"):
        yaml_overlay(config, {"CLASS_NAMES.x.y": 1}, tmp_path / "run")
