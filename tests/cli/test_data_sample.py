"""`bevctl data show` and `bench` on a very small synthetic set."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bevctl.errors import ExitCode
from tests.conftest import Outcome

Invoke = Callable[..., Outcome]


@pytest.fixture
def sets(synth_root: Path) -> tuple[str, ...]:
    return ("tiny", "--set", f"data.root={synth_root}")


def test_show_draws_a_sample(tmp_path: Path, sets: tuple[str, ...], invoke: Invoke) -> None:
    path = tmp_path / "a" / "sample.png"
    outcome = invoke("data", "show", *sets, "--index", "2", "--epoch", "3", "-o", path, "--json")
    assert outcome.code == ExitCode.OK
    document = outcome.document
    assert (document["action"], document["split"], document["index"], document["epoch"]) == ("show", "train", 2, 3)
    assert document["boxes"] > 5
    assert "augment space" in document["steps"]
    picture = np.asarray(Image.open(path))
    assert picture.shape[1] == 1920
    again = tmp_path / "again.png"
    by_token = invoke("data", "show", *sets, "--token", document["token"], "--epoch", "3", "-o", again)
    assert by_token.code == ExitCode.OK
    assert document["token"] in by_token.out
    np.testing.assert_array_equal(np.asarray(Image.open(again)), picture)


def test_show_of_evaluation_augments_nothing(
    tmp_path: Path, sets: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke("data", "show", *sets, "--split", "val", "--json")
    assert "augment space" not in outcome.document["steps"]
    assert (tmp_path / f"{outcome.document['token']}.png").is_file()


def test_show_without_cameras_or_map(tmp_path: Path, sets: tuple[str, ...], invoke: Invoke) -> None:
    bare = ("--set", "model.camera=null", "--set", "model.map=null")
    assert invoke("data", "show", *sets, *bare, "-o", tmp_path / "a.png").code == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--index", "6"), "There is no sample 6"),
        (("--token", "elsewhere"), "There is no sample elsewhere"),
        (("--token", "a", "--index", "1"), "both name a sample"),
    ],
)
def test_a_sample_that_is_not_there(
    sets: tuple[str, ...], invoke: Invoke, arguments: tuple[str, ...], message: str
) -> None:
    outcome = invoke("data", "show", *sets, *arguments)
    assert outcome.code == ExitCode.USAGE
    assert message in outcome.err


def test_files_that_are_gone(synth_root: Path, tmp_path: Path, invoke: Invoke) -> None:
    root = shutil.copytree(synth_root, tmp_path / "data", symlinks=True)
    shutil.rmtree(root / "samples" / "CAM_BACK")
    for arguments in (("show", "--split", "val", "-o", str(tmp_path / "a.png")), ("bench", "--samples", "2")):
        outcome = invoke("data", arguments[0], "tiny", "--set", f"data.root={root}", *arguments[1:])
        assert outcome.code == ExitCode.RUN_FAILED
        assert "CAM_BACK" in outcome.err
    assert not (tmp_path / "a.png").exists()


def test_bench_times_every_step(sets: tuple[str, ...], invoke: Invoke) -> None:
    outcome = invoke("data", "bench", *sets, "--samples", "3", "--workers", "2", "--json")
    assert outcome.code == ExitCode.OK
    document = outcome.document
    assert (document["action"], document["samples"], document["workers"]) == ("bench", 3, 2)
    names = [stage["name"] for stage in document["stages"]]
    assert names == [
        "read images",
        "read points",
        "decode and augment images",
        "augment space",
        "crop to range",
        "shuffle points",
        "draw map",
        "stack into a batch",
    ]
    total = document["total"]
    assert total["cpu_s"] == pytest.approx(sum(stage["cpu_s"] for stage in document["stages"]))
    assert total["samples_per_s"] == pytest.approx(1 / total["cpu_s"])
    text = invoke("data", "bench", *sets, "--samples", "1", "--split", "val")
    assert "samples/s" in text.out
    assert "augment space" not in text.out
