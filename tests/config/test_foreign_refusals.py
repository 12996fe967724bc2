"""Configs that are no configs: code in them is refused in one sentence, and nothing of it runs."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.foreign import read_foreign
from bevctl.config.foreign_expressions import parse
from bevctl.config.foreign_refusals import refuse_code
from bevctl.errors import BevctlError, ExitCode

CODE = [
    "__import__('os').system('touch {mark}')",
    "eval('1')",
    "exec('x = 1')",
    "().__class__.__bases__[0].__subclasses__()",
    "os.system('touch {mark}')",
    "subprocess.run(['touch', '{mark}'])",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "getattr(dict, 'x')",
    "(lambda: __builtins__)()",
    "shutil.rmtree('{mark}')",
]


def refused(path: Path) -> str:
    started = time.monotonic()
    with pytest.raises(BevctlError) as caught:
        read_foreign(path)
    assert time.monotonic() - started < 10
    assert caught.value.code == ExitCode.USAGE
    assert caught.value.message.count(". ") == 0
    return caught.value.message


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize(
    "form", ["x = {}", "{}", "if {}:\n    x = 1", "def f(a={}):\n    pass", "model = dict(type='A', b=[{}])"]
)
def test_code_in_a_python_config(tmp_path: Path, code: str, form: str) -> None:
    path = tmp_path / "config.py"
    path.write_text("model = dict()\n" + form.format(code.format(mark=tmp_path / "mark")) + "\n")
    assert "config.py:2: the config runs code" in refused(path)
    assert not (tmp_path / "mark").exists()


def test_code_in_a_base_of_a_python_config(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("x = __import__('os')\n")
    (tmp_path / "config.py").write_text("_base_ = 'base.py'\nmodel = dict()\n")
    assert "base.py:1" in refused(tmp_path / "config.py")


@pytest.mark.parametrize("code", [code for code in CODE if not code.startswith("exec")])
def test_code_in_an_expression_of_torchpack(tmp_path: Path, code: str) -> None:
    (tmp_path / "default.yaml").write_text(
        'max_epochs: 2\nfp16:\n  x: "${' + code.format(mark=tmp_path / "mark") + '}"\n'
    )
    (tmp_path / "c.yaml").write_text("optimizer: {lr: 0.1}\n")
    assert "default.yaml:3: the config runs code" in refused(tmp_path / "c.yaml")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {mark}']",
        "!!python/object/new:os.system ['touch {mark}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object:builtins.object {{}}",
        "!mine {{a: 1}}",
        "!!python/tuple [1]",
    ],
)
@pytest.mark.parametrize("form", ["optimizer: {}", "CLASS_NAMES: []\nDATA_CONFIG: {{}}\nOPTIMIZATION: {}"])
def test_tags_of_yaml_make_nothing(tmp_path: Path, tag: str, form: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(form.format(tag.format(mark=tmp_path / "mark")) + "\n")
    assert "cannot be read as" in refused(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.py", "model = " + "[" * 5000),
        ("deep.py", "model = " + "-" * 100_000 + "1"),
        ("deep.py", "model = " + "(" * 90 + "1" + ",)" * 90 + "\nx = " + "a." * 60_000 + "b"),
        ("deep.yaml", "optimizer: " + "{a: " * 5000 + "1" + "}" * 5000),
        ("deep.yaml", "optimizer: " + "[" * 20_000),
        ("deep.yaml", "optimizer: ${" + "(" * 300 + "1" + ")" * 300 + "}"),
        ("deep.yaml", "optimizer: ${" + "-" * 100_000 + "1}"),
        ("deep.yaml", "".join(f"{' ' * i}a:\n" for i in range(600)) + " " * 600 + "b: 1\noptimizer: 1\n"),
    ],
)
def test_deep_nesting(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    refused(tmp_path / name)


def test_an_expression_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text('optimizer: {lr: "${' + "(" * 5000 + '}"}\n')
    assert "c.yaml:1: an expression is nested too deeply to read" in refused(tmp_path / "c.yaml")


def test_an_expression_that_is_none_is_left_unresolved(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text('optimizer: {lr: "${1 +}"}\n')
    assert read_foreign(tmp_path / "c.yaml").get("optimizer.lr") is None


@pytest.mark.parametrize("name", ["large.py", "large.yaml"])
def test_a_hundred_megabytes_are_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(100_000_000)
    assert "larger than 256 KiB" in refused(tmp_path / name)


def test_what_configs_do_and_may(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "import os\nimport os.path as osp\nfrom mmcv.utils import x\nroot = osp.join(osp.dirname(__file__), 'data')\n"
        "name = os.environ.get('USER', 'me')\nmodel = dict(type='A', compile=True)\ntrain = dict(eval=1)\n"
    )
    config = read_foreign(path)
    assert config.get("train") == {"eval": 1}
    assert config.get("name") is None


_WORDS = st.sampled_from(
    ["a", "__import__", "eval", "x.y", "(1)", "['k']", ".__class__", "lambda: a", "[a for a in b]"]
)


@given(st.lists(_WORDS, min_size=1, max_size=6).map(" + ".join))
def test_whatever_has_a_hidden_name_in_it_is_refused(text: str) -> None:
    try:
        tree = parse(text)
    except SyntaxError:
        return
    hidden = any(
        (isinstance(node, ast.Name) and node.id == "__import__")
        or (isinstance(node, ast.Attribute) and node.attr == "__class__")
        for node in ast.walk(tree)
    )
    before = dict(os.environ)
    try:
        refuse_code(tree, "c.py")
    except BevctlError:
        assert hidden or "eval(" in text.replace(" ", "")
    else:
        assert not hidden
    assert dict(os.environ) == before
