"""The probe, in process and run by the Pythons that are here, old ones too."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bevctl.preflight import probe

from . import environments

PYTHONS = {name: Path.home() / ".pyenv" / "versions" for name in ("3.6.15", "3.8.18", "3.13.0")}


def run(executable: Path | str, *options: str) -> dict[str, Any]:
    command = [str(executable), probe.__file__, *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in process.stdout.splitlines() if line.startswith(probe.MARK)]
    document: dict[str, Any] = json.loads(line[len(probe.MARK) :])
    return document


def old_python(version: str) -> Path:
    path = PYTHONS[version] / version / "bin" / "python"
    if not path.is_file():
        pytest.skip(f"no Python {version} in {PYTHONS[version]}")
    return path


@pytest.mark.parametrize("version", PYTHONS)
def test_it_runs_under_old_and_new_pythons(tmp_path: Path, version: str) -> None:
    environments.legacy(tmp_path / "site")
    document = run(environments.interpreter(tmp_path, old_python(version), tmp_path / "site"), "--timeout", "20")
    assert document["python"]["version"] == version
    assert {name: package["version"] for name, package in document["packages"].items()} == {
        "torch": "1.12.1",
        "numpy": "1.23.5",
        "mmcv-full": "1.7.0",
        "mmdet": "2.28.2",
        "mmsegmentation": "0.30.0",
        "mmdet3d": "1.0.0rc6",
        "nuscenes-devkit": "1.1.9",
    }
    assert document["torch"] == {"version": "1.12.1+cu113", "cuda": "11.3", "hip": None}
    assert document["imports"]["torch"]["arch_list"] == ["sm_70", "sm_75"]
    assert document["imports"]["mmcv._ext"]["compiling_cuda"] == "11.3"
    assert all(outcome["ok"] for outcome in document["imports"].values())
    assert set(document["imports"]) == {"torch", "mmcv", "mmcv._ext", "mmdet", "mmdet3d", "mmdet3d.ops"}


def test_its_syntax_is_that_of_python_3_6() -> None:
    ast.parse(Path(probe.__file__).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("source", "ok", "said"),
    [
        ("", True, None),
        ("raise ImportError('undefined symbol: x')", False, "ImportError: undefined symbol: x"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", False, "ended by signal 11"),
        ("import time\ntime.sleep(60)", None, "no answer within 1 s"),
        ("import sys\nsys.exit(3)", False, "exit code 3"),
        ("print('BEVCTL_PROBE not json')", True, None),
    ],
)
def test_imports(tmp_path: Path, source: str, ok: bool | None, said: str | None) -> None:
    environments.package(tmp_path, "stub", source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stub"
    assert probe.try_import(code, 1.0 if ok is None else 30.0) == {"ok": ok, "error": said}


def test_a_folder_of_the_working_directory_does_not_count_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.package(tmp_path, "stub_of_the_working_directory")
    monkeypatch.chdir(tmp_path)
    assert probe.try_import("import stub_of_the_working_directory", 30.0)["ok"] is False


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    environments.distribution(tmp_path, "spconv-cu120", "2.3.6")
    (tmp_path / "mmdet3d-0.17.1.egg-info").mkdir()
    (tmp_path / "mmdet3d-0.17.1.egg-info" / "PKG-INFO").write_text("Name: mmdet3d\nVersion: 0.17.1\n")
    (tmp_path / "torchpack-0.3.1-py3.8.egg-info").write_text("Metadata-Version: 1.0\nName: torchpack\nVersion: 0.3.1\n")
    (tmp_path / "numba-0.53.0.dist-info").mkdir()
    (tmp_path / "mmengine-0.10.7.dist-info").mkdir()
    (tmp_path / "mmengine-0.10.7.dist-info" / "METADATA").mkdir()
    (tmp_path / "other-1.0.dist-info").mkdir()
    found = probe.installed([str(tmp_path), str(tmp_path / "absent")])
    assert {name: (package["version"], package["cuda"]) for name, package in found.items()} == {
        "spconv": ("2.3.6", "12.0"),
        "mmdet3d": ("0.17.1", None),
        "torchpack": ("0.3.1", None),
        "numba": ("0.53.0", None),
        "mmengine": ("0.10.7", None),
    }


def test_the_first_folder_of_the_path_counts(tmp_path: Path) -> None:
    for folder, version in (("a", "1.4.0"), ("b", "2.1.0")):
        environments.distribution(tmp_path / folder, "mmcv", version)
    found = probe.installed([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found["mmcv"]["version"] == "1.4.0"


def test_kernels_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "mmcv" / "_ext.cpython-38-x86_64-linux-gnu.so"
    environments.library_with_kernels(library, (2, 70), (2, 75), (1, 86))
    assert probe.architectures(str(library)) == ["compute_86", "sm_70", "sm_75"]
    assert probe.compiled_architectures([str(tmp_path)]) == {
        "mmcv/_ext.cpython-38-x86_64-linux-gnu.so": ["compute_86", "sm_70", "sm_75"]
    }


@pytest.mark.parametrize("data", [b"", b"\x50\xed\x55\xba", b"\x50\xed\x55\xba" * 50, bytes(2000)])
def test_a_library_without_kernels(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    assert probe.architectures(str(path)) == []
    assert probe.architectures(str(tmp_path / "absent.so")) == []


def test_without_imports_nothing_is_imported(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    environments.torch(tmp_path / "site", "2.0.0")
    (tmp_path / "site" / "torch" / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\n")
    executable = environments.interpreter(tmp_path, Path(sys.executable), tmp_path / "site")
    assert run(executable, "--no-imports")["imports"] == {}
    assert not mark.exists()
