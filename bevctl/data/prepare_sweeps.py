"""The images between keyframes for an info file: each stored once, and for every sample those that came before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.batch import CAMERAS
from bevctl.geometry import Array

MICROSECONDS = 1e-6
TOLERANCE = 0.05
"""How far apart images of one moment may be in time, beside the offset that the cameras have at the keyframe, s."""


def has_sweeps(tables: Any) -> bool:
    """Whether nuScenes tables know images between the keyframes."""
    return any(record["fileformat"] == "jpg" and not record["is_key_frame"] for record in tables.sample_data)


class EarlierImages:
    """Follows the `sample_data` chains of nuScenes tables back from samples, up to `steps` images of each camera."""

    def __init__(self, tables: Any, steps: int) -> None:
        self._tables, self._steps = tables, steps
        self._indices: dict[str, int] = {}
        self._records: list[Any] = []
        self._calibrations: dict[str, int] = {}

    def of(self, sample: Any) -> NDArray[np.int32]:
        """(n, K) rows of the document's table, nearest in time first; -1 where a camera has no image of a moment.

        A moment is an image of the first camera that the sample has, and what each other camera took then.
        """
        tokens = {name: sample["data"][name] for name in CAMERAS if name in sample["data"]}
        keys = {name: self._tables.get("sample_data", token) for name, token in tokens.items()}
        if not keys:
            return np.zeros((0, len(CAMERAS)), dtype=np.int32)
        chains = {name: list(self._before(key)) for name, key in keys.items()}
        first = next(iter(keys))
        steps_back = _times(chains[first]) - keys[first]["timestamp"] * MICROSECONDS
        rows = np.full((len(steps_back), len(CAMERAS)), -1, dtype=np.int32)
        for name, chain in chains.items():
            wanted = keys[name]["timestamp"] * MICROSECONDS + steps_back
            for row, place in zip(rows, _nearest(_times(chain), wanted), strict=True):
                if place >= 0:
                    row[CAMERAS.index(name)] = self._index(chain[place])
        return rows

    def _before(self, key: Any) -> Iterator[Any]:
        token, left = key["prev"], self._steps
        while token and left > 0:
            record = self._tables.get("sample_data", token)
            yield record
            token, left = record["prev"], left - 1

    def _index(self, record: Any) -> int:
        index = self._indices.setdefault(record["token"], len(self._indices))
        if index == len(self._records):
            self._records.append(record)
            self._calibrations.setdefault(record["calibrated_sensor_token"], len(self._calibrations))
        return index

    def document(self) -> dict[str, Any]:
        """The table of all images that `of` named, in arrays: small, and read in no time.

        Rotations are quaternions w, x, y, z, as in the tables; `calibration` numbers the rows of cam2ego and cam2img.
        """
        sensors = [self._tables.get("calibrated_sensor", token) for token in self._calibrations]
        egos = [self._tables.get("ego_pose", record["ego_pose_token"]) for record in self._records]
        return {
            "cameras": list(CAMERAS),
            "path": np.array([record["filename"].encode() for record in self._records], dtype=np.bytes_),
            "timestamp": _times(self._records),
            "ego2global_translation": _array([ego["translation"] for ego in egos], 3),
            "ego2global_rotation": _array([ego["rotation"] for ego in egos], 4),
            "calibration": np.array(
                [self._calibrations[record["calibrated_sensor_token"]] for record in self._records], dtype=np.int32
            ),
            "cam2ego_translation": _array([sensor["translation"] for sensor in sensors], 3),
            "cam2ego_rotation": _array([sensor["rotation"] for sensor in sensors], 4),
            "cam2img": _array([sensor["camera_intrinsic"] for sensor in sensors], 3, 3),
        }


def _times(records: list[Any]) -> Array:
    """(n,) s"""
    return np.array([record["timestamp"] for record in records], dtype=np.float64) * MICROSECONDS


def _array(rows: list[Any], *shape: int) -> Array:
    """(n, *shape), also of no rows."""
    return np.array(rows, dtype=np.float64).reshape(-1, *shape)


def _nearest(times: Array, wanted: Array) -> NDArray[np.int64]:
    """For each wanted time the place of the nearest of `times`, -1 where none is within `TOLERANCE`."""
    if len(times) == 0:
        return np.full(len(wanted), -1)
    distance = np.abs(times[None, :] - wanted[:, None])
    places = distance.argmin(axis=1)
    return np.where(distance.min(axis=1) <= TOLERANCE, places, -1)
