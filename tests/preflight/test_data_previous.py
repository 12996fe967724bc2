"""The check of images of an earlier moment, on a small synthetic set and on copies of it that are spoilt."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bevctl.config.schema import PreviousFrameConfig
from bevctl.finding import CheckStatus
from bevctl.preflight.checks import Context
from bevctl.preflight.data_previous import earlier_images

from .conftest import MakeContext

KEYFRAMES = PreviousFrameConfig(source="keyframes", train=(0, 1), eval=0)


@pytest.fixture
def root(synth_root: Path, tmp_path: Path) -> Path:
    """Two scenes of three keyframes to train on and one held out; a copy that a test may spoil."""
    return shutil.copytree(synth_root, tmp_path / "data", symlinks=True)


def _context(make_context: MakeContext, root: Path, previous: PreviousFrameConfig | None = KEYFRAMES) -> Context:
    context = make_context(f"data.root={root}", "device=cpu")
    assert context.config is not None
    data = dataclasses.replace(context.config.data, previous=previous)
    return dataclasses.replace(context, config=dataclasses.replace(context.config, data=data))


def _changed(path: Path, change: Any) -> None:
    document = pickle.loads(path.read_bytes())
    for sample in document["data_list"]:
        change(sample)
    path.write_bytes(pickle.dumps(document))


def test_a_complete_set_passes(root: Path, make_context: MakeContext) -> None:
    outcome = earlier_images(_context(make_context, root))
    assert outcome.status == CheckStatus.PASS
    assert outcome.found == "train: 4 of 6 samples, up to 2 moments each; val: 2 of 3 samples, up to 2 moments each"


def test_a_model_of_one_moment_needs_nothing(root: Path, make_context: MakeContext) -> None:
    assert earlier_images(_context(make_context, root, None)).status == CheckStatus.SKIP


def test_keyframes_that_stand_in_are_told(root: Path, make_context: MakeContext) -> None:
    outcome = earlier_images(_context(make_context, root, PreviousFrameConfig()))
    assert outcome.status == CheckStatus.WARN
    assert "train: keyframes stand in for camera sweeps" in outcome.found
    assert "data prepare" in outcome.fix


def test_a_range_beyond_what_is_stored_is_told(root: Path, make_context: MakeContext) -> None:
    outcome = earlier_images(_context(make_context, root, dataclasses.replace(KEYFRAMES, train=(1, 4))))
    assert outcome.status == CheckStatus.WARN
    assert "goes back to place 4, the last one is 1" in outcome.found


def test_single_frames_fail(root: Path, make_context: MakeContext) -> None:
    _changed(root / "synth_infos_val.pkl", lambda sample: sample.update(scene_token=sample["token"]))
    outcome = earlier_images(_context(make_context, root))
    assert outcome.status == CheckStatus.FAIL
    assert outcome.found == "val: no sample has images of an earlier moment"


def test_a_missing_earlier_image_fails(root: Path, make_context: MakeContext) -> None:
    for path in (root / "samples" / "CAM_BACK").glob("*.jpg"):
        path.unlink()
    outcome = earlier_images(_context(make_context, root))
    assert outcome.status == CheckStatus.FAIL
    assert "CAM_BACK file" in outcome.found
    assert "data check" in outcome.fix
    assert "keyframes" not in outcome.fix  # it takes them already


def test_poses_that_put_boxes_elsewhere_fail(root: Path, make_context: MakeContext) -> None:
    """By the poses of every other keyframe the car stands on its nose."""

    def turn(sample: dict[str, Any]) -> None:
        if sample["sample_idx"] % 2:
            nose_down = np.array([[0.0, 0, 1, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1]])
            sample["ego2global"] = (np.asarray(sample["ego2global"]) @ nose_down).tolist()

    for name in ("synth_infos_train.pkl", "synth_infos_val.pkl"):
        _changed(root / name, turn)
    outcome = earlier_images(_context(make_context, root))
    assert outcome.status == CheckStatus.FAIL
    assert "boxes land in an earlier image" in outcome.found


def test_times_that_run_backwards_fail(root: Path, make_context: MakeContext) -> None:
    def later(sample: dict[str, Any]) -> None:
        for image in sample["images"].values():
            image["timestamp"] += 100.0

    _changed(root / "synth_infos_train.pkl", later)
    outcome = earlier_images(_context(make_context, root))
    assert outcome.status == CheckStatus.FAIL
    assert "is not earlier" in outcome.found
