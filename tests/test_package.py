"""The package as it is installed."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bevctl

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built in a copy with the setuptools at hand."""
    pytest.importorskip(
        "setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer to build without network"
    )
    source = tmp_path_factory.mktemp("source")
    for name in ("bevctl", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, target], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


def test_every_folder_of_code_is_packaged(metadata: configparser.ConfigParser) -> None:
    listed = {name.strip() for name in metadata["options"]["packages"].split(",")}
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "bevctl").rglob("*.py")}
    assert listed == folders | {"bevctl.configs"}


def test_the_extras_exist(metadata: configparser.ConfigParser) -> None:
    assert {"timm", "test"} <= set(metadata["options.extras_require"])


def test_the_wheel_holds_configs_licence_and_the_program(wheel: Path) -> None:
    assert wheel.name == f"bevctl-{bevctl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"bevctl-{bevctl.__version__}.dist-info/entry_points.txt").decode()
    assert {f"bevctl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} <= names
    assert "bevctl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)
    assert "bevctl = bevctl.cli.main:main" in entry_points


def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "bevctl", "config", "show", "bevfusion_lidar", "--origin"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# site/bevctl/configs/bevfusion_det.yaml:" in done.stdout


def test_the_readme_gives_the_two_commands_of_a_new_machine() -> None:
    commands = re.findall(r"^pip install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert any(command.endswith("&& bevctl quickstart") for command in commands)
    tests = [command for command in commands if command.endswith("&& pytest")]
    assert len(tests) == 1
    assert "[test]" in tests[0]


def test_the_check_stops_where_the_readme_gives_no_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text("pip install bevctl\n")
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "README.md holds no line" in done.stderr


def test_the_changelog_knows_this_version() -> None:
    assert f"\n## {bevctl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
