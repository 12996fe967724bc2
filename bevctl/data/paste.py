"""Ground-truth pasting: objects of other samples put into the point cloud and among the boxes of this one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bevctl.config.schema import Config, PasteConfig
from bevctl.data.gt_database import GtDatabase, read_gt_database
from bevctl.data.sample import Sample, Transform
from bevctl.geometry import Array, box_corners, points_in_boxes


@dataclass(frozen=True, eq=False)
class Supply:
    """The objects of one class that may be pasted."""

    label: int
    target: int
    """A sample with fewer objects of the class is filled up to this number."""
    objects: NDArray[np.int64]
    """Numbers in the database."""


def paste_objects(config: Config, paste: PasteConfig) -> Transform:
    """Fill each class up to its number with objects from the database, where they overlap no box as seen from above.

    Goes before any other augmentation: objects come back at the place relative to the LiDAR where they were.
    Points that were inside a pasted box are removed, those of the object come first. Images stay as they are. Raises
    BevctlError (exit 2) where the database is missing or damaged.
    """
    database = read_gt_database(Path(config.data.root) / paste.database)
    sweeps = config.data.sweeps
    supplies = [
        Supply(label, getattr(paste.counts, name), _usable(database, name, paste.min_points, sweeps))
        for label, name in enumerate(config.data.classes)
    ]

    def transform(sample: Sample, rng: np.random.Generator) -> Sample:
        if sample.points is None or not sample.has_boxes:
            return sample
        objects, labels = _choose(sample, supplies, database.boxes, rng)
        return _with_objects(sample, database, objects, labels, sweeps) if objects else sample

    return transform


def _usable(database: GtDatabase, name: str, min_points: int, sweeps: int) -> NDArray[np.int64]:
    return np.flatnonzero((database.names == name) & (database.count(sweeps) >= max(1, min_points)))


def _choose(
    sample: Sample, supplies: list[Supply], boxes: Array, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Numbers and labels of the objects to paste: drawn without repetition, those that collide left out."""
    objects: list[int] = []
    labels: list[int] = []
    for supply in supplies:
        missing = supply.target - int((sample.labels == supply.label).sum())
        count = min(max(0, missing), len(supply.objects))
        for index in rng.choice(supply.objects, size=count, replace=False) if count else ():
            occupied = np.concatenate([sample.boxes, boxes[objects]])
            if not overlaps_from_above(boxes[index], occupied).any():
                objects.append(int(index))
                labels.append(supply.label)
    return objects, labels


def _with_objects(sample: Sample, database: GtDatabase, objects: list[int], labels: list[int], sweeps: int) -> Sample:
    assert sample.points is not None
    boxes = database.boxes[objects]
    covered = points_in_boxes(sample.points, boxes).any(axis=0)
    clouds = [database.points(index, sweeps) for index in objects]
    return dataclasses.replace(
        sample,
        points=np.concatenate([*clouds, sample.points[~covered]]),
        boxes=np.concatenate([sample.boxes, boxes]),
        labels=np.concatenate([sample.labels, np.array(labels, dtype=np.int64)]),
    )


def overlaps_from_above(box: Array, boxes: Array) -> NDArray[np.bool_]:
    """(n,) whether the footprint of `box` (≥ 7,) overlaps those of `boxes` (n, ≥ 7); touching is no overlap.

    Two rectangles are apart where a side of either has them on different sides.
    """
    own, others = box_corners(box[None])[0, :4, :2], box_corners(boxes)[:, :4, :2]
    yaw = np.stack([np.full(len(boxes), box[6]), boxes[:, 6]], axis=1)
    angles = np.concatenate([yaw, yaw + np.pi / 2], axis=1)
    axes = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    a, b = own @ axes, others @ axes  # (n, 4 corners, 4 axes)
    apart = (a.max(axis=1) <= b.min(axis=1)) | (b.max(axis=1) <= a.min(axis=1))
    overlap: NDArray[np.bool_] = ~apart.any(axis=1)
    return overlap
