"""The result file is one that the devkit loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from nuscenes.eval.common.loaders import load_prediction
from nuscenes.eval.detection.data_classes import DetectionBox

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.schema import ModelConfig
from bevctl.evaluate.boxes import lidar_to_global
from bevctl.evaluate.submission import submission, write_submission
from tests.evaluate import scenes


def test_the_devkit_loads_what_is_written(tmp_path: Path) -> None:
    keyframes = scenes.samples(2)
    content = submission({"sample0": scenes.perfect(keyframes[0])}, keyframes, OBJECT_CLASSES, ModelConfig())
    path = tmp_path / "results.json"
    write_submission(path, content)
    boxes, meta = load_prediction(str(path), 500, DetectionBox)
    assert set(boxes.sample_tokens) == {"sample0", "sample1"}
    assert boxes["sample1"] == []
    assert meta == {
        "use_camera": True,
        "use_lidar": True,
        "use_radar": False,
        "use_map": False,
        "use_external": False,
    }
    centres, _, velocities = lidar_to_global(scenes.perfect(keyframes[0]).boxes, keyframes[0])
    first = boxes["sample0"][0]
    assert first.detection_name == "car"
    assert first.attribute_name == "vehicle.moving"
    assert first.translation == pytest.approx(centres[0])
    assert first.velocity == pytest.approx(velocities[0])
    assert first.size == pytest.approx((1.9, 4.0, 1.6))


def test_meta_names_the_sensors_that_the_model_reads() -> None:
    model = ModelConfig(camera=None)
    assert submission({}, [], OBJECT_CLASSES, model)["meta"]["use_camera"] is False
    assert submission({}, [], OBJECT_CLASSES, model)["meta"]["use_lidar"] is True
