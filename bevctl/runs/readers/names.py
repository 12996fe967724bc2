"""Scores and other numbers by name, as other projects write them."""

from __future__ import annotations

from collections.abc import Mapping

_SCORES = {
    "map": "mAP",
    "nds": "NDS",
    "miou": "mIoU",
    "map/mean/iou@max": "mIoU",
    "mean/iou@max": "mIoU",
    "object/map": "mAP",
    "object/nds": "NDS",
}


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` with mAP, NDS and mIoU also under these names, whatever prefix the log gives them."""
    named = dict(metrics)
    for name, value in metrics.items():
        lower = name.lower()
        known = _SCORES.get(lower) or _SCORES.get(lower.rpartition("/")[2])
        if known is not None:
            named.setdefault(known, value)
    return named
