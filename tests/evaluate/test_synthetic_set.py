"""Detection metrics on the synthetic set: its annotations as predictions, exact and with one thing wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bevctl.batch import OBJECT_CLASSES
from bevctl.data.index import read_info
from bevctl.data.info import SampleInfo
from bevctl.evaluate.detection import DetectionResult, evaluate_detection, open_tables
from bevctl.evaluate.results import Objects

GEOMETRY = ("mATE", "mASE", "mAOE", "mAVE")


@pytest.fixture(scope="module")
def samples(synth_root: Path) -> tuple[SampleInfo, ...]:
    return read_info(synth_root / "synth_infos_train.pkl").samples


def _as_predictions(sample: SampleInfo) -> Objects:
    """Boxes that a sensor's point lies on; an unknown velocity is predicted as none."""
    assert sample.boxes is not None
    kept = [i for i, name in enumerate(sample.names) if name in OBJECT_CLASSES and sample.valid[i]]
    labels = np.array([OBJECT_CLASSES.index(sample.names[i]) for i in kept], dtype=np.int64)
    scores = np.linspace(0.9, 0.5, len(kept), dtype=np.float32)
    return Objects(np.nan_to_num(sample.boxes[kept]).astype(np.float32), scores, labels)


def _changed(samples: tuple[SampleInfo, ...], **changes: float) -> DetectionResult:
    """Predictions with a shift in x or z (m), yaw (rad) or vx (m/s), or a factor on the length."""
    objects = {sample.token: _as_predictions(sample) for sample in samples}
    for seen in objects.values():
        for name, change in changes.items():
            column = {"x": 0, "z": 2, "length": 3, "yaw": 6, "vx": 7}[name]
            seen.boxes[:, column] = (
                seen.boxes[:, column] * change if name == "length" else seen.boxes[:, column] + change
            )
    return evaluate_detection(objects, samples, OBJECT_CLASSES, None)


@pytest.mark.parametrize("from_tables", [True, False])
def test_annotations_as_predictions_are_perfect(
    synth_root: Path, samples: tuple[SampleInfo, ...], from_tables: bool
) -> None:
    objects = {sample.token: _as_predictions(sample) for sample in samples}
    tables = open_tables(synth_root, "v1.0-mini", list(objects))[0] if from_tables else None
    result = evaluate_detection(objects, samples, OBJECT_CLASSES, tables)
    assert result.source == ("tables" if from_tables else "info")
    assert result.mean_ap == pytest.approx(1.0)
    assert all(row["AP"] == pytest.approx(1.0) for row in result.per_class.values())
    assert [result.tp_errors[name] for name in GEOMETRY] == pytest.approx([0.0] * 4, abs=1e-3)
    # attributes are guessed from the speed: a vehicle that stands may be parked or stopped
    attributes = result.tp_errors["mAAE"]
    assert attributes is not None
    assert attributes < 0.3
    assert result.nds == pytest.approx(1.0 - attributes / 10)
    assert result.nds > 0.97


@pytest.mark.parametrize(
    ("change", "error", "value"),
    [
        ({"x": 0.3}, "mATE", 0.3),
        ({"length": 1.25}, "mASE", 0.2),
        ({"yaw": 0.25}, "mAOE", 0.25),
        ({"vx": 0.7}, "mAVE", 0.7),
    ],
)
def test_each_error_answers_to_what_it_measures(
    samples: tuple[SampleInfo, ...], change: dict[str, float], error: str, value: float
) -> None:
    result = _changed(samples, **change)
    assert result.mean_ap == pytest.approx(1.0, abs=1e-6)
    assert result.tp_errors[error] == pytest.approx(value, abs=2e-3)
    others = {name: result.tp_errors[name] for name in GEOMETRY if name != error}
    assert others == pytest.approx(dict.fromkeys(others, 0.0), abs=1e-3)


def test_the_attribute_error_answers_to_the_speed(samples: tuple[SampleInfo, ...]) -> None:
    """What stands is predicted to move: all but its attribute and velocity stay right."""
    still, moving = _changed(samples).tp_errors["mAAE"], _changed(samples, vx=3.0).tp_errors["mAAE"]
    assert still is not None
    assert moving is not None
    assert moving > still + 0.2


def test_height_is_not_measured(samples: tuple[SampleInfo, ...]) -> None:
    """Distances are taken in the ground plane, and sizes are compared with centres and headings aligned."""
    assert _changed(samples, z=2.0).nds == pytest.approx(_changed(samples).nds, abs=1e-6)
