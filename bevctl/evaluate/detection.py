"""nuScenes detection metrics by nuscenes-devkit's own matching, from the tables or from an info file alone."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nuscenes import NuScenes
from nuscenes.eval.common.config import config_factory
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.common.loaders import filter_eval_boxes, load_gt_of_sample_tokens
from nuscenes.eval.detection.algo import accumulate, calc_ap, calc_tp
from nuscenes.eval.detection.constants import DETECTION_NAMES, TP_METRICS
from nuscenes.eval.detection.data_classes import DetectionBox, DetectionConfig, DetectionMetrics

from bevctl.data.index import SampleInfo
from bevctl.errors import BevctlError
from bevctl.evaluate.boxes import add_ego_distance, annotated_boxes, grouped, predicted_boxes
from bevctl.evaluate.results import Objects

ERROR_NAMES = {"trans_err": "ATE", "scale_err": "ASE", "orient_err": "AOE", "vel_err": "AVE", "attr_err": "AAE"}
"""The devkit's names of the true-positive errors and the usual ones: m, 1 − IoU, rad, m/s, 1 − accuracy."""
_UNDEFINED = {"traffic_cone": ("orient_err", "vel_err", "attr_err"), "barrier": ("vel_err", "attr_err")}


@dataclass(frozen=True)
class DetectionResult:
    """Metrics in 0..1, errors in their units; None where there is nothing to measure."""

    mean_ap: float
    nds: float
    per_class: dict[str, dict[str, float | None]]
    """AP, AP at each distance ("AP_0.5" …), ATE, ASE, AOE, AVE, AAE and the number of ground-truth boxes."""
    tp_errors: dict[str, float | None]
    """mATE, mASE, mAOE, mAVE, mAAE."""
    source: str
    """Where the ground truth came from: tables or info."""
    notes: tuple[str, ...] = ()


class _NoTables:
    """Stands in for the tables in the devkit's filter where only an info file exists: no bicycle racks are known."""

    def get(self, table: str, token: str) -> dict[str, list[str]]:  # noqa: ARG002
        return {"anns": []}


def evaluate_detection(
    objects: Mapping[str, Objects],
    samples: Sequence[SampleInfo],
    classes: Sequence[str],
    tables: NuScenes | None,
) -> DetectionResult:
    """Score the predictions of `samples`, which are all annotated and have their objects.

    `classes` are the network's, in the order of its labels; the mean is over the devkit's ten whatever they are, and
    a class without ground truth counts as 0 in it. Raises BevctlError for a class that nuScenes doesn't score.
    """
    check_classes(classes)
    config = config_factory("detection_cvpr_2019")
    by_token = {sample.token: sample for sample in samples}
    truth = _ground_truth(by_token, tables)
    predicted = grouped(
        (token, predicted_boxes(objects[token], sample, classes, config.max_boxes_per_sample))
        for token, sample in by_token.items()
    )
    for boxes in (truth, predicted):
        add_ego_distance(boxes, by_token)
        if any(boxes[token] for token in boxes.sample_tokens):  # the devkit's filter refuses an empty set
            filter_eval_boxes(tables or _NoTables(), boxes, config.class_range)
    counts = {name: sum(box.detection_name == name for box in truth.all) for name in DETECTION_NAMES}
    dropped = sum(int((~objects[token].usable()).sum()) for token in by_token)
    attributes = tables is not None or any(sample.attributes for sample in samples)
    return DetectionResult(
        **_numbers(score(truth, predicted, config), counts, attributes),
        source="info" if tables is None else "tables",
        notes=_notes(counts, classes, dropped, attributes),
    )


def check_classes(classes: Sequence[str]) -> None:
    """Raises BevctlError for a class that nuScenes doesn't score."""
    for name in classes:
        if name not in DETECTION_NAMES:
            raise BevctlError(
                f"data.classes has {name!r}, which nuScenes detection doesn't score.",
                f"Its classes are {', '.join(DETECTION_NAMES)}.",
            )


def open_tables(root: Path, version: str, tokens: Sequence[str]) -> tuple[NuScenes | None, str]:
    """The tables `<root>/<version>` if they exist and know all of `tokens`; else None and the reason."""
    path = root / version / "sample.json"
    if not path.is_file():
        return None, f"no tables at {path}"
    try:
        known = {record["token"] for record in json.loads(path.read_text())}
        missing = len(set(tokens) - known)
        if missing:
            return None, f"the tables in {path.parent} lack {missing} of the {len(set(tokens))} samples"
        with _quiet():
            return NuScenes(version, str(root), verbose=False), ""
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        return None, f"the tables in {path.parent} can't be opened ({error or type(error).__name__})"


