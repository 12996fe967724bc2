"""Detection metrics: what each kind of mistake costs, and that tables and info file agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from nuscenes import NuScenes
from nuscenes.utils.data_classes import Box
from pyquaternion import Quaternion

from bevctl.batch import OBJECT_CLASSES
from bevctl.data.index import SampleInfo
from bevctl.errors import BevctlError
from bevctl.evaluate.boxes import attribute_of, grouped, lidar_to_global, predicted_boxes
from bevctl.evaluate.detection import DetectionResult, evaluate_detection, open_tables, recall_within
from bevctl.evaluate.results import Objects
from bevctl.geometry import rigid
from tests.evaluate import scenes

DISTANCES = ("AP_0.5", "AP_1.0", "AP_2.0", "AP_4.0")
RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)


def evaluate(keyframes: Sequence[SampleInfo], tables: NuScenes | None = None, **changes: float) -> DetectionResult:
    """The metrics of perfect predictions whose boxes were altered: x, y, yaw, vx, vy by a shift, size by a factor."""
    objects = {sample.token: altered(scenes.perfect(sample), **changes) for sample in keyframes}
    return evaluate_detection(objects, keyframes, OBJECT_CLASSES, tables)


def altered(objects: Objects, x: float = 0, yaw: float = 0, velocity: float = 0, size: float = 1) -> Objects:
    boxes = objects.boxes.copy()
    boxes[:, 0] += x
    boxes[:, 3] *= size
    boxes[:, 6] += yaw
    boxes[:, 7] += velocity
    return dataclasses.replace(objects, boxes=boxes)


def test_perfect_predictions_reach_one() -> None:
    result = evaluate(scenes.samples(attributes=True))
    assert result.mean_ap == pytest.approx(1.0)
    assert result.nds == pytest.approx(1.0, abs=1e-3)
    assert result.tp_errors == pytest.approx(dict.fromkeys(result.tp_errors, 0.0), abs=1e-3)
    assert result.per_class["car"]["ground_truth"] == 6
    assert result.per_class["traffic_cone"]["AOE"] is None
    assert result.notes == ()


def test_unknown_attributes_leave_aae_out_and_cost_a_tenth_of_nds() -> None:
    result = evaluate(scenes.samples())
    assert result.tp_errors["mAAE"] is None
    assert result.per_class["car"]["AAE"] is None
    assert result.nds == pytest.approx(0.9, abs=1e-3)
    assert any("AAE is null" in note for note in result.notes)


@pytest.mark.parametrize(("shift", "found"), [(0.25, (1, 1, 1, 1)), (0.75, (0, 1, 1, 1)), (2.5, (0, 0, 0, 1))])
def test_a_shift_costs_the_distances_below_it(shift: float, found: tuple[int, ...]) -> None:
    result = evaluate(scenes.samples(), x=shift)
    for row in result.per_class.values():
        assert [row[name] for name in DISTANCES] == pytest.approx(list(found))
    if shift < 2:
        assert result.tp_errors["mATE"] == pytest.approx(shift, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "value"),
    [({"yaw": 0.4}, "mAOE", 0.4), ({"velocity": 0.6}, "mAVE", 0.6), ({"size": 1.25}, "mASE", 0.2)],
)
def test_each_error_shows_in_its_own_metric(change: dict[str, float], error: str, value: float) -> None:
    result = evaluate(scenes.samples(attributes=True), **change)
    assert result.mean_ap == pytest.approx(1.0)
    assert result.tp_errors[error] == pytest.approx(value, abs=1e-3)
    others = {name: found for name, found in result.tp_errors.items() if name != error}
    assert others == pytest.approx(dict.fromkeys(others, 0.0), abs=1e-3)


def test_standing_objects_get_the_attribute_of_standing() -> None:
    keyframes = scenes.samples(attributes=True)
    still = {s.token: scenes.perfect(s) for s in keyframes}
    for objects in still.values():
        objects.boxes[:, 7:9] = 0
    result = evaluate_detection(still, keyframes, OBJECT_CLASSES, None)
    assert result.tp_errors["mAAE"] == pytest.approx(1.0)


def test_confused_classes_lose_their_ap_and_lower_both_scores() -> None:
    keyframes = scenes.samples(attributes=True)
    objects = {sample.token: scenes.perfect(sample) for sample in keyframes}
    for seen in objects.values():
        seen.labels[:] = np.where(seen.labels < 2, 1 - seen.labels, seen.labels)  # car and truck
    result = evaluate_detection(objects, keyframes, OBJECT_CLASSES, None)
    assert result.per_class["car"]["AP"] == result.per_class["truck"]["AP"] == 0
    assert result.mean_ap == pytest.approx(0.8)
    assert result.nds < 0.9


def test_a_class_without_ground_truth_counts_as_zero_and_is_said() -> None:
    contents = [thing for thing in scenes.things() if thing.name != "bus"]
    result = evaluate(scenes.samples(attributes=True, contents=contents))
    assert result.mean_ap == pytest.approx(0.9)
    assert any("no ground truth of bus" in note for note in result.notes)


def test_only_boxes_in_class_range_with_points_count() -> None:
    far = scenes.Thing("pedestrian", (600.0, 1445.0, 1.0), (0.0, 0.0), (0.7, 0.7, 1.7), 0.0)
    unseen = scenes.Thing("car", (612.0, 1400.0, 1.0), (0.0, 0.0), (4.0, 1.9, 1.6), 0.0, points=0)
    result = evaluate(scenes.samples(steps=1, contents=[*scenes.things(), far, unseen]))
    assert result.per_class["pedestrian"]["ground_truth"] == 2
    assert result.per_class["car"]["ground_truth"] == 2


def test_tables_and_info_file_agree(tmp_path: Path) -> None:
    scenes.write_tables(tmp_path)
    keyframes = scenes.samples(attributes=True)
    tables, reason = open_tables(tmp_path, scenes.VERSION, [sample.token for sample in keyframes])
    assert tables is not None, reason
    rng = np.random.default_rng(0)
    objects = {}
    for sample in keyframes:
        seen = scenes.perfect(sample)
        noise = rng.normal(0, 0.6, seen.boxes.shape).astype(np.float32) * (1, 1, 0.1, 0.1, 0.1, 0.1, 0.3, 1, 1)
        objects[sample.token] = dataclasses.replace(
            seen, boxes=(seen.boxes + noise).astype(np.float32), scores=rng.random(len(noise)).astype(np.float32)
        )
    by_tables = evaluate_detection(objects, keyframes, OBJECT_CLASSES, tables)
    by_info = evaluate_detection(objects, keyframes, OBJECT_CLASSES, None)
    assert (by_tables.source, by_info.source) == ("tables", "info")
    assert 0.2 < by_info.mean_ap < 0.95
    assert by_tables.mean_ap == pytest.approx(by_info.mean_ap, abs=1e-9)
    assert by_tables.nds == pytest.approx(by_info.nds, abs=1e-6)
    for name, row in by_tables.per_class.items():
        assert row == pytest.approx(by_info.per_class[name], abs=1e-6), name


def test_tables_also_serve_a_part_of_their_samples(tmp_path: Path) -> None:
    scenes.write_tables(tmp_path)
    keyframes = scenes.samples(attributes=True)[1:2]
    tables, _ = open_tables(tmp_path, scenes.VERSION, ["sample1"])
    result = evaluate(keyframes, tables)
    assert result.mean_ap == pytest.approx(1.0)
    assert result.per_class["car"]["ground_truth"] == 2


def test_bicycles_in_a_rack_are_left_out_with_tables_only(tmp_path: Path) -> None:
    bicycle = next(thing for thing in scenes.things() if thing.name == "bicycle")
    parked = dataclasses.replace(bicycle, velocity=(0.0, 0.0))
    contents = [parked if thing == bicycle else thing for thing in scenes.things()]
    rack = scenes.Thing("static_object.bicycle_rack", parked.start, (0.0, 0.0), (6.0, 6.0, 3.0), 0.0)
    scenes.write_tables(tmp_path, contents=contents, racks=(rack,))
    keyframes = scenes.samples(contents=contents)
    tables, _ = open_tables(tmp_path, scenes.VERSION, [sample.token for sample in keyframes])
    assert evaluate(keyframes, tables).per_class["bicycle"]["ground_truth"] == 3
    assert evaluate(keyframes).per_class["bicycle"]["ground_truth"] == 6


def test_opening_tables_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scenes.write_tables(tmp_path)
    keyframes = scenes.samples()
    tables, _ = open_tables(tmp_path, scenes.VERSION, [sample.token for sample in keyframes])
    evaluate(keyframes, tables)
    assert capfd.readouterr() == ("", "")


def test_unusable_tables_are_named(tmp_path: Path) -> None:
    assert "no tables" in open_tables(tmp_path, scenes.VERSION, ["sample0"])[1]
    scenes.write_tables(tmp_path)
    assert "lack 1 of the 2 samples" in open_tables(tmp_path, scenes.VERSION, ["sample0", "other"])[1]
    (tmp_path / scenes.VERSION / "scene.json").write_text("[{")
    assert "can't be opened" in open_tables(tmp_path, scenes.VERSION, ["sample0"])[1]
    (tmp_path / "map.png").unlink()
    assert "can't be opened" in open_tables(tmp_path, scenes.VERSION, ["sample0"])[1]


def test_no_prediction_at_all_scores_zero() -> None:
    keyframes = scenes.samples(steps=1)
    nothing = Objects(np.zeros((0, 9), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    result = evaluate_detection({"sample0": nothing}, keyframes, OBJECT_CLASSES, None)
    assert result.mean_ap == result.nds == 0


def test_broken_boxes_are_left_out_and_counted() -> None:
    keyframes = scenes.samples(steps=1)
    seen = scenes.perfect(keyframes[0])
    boxes = seen.boxes.copy()
    boxes[0, 0], boxes[1, 8], boxes[2, 4] = np.nan, np.inf, 0
    broken = dataclasses.replace(seen, boxes=boxes)
    result = evaluate_detection({"sample0": broken}, keyframes, OBJECT_CLASSES, None)
    assert any(note.startswith("3 predicted boxes") for note in result.notes)
    assert np.isfinite(result.nds)


def test_a_class_that_nuscenes_lacks_is_refused() -> None:
    with pytest.raises(BevctlError, match="'tram'"):
        evaluate_detection({}, [], ("car", "tram"), None)


def test_boxes_move_to_the_global_frame_as_the_devkit_moves_them() -> None:
    ego2global = rigid(Quaternion(axis=(0.1, 0.2, 1.0), radians=2.1).rotation_matrix, (411.0, 1180.0, 0.3))
    lidar2ego = rigid(Quaternion(axis=(0.02, -0.03, 1.0), radians=-1.57).rotation_matrix, (0.94, 0.0, 1.84))
    sample = dataclasses.replace(scenes.samples(1)[0], ego2global=ego2global, lidar2ego=lidar2ego)
    rows = np.array([[10.0, -4.0, 0.5, 4.5, 1.9, 1.6, 0.7, 3.0, -1.0]])
    box = Box(rows[0, :3], rows[0, [4, 3, 5]], Quaternion(axis=(0, 0, 1), radians=0.7), velocity=(3.0, -1.0, 0.0))
    for matrix in (lidar2ego, ego2global):
        box.rotate(Quaternion(matrix=matrix[:3, :3]))
        box.translate(matrix[:3, 3])
    centres, rotations, velocities = lidar_to_global(rows, sample)
    np.testing.assert_allclose(centres[0], box.center, atol=1e-9)
    np.testing.assert_allclose(Quaternion(rotations[0]).rotation_matrix, box.orientation.rotation_matrix, atol=1e-9)
    np.testing.assert_allclose(velocities[0], box.velocity[:2], atol=1e-9)


def test_at_most_the_best_boxes_of_a_sample_are_kept() -> None:
    sample = scenes.samples(1)[0]
    seen = scenes.perfect(sample)
    many = Objects(
        np.repeat(seen.boxes, 30, axis=0), np.linspace(0, 1, 600, dtype=np.float32), np.repeat(seen.labels, 30)
    )
    boxes = predicted_boxes(many, sample, OBJECT_CLASSES, 500)
    scores = [box.detection_score for box in boxes]
    assert len(boxes) == 500
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0


@pytest.mark.parametrize(
    ("name", "speed", "attribute"),
    [
        ("car", 0.3, "vehicle.moving"),
        ("car", 0.2, "vehicle.parked"),
        ("bus", 0.0, "vehicle.stopped"),
        ("bicycle", 1.0, "cycle.with_rider"),
        ("motorcycle", 0.1, "cycle.without_rider"),
        ("pedestrian", 0.0, "pedestrian.standing"),
        ("barrier", 5.0, ""),
    ],
)
def test_attributes_follow_speed(name: str, speed: float, attribute: str) -> None:
    assert attribute_of(name, speed) == attribute


def test_unannotated_velocity_is_ignored_by_its_error() -> None:
    sample = scenes.samples(steps=1)[0]
    assert sample.boxes is not None
    boxes = sample.boxes.copy()
    boxes[:, 7:9] = np.nan
    objects = {"sample0": scenes.perfect(sample)}
    result = evaluate_detection(objects, [dataclasses.replace(sample, boxes=boxes)], OBJECT_CLASSES, None)
    assert result.mean_ap == pytest.approx(1.0)
    assert result.tp_errors["mAVE"] == 1.0  # the devkit's number where nothing is known


def recall(objects: Objects, sample: SampleInfo) -> float | None:
    return recall_within({sample.token: objects}, [sample], OBJECT_CLASSES, RANGE)


def test_recall_counts_boxes_with_a_near_prediction_of_their_class() -> None:
    sample = scenes.samples(1)[0]
    seen = scenes.perfect(sample)
    assert recall(seen, sample) == 1.0
    assert recall(altered(seen, x=1.9), sample) == 1.0
    assert recall(altered(seen, x=2.1), sample) == 0.0
    assert recall(dataclasses.replace(seen, scores=np.full(20, 0.09, np.float32)), sample) == 0.0
    assert recall(dataclasses.replace(seen, labels=(seen.labels + 1) % 10), sample) == 0.0
    half = np.arange(20) < 10
    assert recall(Objects(seen.boxes[half], seen.scores[half], seen.labels[half]), sample) == 0.5


def test_recall_leaves_out_sparse_and_distant_boxes() -> None:
    near = scenes.Thing("car", (610.0, 1400.0, 1.0), (0.0, 0.0), (4.0, 1.9, 1.6), 0.0, points=5)
    sparse = dataclasses.replace(near, start=(590.0, 1400.0, 1.0), points=4)
    distant = dataclasses.replace(near, start=(600.0, 1480.0, 1.0))
    sample = scenes.samples(1, contents=[near, sparse, distant])[0]
    nothing = Objects(np.zeros((0, 9), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    one = scenes.perfect(scenes.samples(1, contents=[near])[0])
    assert recall(one, sample) == 1.0
    assert recall(nothing, sample) == 0.0
    assert recall(nothing, scenes.samples(1, contents=[sparse])[0]) is None


def test_a_sample_without_predictions_keeps_its_place() -> None:
    nothing = Objects(np.zeros((0, 9), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    boxes = predicted_boxes(nothing, scenes.samples(1)[0], OBJECT_CLASSES, 500)
    assert grouped([("sample0", boxes)]).sample_tokens == ["sample0"]
