"""Telling the kinds of tree by their files, and reading training scripts without running them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.errors import BevctlError
from bevctl.external.script import read_script
from bevctl.external.trees import TREES, find_root, read_tree

from . import trees
from .trees import write


@pytest.mark.parametrize("kind", trees.KINDS)
def test_kinds(tmp_path: Path, kind: str) -> None:
    config = trees.KINDS[kind](tmp_path)
    tree = read_tree(tmp_path)
    assert tree.kind.name == kind
    assert find_root(config) == tmp_path
    assert tree.inside(config) == str(config.relative_to(tree.cwd))
    assert tree.inside(Path("/elsewhere/x.py")) == "/elsewhere/x.py"


def test_every_kind_is_tried() -> None:
    assert {kind.name for kind in TREES} == set(trees.KINDS)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import mmcv", "mmdet3d-0.x"),
        ("from mmcv.runner import init_dist", "mmdet3d-0.x"),
        ("def f():\n    from mmengine.runner import Runner\nimport mmcv", "mmdet3d-1.x"),
        ("from torchpack.utils.config import configs\nfrom mmcv import Config", "mit-bevfusion"),
        ("from pcdet.config import cfg", "openpcdet"),
    ],
)
def test_the_script_alone_may_tell(tmp_path: Path, text: str, kind: str) -> None:
    write(tmp_path / "tools" / "train.py", text)
    assert read_tree(tmp_path).kind.name == kind


def test_no_tree(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="is no folder"):
        read_tree(tmp_path / "absent")
    with pytest.raises(BevctlError, match=r"There is no tools/train\.py"):
        read_tree(tmp_path)
    with pytest.raises(BevctlError, match=r"has tools/train\.py"):
        find_root(tmp_path / "config.py")
    write(tmp_path / "tools" / "train.py", "import torch\n")
    with pytest.raises(BevctlError, match="imports none of torchpack, mmcv, mmengine and pcdet"):
        read_tree(tmp_path)


def test_options_of_a_script(tmp_path: Path) -> None:
    text = (
        "import argparse\nfrom . import x\np = argparse.ArgumentParser()\np.add_argument('config')\n"
        "p.add_argument('--resume', nargs='?', const='auto')\np.add_argument('--amp', action='store_true')\n"
        "p.add_argument('--local_rank', '--local-rank', type=int)\np.add_argument(NAME)\n"
        "p.add_argument('--cfg-options', nargs='+', action=DictAction)\n"
    )
    script = read_script(write(tmp_path / "train.py", text))
    assert script.options == {
        "--resume": True,
        "--amp": False,
        "--local_rank": True,
        "--local-rank": True,
        "--cfg-options": True,
    }
    assert script.imports == {"argparse"}
    assert not script.reads_rank_from_environment
    assert read_script(write(tmp_path / "b.py", "os.environ['LOCAL_RANK']")).reads_rank_from_environment


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "script.py"
    path.write_bytes(data)
    try:
        script = read_script(path)
    except BevctlError:
        return
    assert script.options == {}


def test_scripts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="cannot be read"):
        read_script(tmp_path)
    with pytest.raises(BevctlError, match="no Python"):
        read_script(write(tmp_path / "deep.py", "x = " + "(" * 10_000))
