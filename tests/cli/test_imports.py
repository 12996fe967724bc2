"""What the command line imports before there is tensor work to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bevctl.cli.main import COMMANDS

HEAVY = ("torch", "numpy", "scipy", "triton", "timm", "torchvision", "PIL", "nuscenes", "matplotlib", "yaml")

SCRIPT = """
import contextlib, io, json, sys
from bevctl.cli.main import run
with contextlib.redirect_stdout(io.StringIO()):
    code = run(sys.argv[1:])
print(json.dumps([code, sorted(name for name in {heavy!r} if name in sys.modules)]))
"""


def imported(*arguments: str, ends: int = 0) -> list[str]:
    """Which of HEAVY a command line that ends with exit code `ends` has imported."""
    script = SCRIPT.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    code, names = json.loads(done.stdout.splitlines()[-1])
    assert code == ends, done.stderr
    return list(names)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), *[(name, "--help") for name in COMMANDS]])
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert imported(*arguments) == []


def test_resolving_a_config_imports_yaml_alone() -> None:
    assert imported("config", "show", "tiny") == ["yaml"]


@pytest.mark.parametrize("command", [("train",), ("eval", "--checkpoint", "none.pth"), ("memory",), ("bench",)])
def test_a_misspelt_config_is_told_before_anything_heavy_is_imported(command: tuple[str, ...]) -> None:
    assert imported(*command, "tinny", ends=2) == ["yaml"]


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys; before = set(sys.modules); import bevctl; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['bevctl']"
