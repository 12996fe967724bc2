"""`bevctl train --engine external` from the command line: what it refuses, what --dry-run shows, its codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.errors import ExitCode
from tests.conftest import Outcome
from tests.external import fakes, trees

Invoke = Callable[..., Outcome]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkout, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    fakes.tree(tmp_path)
    return tmp_path


def external(invoke: Invoke, *words: str) -> Outcome:
    return invoke("train", "tree/configs/tiny.py", "--engine", "external", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compile"], "--compile is nothing that --engine external can tell"),
        (["--max-iters", "5"], "--max-iters is nothing"),
        (["--nnodes", "2"], "--nnodes is nothing"),
        (["--python", "absent"], "--python absent cannot be run"),
        (["--repo", "absent"], "absent is no folder"),
        (["--repo", "."], "There is no tools/train.py in"),
        (["--bf16"], "has no BF16"),
        (["--resume", "absent.pth"], "There is no checkpoint absent.pth"),
        (["--load-from", "a.pth", "--load-from", "b.pth"], "takes one file"),
        (["--lr", "0.1", "--lr-scaling", "sqrt"], "contradict each other"),
        (["--batch", "0"], "--batch 0 is below 1"),
        (["--engine", "extrnal"], "'extrnal' is not one of"),
        (["--work-dir", "tree"], "is not empty"),
    ],
)
def test_what_is_refused(here: Path, invoke: Invoke, words: list[str], said: str) -> None:
    outcome = external(invoke, *words, "--dry-run", "--json")
    assert outcome.code == ExitCode.USAGE
    assert said in outcome.document["error"]["message"]
    assert not (here / "runs").exists()


def test_configs_that_it_cannot_take(here: Path, invoke: Invoke) -> None:
    train = ["train", "--engine", "external"]
    assert "needs CONFIG" in invoke(*train).err
    assert "Config file absent.py does not exist" in invoke(*train, "absent.py").err
    trees.write(here / "own.yaml", "train: {batch: 1}\n")
    assert "own.yaml is no config of another project" in invoke(*train, "own.yaml", "--repo", "tree").err
    trees.write(here / "code.py", "model = __import__('os')\n")
    assert "the config runs code" in invoke(*train, "code.py", "--repo", "tree").err
    trees.write(here / "alone.py", "model = dict()\n")
    assert "Name the project's checkout with --repo" in invoke(*train, "alone.py").err


@pytest.mark.usefixtures("here")
def test_options_that_belong_to_it(invoke: Invoke) -> None:
    outcome = invoke("train", "tiny", "--python", sys.executable)
    assert (outcome.code, "--python belongs to --engine external" in outcome.err) == (ExitCode.USAGE, True)
    assert "external has the project's own program train it" in invoke("train", "tree/configs/tiny.py").err


def test_dry_run_shows_everything_and_does_nothing(here: Path, invoke: Invoke) -> None:
    words = ["--batch", "4", "--lr-scaling", "linear", "--set", "mode=fine", "--dry-run"]
    document = external(invoke, *words, "--json").document
    assert document["tree"] == {"kind": "mmdet3d-0.x", "path": str(here / "tree")}
    assert document["launcher"] == "none"
    overlay = here / "runs" / "tiny" / "bevctl" / "tiny.py"
    told = [str(overlay), "--work-dir", str(here / "runs" / "tiny"), "--launcher", "none"]
    assert document["argv"][1:] == ["tools/train.py", *told, "--cfg-options", "mode=fine"]
    assert document["overlay"]["path"] == str(overlay)
    assert "optimizer = dict(lr=5e-05)" in document["overlay"]["text"]
    assert document["cwd"] == str(here / "tree")
    assert document["environment"]["PYTHONPATH"].startswith(str(here / "tree"))
    assert not (here / "runs").exists()
    text = external(invoke, *words).out
    assert "would be written" in text
    assert f"cd {here / 'tree'}\n" in text
    assert "export PYTHONUNBUFFERED=1\n" in text


@pytest.mark.usefixtures("here")
def test_a_config_inside_the_checkout_may_be_named_from_there(invoke: Invoke) -> None:
    words = ["train", "configs/tiny.py", "--engine", "external", "--repo", "tree", "--dry-run", "--json"]
    assert invoke(*words).document["argv"][2] == "configs/tiny.py"


def test_preflight_stops_it(here: Path, invoke: Invoke) -> None:
    """The interpreter of these tests has no mmcv."""
    outcome = external(invoke, "--set", "mode=fine", "--device", "cpu")
    assert outcome.code == ExitCode.FINDINGS
    assert "Preflight stopped the run: SOFT004" in outcome.err
    assert not (here / "runs").exists()


def test_a_run_and_its_document(here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bevctl.external.run._pause", lambda *_: True)
    outcome = external(invoke, "--set", "mode=once", "--max-restarts", "1", "--no-preflight", "--json", "-q")
    assert outcome.code == ExitCode.OK
    document = outcome.document
    assert (document["status"], document["restarts"]) == ("ok", 1)
    assert document["checkpoint"] == str(here / "runs" / "tiny" / "epoch_2.pth")
    assert "Epoch [" not in outcome.err
    assert external(invoke, "--set", "mode=fine", "--no-preflight").code == ExitCode.USAGE, "the folder is not empty"
    again = external(invoke, "--set", "mode=fine", "--set", "epochs=3", "--no-preflight", "--resume", "epoch_2.pth")
    assert again.code == ExitCode.OK
    assert again.err.count("Epoch [3]") == 4


@pytest.mark.usefixtures("here")
def test_failing_codes(invoke: Invoke) -> None:
    for mode, code in (("nan", ExitCode.NONFINITE), ("startup", ExitCode.RUN_FAILED)):
        outcome = external(invoke, "--set", f"mode={mode}", "--no-preflight", "--work-dir", mode, "--json")
        assert outcome.code == outcome.document["error"]["code"] == code