def score(truth: EvalBoxes, predicted: EvalBoxes, config: DetectionConfig) -> DetectionMetrics:
    """The devkit's metrics of filtered boxes."""
    metrics = DetectionMetrics(config)
    for name in config.class_names:
        for distance in config.dist_ths:
            matches = accumulate(truth, predicted, name, config.dist_fcn_callable, distance)
            metrics.add_label_ap(name, distance, calc_ap(matches, config.min_recall, config.min_precision))
            if distance == config.dist_th_tp:
                for error in TP_METRICS:
                    undefined = error in _UNDEFINED.get(name, ())
                    value = math.nan if undefined else calc_tp(matches, config.min_recall, error)
                    metrics.add_label_tp(name, error, value)
    return metrics


def _ground_truth(samples: Mapping[str, SampleInfo], tables: NuScenes | None) -> EvalBoxes:
    if tables is None:
        return grouped((token, annotated_boxes(sample)) for token, sample in samples.items())
    with _quiet():
        return load_gt_of_sample_tokens(tables, list(samples), DetectionBox)


def _numbers(metrics: DetectionMetrics, counts: Mapping[str, int], attributes: bool) -> dict[str, Any]:
    """The devkit's numbers as fields of `DetectionResult`."""

    def known(error: str, value: float) -> float | None:
        return None if math.isnan(value) or (error == "attr_err" and not attributes) else float(value)

    per_class: dict[str, dict[str, float | None]] = {}
    for name, mean in metrics.mean_dist_aps.items():
        row: dict[str, float | None] = {"AP": float(mean)}
        row |= {f"AP_{d}": metrics.get_label_ap(name, d) for d in metrics.cfg.dist_ths}
        row |= {short: known(error, metrics.get_label_tp(name, error)) for error, short in ERROR_NAMES.items()}
        per_class[name] = row | {"ground_truth": counts[name]}
    tp_errors = {f"m{ERROR_NAMES[error]}": known(error, value) for error, value in metrics.tp_errors.items()}
    return {"mean_ap": metrics.mean_ap, "nds": metrics.nd_score, "per_class": per_class, "tp_errors": tp_errors}


def _notes(counts: Mapping[str, int], classes: Sequence[str], dropped: int, attributes: bool) -> tuple[str, ...]:
    notes = []
    if not attributes:
        notes.append("attributes are unknown: AAE is null, and counts as 1 in NDS, which is up to 0.1 too low")
    absent = [name for name, count in counts.items() if not count]
    if absent:
        notes.append(f"no ground truth of {', '.join(absent)} in range: AP 0 and errors 1 in the means")
    unpredicted = [name for name in DETECTION_NAMES if name not in classes]
    if unpredicted:
        notes.append(f"the model doesn't predict {', '.join(unpredicted)}: AP 0 and errors 1 in the means")
    if dropped:
        notes.append(f"{dropped} predicted boxes with a non-finite number or a size of zero were left out")
    return tuple(notes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what the devkit prints (progress bars, table sizes); its exceptions pass."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def recall_within(
    objects: Mapping[str, Objects],
    samples: Sequence[SampleInfo],
    classes: Sequence[str],
    point_cloud_range: Sequence[float],
    *,
    distance: float = 2.0,
    min_points: int = 5,
    min_score: float = 0.1,
) -> float | None:
    """Share of ground-truth boxes that have a prediction of their class near by; None without such boxes.

    Counted are boxes of `classes` with at least `min_points` LiDAR points whose centre lies inside
    `point_cloud_range` (x, y, z bounds in m); found means a predicted centre within `distance` m in the ground plane,
    with a score of at least `min_score`. One prediction may find several boxes: this is a coverage, not a matching.
    """
    low, high = np.asarray(point_cloud_range[:3]), np.asarray(point_cloud_range[3:])
    found = total = 0
    for sample in samples:
        assert sample.boxes is not None
        seen = objects[sample.token]
        inside = ((sample.boxes[:, :3] >= low) & (sample.boxes[:, :3] <= high)).all(axis=1)
        for label, name in enumerate(classes):
            wanted = inside & (sample.num_lidar_pts >= min_points) & (np.asarray(sample.names) == name)
            candidates = seen.boxes[(seen.labels == label) & (seen.scores >= min_score), :2]
            gaps = np.linalg.norm(sample.boxes[wanted, None, :2] - candidates[None], axis=-1)
            found += int((gaps <= distance).any(axis=1).sum())
            total += int(wanted.sum())
    return found / total if total else None
