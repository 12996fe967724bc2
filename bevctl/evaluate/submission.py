"""The result file of the nuScenes detection task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nuscenes.eval.common.config import config_factory

from bevctl.config.schema import ModelConfig
from bevctl.data.index import SampleInfo
from bevctl.evaluate.boxes import predicted_boxes
from bevctl.evaluate.detection import check_classes
from bevctl.evaluate.results import Objects
from bevctl.files import atomic_write_text

_FIELDS = (
    "sample_token",
    "translation",
    "size",
    "rotation",
    "velocity",
    "detection_name",
    "detection_score",
    "attribute_name",
)


def submission(
    objects: Mapping[str, Objects], samples: Sequence[SampleInfo], classes: Sequence[str], model: ModelConfig
) -> dict[str, Any]:
    """The file's content: a list of boxes for every one of `samples`, empty where none are known.

    Raises BevctlError for a class that nuScenes doesn't score.
    """
    check_classes(classes)
    limit = config_factory("detection_cvpr_2019").max_boxes_per_sample
    boxes: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        seen = objects.get(sample.token)
        found = [] if seen is None else predicted_boxes(seen, sample, classes, limit)
        boxes[sample.token] = [{name: getattr(box, name) for name in _FIELDS} for box in found]
    meta = {
        "use_camera": model.camera is not None,
        "use_lidar": model.reads_points,
        "use_radar": False,
        "use_map": False,
        "use_external": False,
    }
    return {"meta": meta, "results": boxes}


def write_submission(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as strict JSON, whole or not at all."""
    atomic_write_text(path, json.dumps(content, allow_nan=False))
