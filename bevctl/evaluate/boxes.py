"""Between bevctl's LiDAR-frame boxes and the global-frame boxes of nuscenes-devkit's evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.detection.constants import DETECTION_NAMES
from nuscenes.eval.detection.data_classes import DetectionBox
from scipy.spatial.transform import Rotation

from bevctl.data.index import SampleInfo
from bevctl.evaluate.results import Objects
from bevctl.geometry import Array, transform_points

MOVING_SPEED = 0.2
"""Speed in m/s above which an object gets its class's attribute for moving (the rule of mmdet3d's export)."""
_VEHICLES = ("vehicle.moving", "vehicle.parked")
_CYCLES = ("cycle.with_rider", "cycle.without_rider")
_ATTRIBUTES = {
    "car": _VEHICLES,
    "truck": _VEHICLES,
    "construction_vehicle": _VEHICLES,
    "trailer": _VEHICLES,
    "bus": ("vehicle.moving", "vehicle.stopped"),
    "motorcycle": _CYCLES,
    "bicycle": _CYCLES,
    "pedestrian": ("pedestrian.moving", "pedestrian.standing"),
    "barrier": ("", ""),
    "traffic_cone": ("", ""),
}


def attribute_of(name: str, speed: float) -> str:
    """nuScenes attribute of a predicted object of class `name` from its speed in m/s; "" for classes without one."""
    moving, still = _ATTRIBUTES[name]
    return moving if speed > MOVING_SPEED else still


def lidar_to_global(boxes: NDArray[np.floating], sample: SampleInfo) -> tuple[Array, Array, Array]:
    """Centres (n, 3) in m, rotations (n, 4) as (w, x, y, z) and velocities (n, 2) in m/s of (n, 9) LiDAR-frame boxes,
    in the global frame: LiDAR → ego → global."""
    boxes = np.asarray(boxes, dtype=np.float64)
    lidar2global = sample.ego2global @ sample.lidar2ego
    turn = lidar2global[:3, :3]
    centres = transform_points(lidar2global, boxes[:, :3])
    # from_rotvec and from_matrix refuse an empty stack in older SciPy versions.
    if not len(boxes):
        return centres, np.zeros((0, 4)), np.zeros((0, 2))
    heading = Rotation.from_rotvec(boxes[:, 6:7] * np.array([0.0, 0.0, 1.0]))
    rotations = (Rotation.from_matrix(turn) * heading).as_quat()[:, [3, 0, 1, 2]]
    velocities = boxes[:, 7:9] @ turn[:2, :2].T
    return centres, rotations, velocities


def predicted_boxes(objects: Objects, sample: SampleInfo, classes: Sequence[str], limit: int) -> list[DetectionBox]:
    """The `limit` best usable boxes of a sample in the global frame, best first, with their attribute."""
    kept = np.flatnonzero(objects.usable())
    kept = kept[np.argsort(-objects.scores[kept], kind="stable")][:limit]
    boxes, names = objects.boxes[kept], [classes[label] for label in objects.labels[kept]]
    speeds = np.linalg.norm(boxes[:, 7:9], axis=1)
    attributes = [attribute_of(name, speed) for name, speed in zip(names, speeds, strict=True)]
    return _detection_boxes(sample, boxes, names, attributes, scores=objects.scores[kept])


def annotated_boxes(sample: SampleInfo) -> list[DetectionBox]:
    """Ground truth of an info file's sample in the global frame; attributes are "" where the file has none."""
    assert sample.boxes is not None
    kept = [i for i, name in enumerate(sample.names) if name in DETECTION_NAMES]
    points = (sample.num_lidar_pts + sample.num_radar_pts)[kept]
    attributes = [sample.attributes[i] for i in kept] if sample.attributes else [""] * len(kept)
    names = [sample.names[i] for i in kept]
    return _detection_boxes(sample, sample.boxes[kept], names, attributes, points=points)


def _detection_boxes(
    sample: SampleInfo,
    boxes: NDArray[np.floating],
    names: Sequence[str],
    attributes: Sequence[str],
    *,
    scores: NDArray[np.floating] | None = None,
    points: NDArray[np.integer] | None = None,
) -> list[DetectionBox]:
    centres, rotations, velocities = lidar_to_global(boxes, sample)
    return [
        DetectionBox(
            sample_token=sample.token,
            translation=tuple(centres[i].tolist()),
            size=(float(boxes[i, 4]), float(boxes[i, 3]), float(boxes[i, 5])),  # nuScenes: width, length, height
            rotation=tuple(rotations[i].tolist()),
            velocity=tuple(velocities[i].tolist()),
            num_pts=-1 if points is None else int(points[i]),
            detection_name=name,
            detection_score=-1.0 if scores is None else float(scores[i]),
            attribute_name=attributes[i],
        )
        for i, name in enumerate(names)
    ]


def grouped(boxes: Iterable[tuple[str, list[DetectionBox]]]) -> EvalBoxes:
    """The devkit's container of (sample token, boxes); a sample without boxes keeps its place."""
    container = EvalBoxes()
    for token, items in boxes:
        container.add_boxes(token, items)
    return container


def add_ego_distance(boxes: EvalBoxes, samples: Mapping[str, SampleInfo]) -> None:
    """Set each box's offset from the ego vehicle, which the devkit's range filter reads."""
    for token in boxes.sample_tokens:
        ego = samples[token].ego2global[:3, 3]
        for box in boxes[token]:
            box.ego_translation = tuple((np.asarray(box.translation) - ego).tolist())
