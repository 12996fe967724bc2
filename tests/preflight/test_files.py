"""Checks of the config and of what another project needs beside it; those of checkpoints are in the next file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.finding import CheckStatus
from bevctl.preflight import files, half_weights
from bevctl.preflight.checks import Context, Outcome
from bevctl.preflight.plan import read_plan
from bevctl.preflight.request import build_context

from . import environments
from .conftest import MakeContext

Foreign = Callable[..., Context]


def judge(context: Context, id: str) -> Outcome:
    (spec,) = [spec for spec in files.CHECKS if spec.id == id]
    return spec.function(context)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of mmdet3d's kind, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tools" / "train.py", "model.cuda()\n")
    write(tmp_path / "tools" / "dist_train.sh")
    return tmp_path


@pytest.fixture
def foreign(project: Path) -> Foreign:
    """The context of a config with this text below the project."""

    def make(text: str, suffix: str = ".py", asked: str | None = None, **options: object) -> Context:
        path = write(project / "configs" / f"config{suffix}", text)
        given = {} if asked is None else {"precision.dtype": asked}

        def refuse() -> None:
            raise AssertionError("not a config of ours")

        return build_context(str(path), given, refuse, **options)  # type: ignore[arg-type]

    return make


FP16 = "data = dict(samples_per_gpu=1)\nfp16 = dict(loss_scale=512.)\n"
FP32 = "data = dict(samples_per_gpu=1)\n"


# FILE001


def test_our_config_loads(make_context: MakeContext) -> None:
    outcome = judge(make_context(), "FILE001")
    assert (outcome.status, outcome.found) == (CheckStatus.PASS, "tiny")


def test_a_foreign_config_loads(foreign: Foreign) -> None:
    outcome = judge(foreign(FP16), "FILE001")
    assert outcome.status == CheckStatus.PASS
    assert outcome.found == "mmcv config, read from configs/config.py"


def test_lines_that_were_not_worked_out_are_named(foreign: Foreign) -> None:
    outcome = judge(foreign(FP16 + "import os\nif os.environ.get('A'):\n    fp16 = None\n"), "FILE001")
    assert outcome.status == CheckStatus.WARN
    assert "configs/config.py:4" in outcome.found


@pytest.mark.parametrize(
    ("text", "suffix"),
    [("model = dict(", ".py"), ("optimizer: [", ".yaml"), ("train: {batchh: 1}", ".yaml"), ("", ".yaml")],
)
def test_a_broken_config(project: Path, text: str, suffix: str) -> None:
    from bevctl.config.load import load

    path = str(write(project / f"config{suffix}", text))
    context = build_context(path, {}, lambda: load(path))
    outcome = judge(context, "FILE001")
    assert outcome.status == CheckStatus.FAIL
    assert f"config{suffix}" in outcome.found
    assert judge(context, "FILE002").status == CheckStatus.SKIP


# FILE002


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "auto"])
def test_precision_of_our_config(make_context: MakeContext, dtype: str) -> None:
    outcome = judge(make_context(f"precision.dtype={dtype}"), "FILE002")
    assert outcome.status == CheckStatus.PASS
    assert f"precision.dtype is {dtype}" in outcome.found


@pytest.mark.parametrize(
    ("text", "asked", "status"),
    [
        (FP16, None, "pass"),
        (FP16, "fp16", "pass"),
        (FP16, "fp32", "fail"),
        (FP16, "bf16", "fail"),
        (FP32, None, "warn"),
        (FP32, "fp16", "fail"),
        (FP32, "fp32", "pass"),
        ("import os\n" + FP32 + "fp16 = os.environ['X']\n", "fp16", "unknown"),
    ],
)
def test_precision_of_a_foreign_config(foreign: Foreign, text: str, asked: str | None, status: str) -> None:
    outcome = judge(foreign(text, asked=asked), "FILE002")
    assert outcome.status == status
    if text == FP16:
        assert "configs/config.py:2" in outcome.found
    assert outcome.status == CheckStatus.PASS or outcome.fix


def test_the_file_that_switches_fp16_on_is_named(project: Path, foreign: Foreign) -> None:
    write(project / "configs" / "default.yaml", "fp16: {loss_scale: {growth_interval: 2000}}\n")
    text = "model: {encoders: null}\n"
    assert "configs/default.yaml:1" in judge(foreign(text, ".yaml"), "FILE002").found
    assert judge(foreign(text + "fp16: null\n", ".yaml", asked="fp16"), "FILE002").status == CheckStatus.FAIL


# FILE010


def test_our_runs_need_no_launcher(make_context: MakeContext) -> None:
    assert judge(make_context(), "FILE010").status == CheckStatus.SKIP


def test_launcher_of_mmcv(project: Path, foreign: Foreign) -> None:
    assert judge(foreign(FP16, gpus=8), "FILE010").status == CheckStatus.PASS
    (project / "tools" / "dist_train.sh").unlink()
    assert judge(foreign(FP16, gpus=1), "FILE010").status == CheckStatus.PASS
    outcome = judge(foreign(FP16, gpus=8), "FILE010")
    assert outcome.status == CheckStatus.FAIL
    assert "dist_train.sh" in outcome.found
    (project / "tools" / "train.py").unlink()
    assert "no tools/train.py" in judge(foreign(FP16), "FILE010").found
    assert judge(foreign(FP16, gpus=8, repo=project), "FILE010").status == CheckStatus.FAIL
    write(project / "tools" / "train.py")
    assert judge(foreign(FP16, gpus=8, repo=project), "FILE010").status == CheckStatus.PASS, "bevctl starts it"


def test_launcher_of_mit_bevfusion(
    project: Path, foreign: Foreign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert judge(foreign("model: {encoders: null}\n", ".yaml"), "FILE010").status == CheckStatus.PASS, "by torchrun"
    write(project / "tools" / "train.py", "from torchpack import distributed as dist\n")
    site = tmp_path / "site"
    site.mkdir()
    executable = environments.interpreter(tmp_path, Path(sys.executable), site)
    text = "model: {encoders: null}\n"
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    outcome = judge(foreign(text, ".yaml", python=str(executable)), "FILE010")
    assert outcome.status == CheckStatus.FAIL
    assert "torchpack is not installed" in outcome.found
    assert "mpirun is not on the PATH" in outcome.found
    environments.distribution(site, "torchpack", "0.3.1")
    write(tmp_path / "bin" / "mpirun", "#!/bin/sh\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{tmp_path / 'bin'}")
    assert judge(foreign(text, ".yaml", python=str(executable)), "FILE010").status == CheckStatus.PASS


# FILE011


def test_our_weights_stay_in_fp32(make_context: MakeContext) -> None:
    assert judge(make_context(), "FILE011").status == CheckStatus.SKIP


def test_half_weights_in_the_source(project: Path, foreign: Foreign) -> None:
    assert judge(foreign(FP16), "FILE011").status == CheckStatus.PASS
    write(project / "mmdet3d" / "apis" / "train.py", "x = 1\nmodel = model.cuda().half()\n")
    outcome = judge(foreign(FP16), "FILE011")
    assert outcome.status == CheckStatus.FAIL
    assert "mmdet3d/apis/train.py:2: model.half()" in outcome.found
    assert judge(foreign(FP32), "FILE011").status == CheckStatus.WARN


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("a.py", "self.model.half()", 1),
        ("a.py", "img_backbone.half()", 1),
        ("a.py", "points.half()", 0),
        ("a.py", "model.half(1)", 0),
        ("a.py", "# model.half()", 0),
        ("a.py", "text = 'model.half()'", 0),
        ("a.py", "model.half(", 0),
        ("a.py", "\x00model.half()", 0),
        ("tools/test.py", "model.half()", 0),
        ("deploy/export_onnx.py", "model.half()", 0),
        ("tests/x.py", "model.half()", 0),
        (".hidden/x.py", "model.half()", 0),
    ],
)
def test_calls_that_count(tmp_path: Path, name: str, source: str, found: int) -> None:
    write(tmp_path / name, source)
    assert len(half_weights.find(tmp_path)) == found


# --repo


def test_relative_paths_of_a_config_start_in_the_checkout(project: Path, foreign: Foreign, tmp_path: Path) -> None:
    text = FP16 + "data_root = 'data/'\ndata = dict(train=dict(data_root=data_root, ann_file='data/train.pkl'))\n"
    context = foreign(text, repo=tmp_path / "checkout")
    assert context.base == tmp_path / "checkout"
    plan = read_plan(context)
    assert plan.data_root == tmp_path / "checkout" / "data"
    assert plan.info_files == {"train": tmp_path / "checkout" / "data" / "train.pkl"}
    assert read_plan(foreign(text)).data_root == Path("data")
    pcdet = "CLASS_NAMES: [car]\nDATA_CONFIG: {DATA_PATH: ../data/nuscenes}\nOPTIMIZATION: {LR: 0.1}\n"
    context = foreign(pcdet, ".yaml", repo=project)
    assert read_plan(context).data_root == project / "tools" / ".." / "data" / "nuscenes"
