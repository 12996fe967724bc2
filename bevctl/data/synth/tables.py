"""The thirteen tables of a nuScenes data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bevctl.data.synth.maps import make_token
from bevctl.data.synth.objects import CLASSES
from bevctl.data.synth.rig import CAMERAS

Record = dict[str, Any]
Tables = dict[str, list[Record]]

TABLE_NAMES = (
    "attribute", "calibrated_sensor", "category", "ego_pose", "instance", "log", "map", "sample", "sample_annotation",
    "sample_data", "scene", "sensor", "visibility",
)  # fmt: skip
ATTRIBUTES = (
    "vehicle.moving", "vehicle.stopped", "vehicle.parked", "cycle.with_rider", "cycle.without_rider",
    "pedestrian.sitting_lying_down", "pedestrian.standing", "pedestrian.moving",
)  # fmt: skip
VISIBILITY_LEVELS = (("1", 0.0, "v0-40"), ("2", 0.4, "v40-60"), ("3", 0.6, "v60-80"), ("4", 0.8, "v80-100"))
"""Token, least visible share, level."""


def empty_tables() -> Tables:
    """Every table without a record."""
    return {name: [] for name in TABLE_NAMES}


def shared_tables() -> Tables:
    """The tables that are the same for every scene: attribute, category, sensor, visibility."""
    tables = empty_tables()
    tables["attribute"] = [
        {"token": make_token("attribute", name), "name": name, "description": f"The object's state: {name}."}
        for name in ATTRIBUTES
    ]
    tables["category"] = [
        {"token": make_token("category", spec.category), "name": spec.category, "description": f"Synthetic {name}."}
        for name, spec in CLASSES.items()
    ]
    tables["sensor"] = [
        {"token": make_token("sensor", channel), "channel": channel, "modality": modality}
        for channel, modality in [*((c.channel, "camera") for c in CAMERAS), ("LIDAR_TOP", "lidar")]
    ]
    tables["visibility"] = [
        {"token": token, "level": level, "description": f"Visible share of the object in all cameras: {level} %."}
        for token, _, level in VISIBILITY_LEVELS
    ]
    return tables


def visibility_token(share: float) -> str:
    """Token of the level that a visible share 0..1 falls into."""
    return next(token for token, least, _ in reversed(VISIBILITY_LEVELS) if share >= least)


def link(records: list[Record]) -> None:
    """Fill `prev` and `next` of records that follow each other; the ends get empty strings."""
    for record, before, after in zip(records, [None, *records[:-1]], [*records[1:], None], strict=True):
        record["prev"] = before["token"] if before else ""
        record["next"] = after["token"] if after else ""


def merge(parts: Iterable[Tables]) -> Tables:
    """The tables of several scenes, one after the other."""
    merged = empty_tables()
    for part in parts:
        for name, records in part.items():
            merged[name].extend(records)
    return merged
