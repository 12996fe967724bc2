"""Configs of other projects: merged as their own programs merge them, worked out without running anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.foreign import ForeignConfig, is_foreign, read_foreign
from bevctl.config.foreign_values import Section, Unresolved, lookup, merged
from bevctl.errors import BevctlError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def python(tmp_path: Path, text: str) -> ForeignConfig:
    return read_foreign(write(tmp_path / "config.py", text + "\nmodel = dict()\n"))


# torchpack


@pytest.fixture
def mit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of mit-bevfusion's configs, in small; the working directory is the project."""
    monkeypatch.chdir(tmp_path)
    write(Path("configs/default.yaml"), "seed: 0\nfp16:\n  loss_scale:\n    growth_interval: 2000\nmax_epochs: 20\n")
    write(
        Path("configs/nuscenes/default.yaml"),
        "image_size: [256, 704]\nroot: data/\nlr_config: {policy: cyclic, cyclic_times: 1}\n"
        "feature: '${[image_size[0] // 8, image_size[1] // 8]}'\n"
        "runner: {max_epochs: '${max_epochs}', file: '${root + \"x.pkl\"}'}\n",
    )
    return write(
        Path("configs/nuscenes/det/fusion.yaml"),
        "model:\n  encoders: {camera: null}\nmax_epochs: 6\nlr_config: null\nimage_size: [128, 352]\n",
    )


def test_torchpack_merges_the_defaults_of_every_folder_above(mit: Path) -> None:
    assert is_foreign(mit)
    config = read_foreign(mit)
    assert config.kind == "torchpack"
    assert [str(path) for path in config.files] == [
        "configs/default.yaml",
        "configs/nuscenes/default.yaml",
        "configs/nuscenes/det/fusion.yaml",
    ]
    assert config.get("fp16.loss_scale.growth_interval") == 2000
    assert "lr_config" in config.values
    assert config.get("lr_config") is None
    assert str(config.origin("fp16")) == "configs/default.yaml:2"
    assert str(config.origin("max_epochs")) == "configs/nuscenes/det/fusion.yaml:3"


def test_torchpack_expressions_follow_what_overrides_them(mit: Path) -> None:
    config = read_foreign(mit)
    assert config.get("feature") == [16, 44]
    assert config.get("runner") == {"max_epochs": 6, "file": "data/x.pkl"}


def test_a_mapping_over_null_starts_fresh() -> None:
    below = Section({"a": Section({"x": 1}), "b": Section({"x": 1})})
    wiped = merged(below, Section({"a": None}))
    assert merged(wiped, Section({"a": Section({"y": 2})})) == {"a": {"y": 2}, "b": {"x": 1}}
    assert below == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer: {lr: 1e-4}", "1e-4"),  # YAML 1.1, as PyYAML has it: no dot, no number
        ("optimizer: {lr: 1.0e-4}", 1e-4),
        ("base: &b {lr: 1.0}\noptimizer: {<<: *b}", 1.0),
        ("optimizer: {lr: '${2 ** 3}'}", 8),
        ("optimizer: {lr: '${a if b else 1}'}\na: 5\nb: true", 5),
    ],
)
def test_torchpack_values(tmp_path: Path, text: str, value: object) -> None:
    assert read_foreign(write(tmp_path / "c.yaml", text)).get("optimizer.lr") == value


def test_expressions_that_refer_to_each_other_are_left_unresolved(tmp_path: Path) -> None:
    config = read_foreign(write(tmp_path / "c.yaml", "a: ${b}\nb: ${a}\noptimizer: 1\n"))
    assert isinstance(lookup(config.values, "a"), Unresolved)
    assert config.get("a") is None


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: &a [*a]",
        "optimizer: &a {x: *a}",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"b{i}: &b{i} [{','.join([f'*b{i - 1}' if i else '*a'] * 9)}]\n" for i in range(12))
        + "optimizer: 1",
        "optimizer: [unclosed",
        "optimizer: !!python/object/apply:os.system ['echo hello']",
        "optimizer: 2020-99-99",
        "optimizer: " + "[" * 500,
        "\x00\x01",
        "",
    ],
)
def test_a_broken_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(BevctlError):
        read_foreign(write(tmp_path / "c.yaml", text))
    assert time.monotonic() - started < 10


