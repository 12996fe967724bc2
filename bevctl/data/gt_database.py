"""The annotated objects of a data set with the LiDAR points on them, for pasting into other samples.

Two files: `<name>.npz` says where each object was and which rows of `<name>.bin` are its points.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bevctl.data.files import POINT_FEATURES
from bevctl.data.info import InfoFile, SampleInfo
from bevctl.data.sweeps import Points, load_points
from bevctl.errors import BevctlError
from bevctl.files import atomic_path
from bevctl.geometry import Array, points_in_boxes

Progress = Callable[[int, int, str], None]
"""Called with (samples done, samples in all, name of the file)."""
_ARRAYS = ("names", "boxes", "starts", "counts")


@dataclass(frozen=True)
class WrittenDatabase:
    """What a database holds that was just written."""

    path: Path
    objects: int
    points: int
    per_class: dict[str, int]
    problems: tuple[str, ...]
    """A sentence for each sample that was left out because a file of it could not be read."""


@dataclass(frozen=True, eq=False)
class GtDatabase:
    """Objects 0 … n - 1, each in the LiDAR frame of the keyframe that it is from."""

    names: NDArray[np.str_]
    """(n,) class."""
    boxes: Array
    """(n, 9) as in `bevctl.batch`."""
    starts: NDArray[np.int64]
    """(n,) row of each object's first point."""
    counts: NDArray[np.int32]
    """(n, S + 1) points of the keyframe and of the nearest 0 … S sweeps together."""
    rows: Points
    """(P, 5) offset from the box centre (m, axes of the LiDAR frame), intensity, dt; read when used."""

    def points(self, index: int, sweeps: int) -> Points:
        """(p, 5) points on an object, as the keyframe and `sweeps` sweeps show it, where it was."""
        first = self.starts[index]
        points = np.array(self.rows[first : first + self.count(sweeps)[index]])
        points[:, :3] += self.boxes[index, :3]
        return points

    def count(self, sweeps: int) -> NDArray[np.int32]:
        """(n,) number of those points of each object."""
        return self.counts[:, min(sweeps, self.counts.shape[1] - 1)]


def write_gt_database(
    path: Path, info: InfoFile, root: Path, classes: Sequence[str], progress: Progress | None = None
) -> WrittenDatabase:
    """Write the valid objects of `classes` that have a LiDAR point, with those of all stored sweeps, as `path` (.npz)
    and the .bin beside it. A sample with an unreadable file is left out, and said."""
    records: list[_Object] = []
    problems: list[str] = []
    with atomic_path(path.with_suffix(".bin")) as temporary, temporary.open("wb") as file:
        for number, sample in enumerate(info.samples):
            try:
                records += [_store(found, file) for found in _objects(sample, root, classes)]
            except BevctlError as error:
                problems.append(f"Sample {sample.token}: {error.message}")
            if progress is not None:
                progress(number + 1, len(info.samples), path.name)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **_arrays(records))
    points = sum(int(record.counts[-1]) for record in records)
    per_class = Counter(record.name for record in records)
    return WrittenDatabase(path, len(records), points, dict(per_class.most_common()), tuple(problems))


def read_gt_database(path: Path) -> GtDatabase:
    """Open a database; its points stay in the file. Raises BevctlError (exit 2) where it is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            names, boxes, starts, counts = (arrays[name] for name in _ARRAYS)
        rows = _open_rows(path.with_suffix(".bin"), int(counts[:, -1].sum()))
    except FileNotFoundError as error:
        raise BevctlError(
            f"There is no object database {error.filename or path}.",
            "Make it: `bevctl data prepare --gt-database …`; or set data.paste to null.",
        ) from None
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        foreign = not isinstance(error, OSError) and not zipfile.is_zipfile(path)
        reason = "it is no .npz file" if foreign else str(error)
        raise BevctlError(
            f"The object database {path} cannot be read: {reason:.200}.",
            "Make it again: `bevctl data prepare --gt-database …`; those of mmdet3d (dbinfos) are not read.",
        ) from None
    return GtDatabase(names, boxes, starts, counts, rows)


def _open_rows(path: Path, count: int) -> Points:
    """The (count, 5) points of a .bin file, not yet read. Raises ValueError where it holds another number of them."""
    size, expected = path.stat().st_size, count * POINT_FEATURES * 4
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, not the {expected} of its {count} points")
    if count == 0:  # nothing to map
        return np.zeros((0, POINT_FEATURES), dtype=np.float32)
    return np.memmap(path, dtype=np.float32, mode="r", shape=(count, POINT_FEATURES))


@dataclass(frozen=True, eq=False)
class _Object:
    name: str
    box: Array
    counts: NDArray[np.int64]
    """Points of the keyframe and of the nearest 0, 1, … sweeps together."""


def _objects(sample: SampleInfo, root: Path, classes: Sequence[str]) -> Iterator[tuple[_Object, Points]]:
    """The objects of a sample with their points, offset from the box centre, nearest sweeps first."""
    if sample.boxes is None:
        return
    cloud = load_points(root, sample, len(sample.sweeps), None)
    sweep = np.concatenate([[0], np.cumsum(np.diff(cloud[:, 4]) != 0)])
    kept = [i for i, name in enumerate(sample.names) if name in classes and sample.valid[i]]
    for i, inside in zip(kept, points_in_boxes(cloud, sample.boxes[kept]), strict=True):
        points = cloud[inside]
        if len(points):
            points[:, :3] -= sample.boxes[i, :3]
            counts = np.cumsum(np.bincount(sweep[inside], minlength=len(sample.sweeps) + 1))
            yield _Object(sample.names[i], sample.boxes[i], counts), points


def _store(found: tuple[_Object, Points], file: IO[bytes]) -> _Object:
    record, points = found
    file.write(points.astype(np.float32).tobytes())
    return record


def _arrays(records: Sequence[_Object]) -> dict[str, Any]:
    """The index as arrays; a sample with fewer sweeps than others has no more points in those."""
    widest = max((len(record.counts) for record in records), default=1)
    counts = [np.pad(record.counts, (0, widest - len(record.counts)), mode="edge") for record in records]
    table = np.array(counts, dtype=np.int32).reshape(-1, widest)
    return {
        "names": np.array([record.name for record in records], dtype=np.str_),
        "boxes": np.array([record.box for record in records]).reshape(-1, 9),
        "starts": np.cumsum(table[:, -1], dtype=np.int64) - table[:, -1],
        "counts": table,
    }
