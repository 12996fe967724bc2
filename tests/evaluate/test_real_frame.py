"""One real nuScenes frame: its tilted sensor, its boxes, its images."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.schema import Config
from bevctl.data.index import SampleInfo, read_info
from bevctl.evaluate.detection import evaluate_detection, recall_within
from bevctl.evaluate.results import Objects, SampleResult
from bevctl.evaluate.run import Evaluation
from bevctl.evaluate.show import chosen_predictions, write_pictures
from tests.models.nano import with_value

CONFIG = Config()


@pytest.fixture(scope="module")
def frame(shared: Path) -> SampleInfo:
    path = next((shared / "nuscenes_frame").glob("*.pkl"))
    return read_info(path).samples[0]


def as_predictions(frame: SampleInfo, min_points: int = 0) -> Objects:
    """The frame's boxes as predictions."""
    assert frame.boxes is not None
    kept = [i for i, name in enumerate(frame.names) if name in OBJECT_CLASSES and frame.num_lidar_pts[i] >= min_points]
    labels = np.array([OBJECT_CLASSES.index(frame.names[i]) for i in kept], dtype=np.int64)
    boxes = np.nan_to_num(frame.boxes[kept]).astype(np.float32)
    return Objects(boxes, np.linspace(0.9, 0.5, len(kept), dtype=np.float32), labels)


def test_annotations_as_predictions_are_perfect(frame: SampleInfo) -> None:
    result = evaluate_detection({frame.token: as_predictions(frame)}, [frame], OBJECT_CLASSES, None)
    present = {name for name, row in result.per_class.items() if row["ground_truth"]}
    assert {"car", "truck", "pedestrian", "barrier", "traffic_cone"} <= present
    for name in present:
        # Boxes without a point are no ground truth but stay predictions: they may cost a little precision.
        assert (result.per_class[name]["AP_0.5"] or 0) > 0.85, name
        assert result.per_class[name]["ATE"] == pytest.approx(0, abs=1e-3)
        assert result.per_class[name]["ASE"] == pytest.approx(0, abs=1e-3)


def test_recall_is_over_the_26_boxes_with_points_in_range(frame: SampleInfo) -> None:
    found = as_predictions(frame, min_points=5)
    limits = CONFIG.model.point_cloud_range

    def recall(objects: Objects) -> float | None:
        return recall_within({frame.token: objects}, [frame], OBJECT_CLASSES, limits)

    assert recall(found) == 1.0
    only = np.flatnonzero(found.labels == OBJECT_CLASSES.index("truck"))[:1]
    one = Objects(found.boxes[only], found.scores[only], found.labels[only])
    assert recall(one) == pytest.approx(1 / 26)


def test_a_picture_is_drawn_from_the_files(frame: SampleInfo, shared: Path, tmp_path: Path) -> None:
    config = with_value(CONFIG, "data.root", str(shared / "nuscenes_frame"))
    result = SampleResult(frame.token, as_predictions(frame))
    unread = dataclasses.replace(frame, token="unread")
    evaluation = Evaluation(None, None, None, 1, 1, (), {frame.token: result})
    assert list(write_pictures(tmp_path / "out", evaluation, [frame, unread], config)) == [
        tmp_path / "out" / f"{frame.token}.png"
    ]


def test_weak_predictions_are_drawn_where_there_are_no_others(frame: SampleInfo) -> None:
    found = as_predictions(frame)
    strong = chosen_predictions(found, OBJECT_CLASSES, 0.7)
    assert strong.scores is not None
    assert 0 < len(strong) < len(found.scores)
    assert strong.scores.min() >= 0.7
    assert len(chosen_predictions(found, OBJECT_CLASSES, 0.95)) == 10
    assert len(chosen_predictions(None, OBJECT_CLASSES, 0.2)) == 0
