"""Checks of the software, in made-up environments of real interpreters; the opt-in one at the end is all real."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.config.foreign import read_foreign
from bevctl.finding import CheckStatus
from bevctl.preflight import environment as environment_module
from bevctl.preflight import nvml, software
from bevctl.preflight.checks import Context, Outcome

from . import environments
from .conftest import MakeContext

MakeSite = Callable[[Path], None]


def judge(context: Context, id: str) -> Outcome:
    (spec,) = [spec for spec in software.CHECKS if spec.id == id]
    return spec.function(context)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.fixture
def elsewhere(tmp_path: Path, site: Path, make_context: MakeContext) -> Callable[..., Context]:
    """The context of --python with an interpreter whose packages are those in `site`."""

    def make(**options: Any) -> Context:
        executable = environments.interpreter(tmp_path, Path(sys.executable), site)
        return make_context("device=cpu", python=str(executable), **options)

    return make


def own(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Context:
    """The context of a run in this interpreter, whose environment the probe is made to see differently."""
    context = make_context("device=cpu")
    found = environment_module.read_environment(context)
    changed = dataclasses.replace(found, **changes)
    monkeypatch.setattr(software, "read_environment", lambda _: changed)
    return context


def packages(**versions: str) -> dict[str, dict[str, Any]]:
    return {name.replace("_", "-"): {"version": v, "where": "", "cuda": None} for name, v in versions.items()}


# the interpreter


def test_this_interpreter(make_context: MakeContext) -> None:
    context = make_context("device=cpu")
    outcomes = {spec.id: spec.function(context).status for spec in software.CHECKS}
    assert outcomes["SOFT001"] == outcomes["SOFT002"] == outcomes["SOFT003"] == CheckStatus.PASS
    assert outcomes["SOFT005"] == outcomes["SOFT008"] == CheckStatus.PASS
    assert CheckStatus.FAIL not in outcomes.values()


def test_a_python_that_is_too_new_for_the_bundled_engine(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = judge(own(make_context, monkeypatch, python="3.13.0"), "SOFT001")
    assert outcome.status == CheckStatus.FAIL
    assert "3.13.0" in outcome.found


@pytest.mark.parametrize("name", ["absent", "folder", "not executable", "another program", "silent"])
def test_python_that_is_none(tmp_path: Path, make_context: MakeContext, name: str) -> None:
    path = tmp_path / "python"
    if name == "folder":
        path.mkdir()
    elif name != "absent":
        path.write_text({"another program": "#!/bin/sh\necho hello\n", "silent": "#!/bin/sh\nexit 3\n"}.get(name, ""))
        path.chmod(0o644 if name == "not executable" else 0o755)
    context = make_context("device=cpu", python=str(path))
    assert judge(context, "SOFT001").status == CheckStatus.FAIL
    others = [spec.function(context).status for spec in software.CHECKS[1:]]
    assert set(others) == {CheckStatus.SKIP}


def test_a_python_that_hangs_is_ended(tmp_path: Path, make_context: MakeContext) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nsleep 60\n")
    path.chmod(0o755)
    outcome = judge(make_context(python=str(path), timeout=0.3), "SOFT001")
    assert outcome.status == CheckStatus.FAIL
    assert "did not answer" in outcome.found


# torch


@pytest.mark.parametrize(
    ("version", "status"), [("1.12.1+cu113", "pass"), ("1.6.0", "pass"), ("1.5.1", "fail"), (None, "fail")]
)
def test_torch_of_another_environment(
    site: Path, elsewhere: Callable[..., Context], version: str | None, status: str
) -> None:
    site.mkdir()
    if version:
        environments.torch(site, version)
    outcome = judge(elsewhere(), "SOFT002")
    assert outcome.status == status
    assert (version or "not installed") in outcome.found


def test_torch_for_cpus_beside_a_gpu(
    site: Path, elsewhere: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.torch(site, "2.1.0+cpu", cuda=None)
    monkeypatch.setattr(nvml, "device_traces", lambda: ["/dev/nvidiactl"])
    context = dataclasses.replace(elsewhere(), device="auto")
    assert judge(context, "SOFT002").status == CheckStatus.WARN
    assert judge(dataclasses.replace(context, device="cpu"), "SOFT002").status == CheckStatus.PASS


@pytest.mark.parametrize(("version", "status"), [("2.4.0", "pass"), ("2.3.1", "fail")])
def test_torch_of_the_bundled_engine(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    changed = own(make_context, monkeypatch, torch={"version": version, "cuda": "12.1", "hip": None})
    assert judge(changed, "SOFT002").status == status


def test_torch_that_does_not_import(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.torch(site, "2.1.0")
    assert judge(elsewhere(), "SOFT003").status == CheckStatus.PASS
    (site / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    outcome = judge(elsewhere(), "SOFT003")
    assert outcome.status == CheckStatus.FAIL
    assert "libcudart.so.12" in outcome.found


def test_our_own_torch_does_not_import(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = judge(make_context("device=cpu"), "SOFT003")
    assert outcome.status == CheckStatus.FAIL
    assert "torch" in outcome.found


# the OpenMMLab stack


def test_the_classic_stack(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.legacy(site)
    context = elsewhere()
    outcomes = {spec.id: spec.function(context) for spec in software.CHECKS}
    others = {id: o.status for id, o in outcomes.items() if o.status != CheckStatus.PASS}
    assert others == {"SOFT005": CheckStatus.WARN, "SOFT007": CheckStatus.SKIP}
    for words in ("mmdet3d 1.0.0rc6 on Python 3.1", "mmcv-full 1.7.0"):  # the stub's interpreter is this one
        assert words in outcomes["SOFT005"].found + outcomes["SOFT004"].found
    assert "mmdet 2.28.2" not in outcomes["SOFT005"].found
    assert outcomes["SOFT004"].found == "mmcv-full 1.7.0"
    assert "mmcv._ext" in outcomes["SOFT006"].found


@pytest.mark.parametrize(
    ("flavours", "status"),
    [
        (("mmcv-full",), "pass"),
        (("mmcv", "mmcv-full"), "fail"),
        (("mmcv", "mmcv-lite"), "fail"),
        (("mmcv-lite",), "fail"),
        (("mmcv",), "fail"),  # 1.7 without "full" has no operators
        ((), "fail"),
    ],
)
def test_one_mmcv(site: Path, elsewhere: Callable[..., Context], flavours: tuple[str, ...], status: str) -> None:
    environments.distribution(site, "mmdet3d", "1.0.0rc6")
    for name in flavours:
        environments.distribution(site, name, "1.7.0")
    outcome = judge(elsewhere(), "SOFT004")
    assert outcome.status == status
    assert all(name in outcome.found for name in flavours)


def test_mmcv_that_nothing_needs(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.torch(site, "1.12.1")
    assert judge(elsewhere(), "SOFT004").status == CheckStatus.SKIP


def test_mmcv_of_a_foreign_config_is_required(tmp_path: Path, site: Path, elsewhere: Callable[..., Context]) -> None:
    path = tmp_path / "config.py"
    path.write_text("data = dict()\n")
    environments.torch(site, "1.12.1")
    context = dataclasses.replace(elsewhere(), config=None, foreign=read_foreign(path))
    assert judge(context, "SOFT004").status == CheckStatus.FAIL


def test_both_mmcv_beside_the_bundled_engine_stop_nothing(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = packages(torch="2.14.1", numpy="1.26.4", mmcv="1.7.0", mmcv_full="1.7.0", mmdet3d="1.4.0")
    context = own(make_context, monkeypatch, packages=both)
    assert judge(context, "SOFT004").status == CheckStatus.WARN
    assert judge(context, "SOFT005").status == CheckStatus.WARN
    assert judge(context, "SOFT006").status == CheckStatus.SKIP


def test_numpy_too_new_for_torch_concerns_every_run(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    context = own(make_context, monkeypatch, packages=packages(torch="2.2.0", numpy="2.0.0"))
    assert judge(context, "SOFT005").status == CheckStatus.FAIL


def test_versions_that_do_not_fit(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.legacy(site)
    environments.distribution(site, "mmengine", "0.10.7", "mmengine")
    outcome = judge(elsewhere(), "SOFT005")
    assert outcome.status == CheckStatus.FAIL  # no pkg_resources in that environment
    assert "mmengine 0.10.7 without pkg_resources" in outcome.found
    assert "setuptools<81" in outcome.fix


@pytest.mark.parametrize(
    ("extension", "status", "words"),
    [
        ("", "pass", "mmcv._ext"),
        (environments.EXTENSION_ABSENT, "fail", "compiled for another torch"),
        ("raise ModuleNotFoundError(\"No module named 'mmcv._ext'\")", "fail", "pip install mmcv-full==1.7.0 -f"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)", "fail", "signal 6"),
        ("import time\ntime.sleep(60)", "unknown", "mmcv._ext"),
    ],
)
def test_operators_import(
    site: Path, elsewhere: Callable[..., Context], extension: str, status: str, words: str
) -> None:
    environments.legacy(site, extension)
    outcome = judge(elsewhere(timeout=2.5 if status == "unknown" else 60.0), "SOFT006")
    assert outcome.status == status
    assert words in outcome.found + outcome.fix


# kernels


class _Gpus:
    """What looking for GPUs gives: one V100S."""

    used = (nvml.Gpu(0, "GPU-0", "Tesla V100S-PCIE-32GB", capability=(7, 0)),)


@pytest.mark.parametrize(
    ("architectures", "status"),
    [([(2, 70), (2, 75)], "pass"), ([(2, 75), (2, 86)], "fail"), ([(1, 60)], "pass"), ([], "skip")],
)
def test_kernels_for_the_card(
    site: Path,
    elsewhere: Callable[..., Context],
    monkeypatch: pytest.MonkeyPatch,
    architectures: list[tuple[int, int]],
    status: str,
) -> None:
    environments.legacy(site)
    environments.library_with_kernels(site / "mmdet3d" / "ops" / "bev_pool" / "bev_pool_ext.so", *architectures)
    monkeypatch.setattr(software, "gpus_in_use", lambda _: _Gpus())
    outcome = judge(elsewhere(), "SOFT007")
    assert outcome.status == status
    if status == "fail":
        assert "Tesla V100S-PCIE-32GB is sm_70" in outcome.found


def test_operators_built_with_another_cuda(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.legacy(site)
    environments.library_with_kernels(site / "mmcv" / "_ext.so", (2, 70))
    (site / "mmcv" / "ops" / "__init__.py").write_text("def get_compiling_cuda_version():\n    return '10.2'\n")
    outcome = judge(elsewhere(), "SOFT007")
    assert outcome.status == CheckStatus.FAIL
    assert "built with CUDA 10.2" in outcome.found


def test_spconv_wheels_that_are_older_than_the_card(
    site: Path, elsewhere: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.distribution(site, "spconv-cu118", "2.3.6", "spconv.pytorch")
    monkeypatch.setattr(software, "gpus_in_use", lambda _: _Gpus())
    assert judge(elsewhere(), "SOFT007").status == CheckStatus.PASS
    newest = nvml.Gpu(0, "GPU-0", "RTX 5090", capability=(12, 0))
    monkeypatch.setattr(_Gpus, "used", (newest,))
    outcome = judge(elsewhere(), "SOFT007")
    assert outcome.status == CheckStatus.FAIL
    assert "RTX 5090 has 12.0" in outcome.found


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_70"], (7, 0), True),
        (["sm_70"], (7, 5), True),
        (["sm_75"], (7, 0), False),
        (["sm_70"], (8, 0), False),
        (["compute_70"], (8, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_100", "sm_120"], (12, 0), True),
        ([], (8, 0), False),
    ],
)
def test_runs_on(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert software.runs_on(architectures, *capability) is runs


# numpy and the devkit


def test_data_packages(site: Path, elsewhere: Callable[..., Context]) -> None:
    environments.legacy(site)
    assert judge(elsewhere(), "SOFT008").status == CheckStatus.PASS


def test_data_packages_that_are_missing(
    site: Path, elsewhere: Callable[..., Context], make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.distribution(site, "numpy", "1.23.5")
    assert judge(elsewhere(), "SOFT008").status == CheckStatus.WARN
    context = own(make_context, monkeypatch, packages=packages(torch="2.14.1", numpy="1.26.4"))
    assert judge(context, "SOFT008").status == CheckStatus.FAIL


# an environment that is all real

LEGACY_PYTHON = os.environ.get("BEVCTL_TEST_LEGACY_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(LEGACY_PYTHON is None, reason="BEVCTL_TEST_LEGACY_PYTHON names no Python with the classic stack")
def test_a_real_legacy_environment(make_context: MakeContext) -> None:
    """Python 3.8 with torch 1.12.1, mmcv-full 1.7.0, mmdet 2.28.2 and mmdet3d 1.0.0rc6."""
    context = make_context("device=cpu", python=LEGACY_PYTHON, timeout=120.0)
    outcomes = {spec.id: spec.function(context) for spec in software.CHECKS}
    assert "torch 1.12.1" in outcomes["SOFT002"].found
    assert outcomes["SOFT004"].found == "mmcv-full 1.7.0"
    assert outcomes["SOFT006"].found == "imports: mmcv, mmcv._ext, mmdet, mmdet3d, mmdet3d.ops"
    assert {outcome.status for outcome in outcomes.values()} <= {CheckStatus.PASS, CheckStatus.SKIP}