def test_our_own_configs_are_not_foreign(tmp_path: Path) -> None:
    assert not is_foreign(Path("configs/tiny.yaml"))
    assert not is_foreign(write(tmp_path / "mine.yaml", "train: {batch: 1}\n"))
    assert not is_foreign(tmp_path / "absent.yaml")
    assert not is_foreign(tmp_path)


# mmcv and mmengine


def test_bases_merge_in_the_way_of_mmcv(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "model = dict(type='A', backbone=dict(depth=50, stages=[1, 2]))\nlr = 0.1\n")
    write(tmp_path / "b.py", "optimizer = dict(type='SGD', lr=0.1)\n")
    text = (
        "_base_ = ['./a.py', './b.py']\n"
        "model = dict(backbone=dict(stages=[3]), neck=dict(type='N'))\n"
        "optimizer = dict(_delete_=True, type='AdamW')\n"
        "half = {{ _base_.lr }} / 2\n"
    )
    config = read_foreign(write(tmp_path / "c.py", text))
    assert config.kind == "mmcv"
    assert config.get("model") == {"type": "A", "backbone": {"depth": 50, "stages": [3]}, "neck": {"type": "N"}}
    assert config.get("optimizer") == {"type": "AdamW"}
    assert config.get("half") == 0.05
    assert [path.name for path in config.files] == ["a.py", "b.py", "c.py"]
    assert str(config.origin("model.neck")).endswith("c.py:2")
    assert str(config.origin("model.type")).endswith("a.py:1")


def test_mmengine_bases_may_be_imported_and_deleted(tmp_path: Path) -> None:
    write(
        tmp_path / "_base_" / "runtime.py",
        "default_hooks = dict(timer=dict(type='T'))\ntrain_cfg = dict(max_epochs=2)\n",
    )
    text = (
        "from mmengine.config import read_base\n"
        "from mmengine.optim import AmpOptimWrapper\n"
        "with read_base():\n    from ._base_.runtime import *\n"
        "del default_hooks['timer']\n"
        "optim_wrapper = dict(type=AmpOptimWrapper)\n"
        "train_cfg.update(max_epochs=3)\n"
    )
    config = read_foreign(write(tmp_path / "c.py", text))
    assert config.kind == "mmengine"
    assert config.get("default_hooks") == {}
    assert config.get("train_cfg.max_epochs") == 3
    kind = lookup(config.values, "optim_wrapper.type")
    assert isinstance(kind, Unresolved)
    assert kind.text == "mmengine.optim.AmpOptimWrapper"


@pytest.mark.parametrize("way", ["with read_base():", "if '_base_':"])
def test_imported_bases_pass_on_what_they_import(tmp_path: Path, way: str) -> None:
    write(
        tmp_path / "base.py",
        "from mmdet3d.models import Head\nmodel = dict(a=1, head=dict(type=Head, b=2), gone=dict(c=3))\n",
    )
    change = "model.merge(dict(head=dict(b=5), gone=dict(_delete_=True)))\n"
    text = f"{way}\n    from .base import *\nx = dict(type=Head)\n{change}"
    config = read_foreign(write(tmp_path / "c.py", text))
    assert str(lookup(config.values, "x.type")) == "mmdet3d.models.Head (imported)"
    assert (config.get("model.a"), config.get("model.head.b"), config.get("model.gone")) == (1, 5, {})
    assert config.notes == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = [1, 2] * 2 + [3]", [1, 2, 1, 2, 3]),
        ("a, (b, c) = 1, (2, 3)\nx = a + b * c", 7),
        ("x = {'a': 1, **dict(b=2)}", {"a": 1, "b": 2}),
        ("n = ['car', 'bus']\nx = {k: i for i, k in enumerate(n) if k != 'bus'}", {"car": 0}),
        ("x = [i * j for i in range(2) for j in (1, 2)]", [0, 0, 1, 2]),
        ("n = 3\nx = f'swin_{n}'", "swin_3"),
        ("x = 0\nfor i in range(4):\n    x += i", 6),
        ("fast = True\nif fast:\n    x = 1\nelse:\n    x = 2", 1),
        (
            "x = [dict(type='A')]\nx.insert(0, dict(type='B'))\nx[1]['k'] = len(x)",
            [{"type": "B"}, {"type": "A", "k": 2}],
        ),
        ("d = dict(a=dict(b=1))\nd['a']['b'] = 2\nx = d.get('a')", {"b": 2}),
        ("x = max(1, 2) if 3 in [3] and not False else None", 2),
        ("x = 'a,b'.split(',')[-1].upper()", "B"),
        ("x: int = 0x10 // 3", 5),
        ("x = '{{ fileBasenameNoExtname }}'", "config"),
        ("x = '\\d' if 1else 0", "\\d"),  # Python warns of both
        ("x = '{{ $UNSET:fallback }}'", "fallback"),
    ],
)
def test_expressions_that_are_worked_out(tmp_path: Path, text: str, value: object) -> None:
    assert python(tmp_path, text).get("x") == value


