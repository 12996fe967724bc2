"""Scores of a run by epoch, the whole and by class, from its log and its evaluations; and how two runs differ."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bevctl.monitor.history import Column, History
from bevctl.runs.records import RunLog

MAIN = ("mAP", "NDS", "mIoU")
_CLASS_AP = re.compile(r"(?:^|[/_])(?P<name>[a-z_]+?)_ap_dist_[\d.]+$", re.IGNORECASE)
_CLASS_IOU = re.compile(r"^map/(?P<name>[a-z_]+)/iou@max$", re.IGNORECASE)

LOSS_GAP = 0.05
"""Relative difference of the losses of two runs that have parted."""
_NOTHING = 0.001
"""A score up to this is that of a model that has not learned anything."""
_STRETCHES = 20
"""Equal parts of the runs whose median losses are compared."""

Scores = dict[str, float]
"""mAP, NDS and mIoU in 0..1, and `mAP/<class>`, `mIoU/<class>`."""


@dataclass(frozen=True)
class Comparison:
    """Two runs at the last epoch that both evaluated."""

    epoch: int
    base: Scores
    other: Scores
    since: int | None
    """First epoch from which on a main score stays lower by more than the tolerance; None: never."""

    def drop(self, name: str) -> float:
        """How much lower the other run scores, 0..1."""
        return self.base[name] - self.other[name]

    @property
    def main(self) -> list[str]:
        """Main scores that both have, the largest drop first."""
        return sorted((n for n in MAIN if n in self.base and n in self.other), key=lambda n: -self.drop(n))

    @property
    def classes(self) -> list[str]:
        """Scores of classes that both have, the largest drop first."""
        return sorted((n for n in self.base if "/" in n and n in self.other), key=lambda n: -self.drop(n))


def scores_of_log(log: RunLog) -> dict[int, Scores]:
    """Scores by epoch; where several evaluations are of one epoch, the last."""
    found = {record.epoch: _of_metrics(record.metrics) for record in log.validations}
    if log.format == "bevctl":
        folder = Path(log.header.get("work_dir") or log.path)
        for path in folder.glob("eval/epoch_*.json"):
            epoch = path.stem.removeprefix("epoch_")
            if epoch.isdigit():
                found[int(epoch)] = {**found.get(int(epoch), {}), **_of_file(path)}
    return {epoch: scores for epoch, scores in sorted(found.items()) if scores}


def scores_of_document(document: Mapping[str, Any]) -> Scores:
    """Scores of an evaluation's document (`bevctl.eval/1`)."""
    detection, drawn = _section(document, "detection"), _section(document, "map")
    found = {"mAP": detection.get("mAP"), "NDS": detection.get("NDS"), "mIoU": drawn.get("mIoU")}
    found |= {f"mAP/{name}": row.get("AP") for name, row in _section(detection, "per_class").items()}
    found |= {f"mIoU/{name}": value for name, value in _section(drawn, "per_class").items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def compare(base: Mapping[int, Scores], other: Mapping[int, Scores], tolerance: float) -> Comparison | None:
    """The two at the last epoch that both have; None without one, or without a main score above zero in the first."""
    epochs = sorted(base.keys() & other.keys())
    if not epochs:
        return None
    comparisons = [Comparison(epoch, base[epoch], other[epoch], None) for epoch in epochs]
    last = comparisons[-1]
    if not any(last.base[name] > _NOTHING for name in last.main):
        return None
    since = None
    for comparison in reversed(comparisons):
        if not comparison.main or comparison.drop(comparison.main[0]) <= tolerance:
            break
        since = comparison.epoch
    return Comparison(last.epoch, last.base, last.other, since)


def parted_at(base: History, other: History) -> float | None:
    """Iteration from which on the training losses stay more than 5 % apart; None: they do not, or are too short."""
    first, second = base.finite("loss"), other.finite("loss")
    if min(len(first[0]), len(second[0])) < _STRETCHES:
        return None
    edges = np.linspace(0, min(first[0][-1], second[0][-1]), _STRETCHES + 1)
    since = None
    for low, high in zip(edges[-2::-1], edges[:0:-1], strict=True):
        medians = [_median(values[(iters > low) & (iters <= high)]) for iters, values in (first, second)]
        if not abs(medians[1] - medians[0]) > LOSS_GAP * abs(medians[0]):
            break
        since = float(low)
    return since


def _median(values: Column) -> float:
    """NaN for none, so that no comparison holds."""
    return float(np.median(values)) if len(values) else math.nan


def _of_metrics(metrics: Mapping[str, float]) -> Scores:
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    found = {name: value for name, value in metrics.items() if name in MAIN}
    by_class: dict[str, list[float]] = defaultdict(list)
    for name, value in metrics.items():
        for pattern, main in ((_CLASS_AP, "mAP"), (_CLASS_IOU, "mIoU")):
            match = pattern.search(name)
            if match and match["name"].lower() != "mean":
                by_class[f"{main}/{match['name'].lower()}"].append(value)
    return {**found, **{name: fmean(values) for name, values in by_class.items()}}


def _of_file(path: Path) -> Scores:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return scores_of_document(document) if isinstance(document, dict) else {}


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, Mapping) else {}