@pytest.mark.parametrize(
    "expression",
    [
        "open('{mark}', 'w')",
        "'{{0.__class__}}'.format(1)",
        "(lambda: open('{mark}', 'w'))()",
        "[open('{mark}', 'w') for _ in [1]]",
        "'a' * 10 ** 12",
        "9 ** 9 ** 9",
        "[0] * 10 ** 12",
        "list(range(10 ** 12))",
        "[[0] * 10000 for _ in range(10 ** 9)]",
        "sorted([1], key=print)",
        "1 / 0",
        "[1][5]",
        "undefined + 1",
        "1 << 100",
        "'%1000000000d' % 1",
        "f'{{1:>1000000000}}'",
        "-" * 50 + "1" + " + 1" * 900,
    ],
)
def test_what_only_running_would_give_is_left_unresolved(tmp_path: Path, expression: str) -> None:
    mark = tmp_path / "mark"
    started = time.monotonic()
    config = python(tmp_path, f"import os\nbefore = 1\nx = {expression.format(mark=mark)}\nafter = 2")
    assert isinstance(lookup(config.values, "x"), Unresolved)
    assert (config.get("before"), config.get("after")) == (1, 2)
    assert not mark.exists()
    assert time.monotonic() - started < 5


def test_statements_that_are_not_followed_make_their_names_unknown(tmp_path: Path) -> None:
    text = (
        "import os\nx = y = 1\nif os.getenv('A'):\n    x = 2\nwhile y < 5:\n    y += 1\ndef f():\n    pass\nz = f()\n"
    )
    config = python(tmp_path, text)
    assert [isinstance(lookup(config.values, name), Unresolved) for name in "xyz"] == [True, True, True]
    assert len(config.notes) == 2
    assert "config.py:3" in config.notes[0]
    assert "f" not in config.values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("_base_ = './config.py'\n", "among its own bases"),
        ("_base_ = './absent.py'\n", "config.py:1: the base ./absent.py does not exist"),
        ("model = dict(\n", "not valid Python"),
        ("print 'two'\n", "config.py:1: not valid Python"),
        ("x = 1\n", "no mmcv or mmengine config"),
        ("x = " + "[" * 1000, "not valid Python"),
        ("#" * 300_000, "larger than 256 KiB"),
        ("with read_base():\n    from .absent import *\nmodel = 1\n", "does not exist"),
    ],
)
def test_a_broken_python_config_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BevctlError, match=said):
        read_foreign(write(tmp_path / "config.py", text))


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    for data in (b"\xff\xfe\x00", b"x = 1\x00"):
        path.write_bytes(data)
        with pytest.raises(BevctlError):
            read_foreign(path)
    with pytest.raises(BevctlError, match="Cannot read"):
        read_foreign(tmp_path / "absent.py")


def test_bases_of_other_packages_are_noted(tmp_path: Path) -> None:
    config = python(tmp_path, "_base_ = 'mmdet3d::_base_/default_runtime.py'")
    assert "not followed" in config.notes[0]


@given(st.text(max_size=200))
def test_no_text_makes_the_python_reader_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.py"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        read_foreign(path)
    except BevctlError:
        return


_PIECES = st.sampled_from(
    [
        "model",
        "x",
        "=",
        "dict(",
        ")",
        "[",
        "]",
        "a=1",
        ",",
        "'s'",
        "\n",
        "for i in",
        "range(3)",
        ":",
        "{",
        "}",
        "**",
        "*",
    ]
)


@given(st.lists(_PIECES, max_size=40).map(" ".join))
def test_no_words_of_python_make_the_reader_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "words.py"
    path.write_text("model = dict()\n" + text)
    try:
        config = read_foreign(path)
    except BevctlError:
        return
    assert "model" in config.values
