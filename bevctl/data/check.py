"""What an info file holds, and which of the files it names are there and whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from bevctl.data.files import image_is_whole, points_are_whole
from bevctl.data.index import locate, missing_files, read_info
from bevctl.data.info import InfoFile, SampleInfo
from bevctl.data.sweeps import LIDAR
from bevctl.errors import BevctlError

Progress = Callable[[int, int, str], None]
"""Called with (samples done, samples in all, name of the file)."""


@dataclass(frozen=True)
class CheckedInfo:
    """The outcome for one info file."""

    path: Path
    format: str
    version: str
    box_convention: str
    samples: int
    sweeps: int
    boxes: int
    per_class: dict[str, int]
    files: int
    """Image and LiDAR files that the samples name."""
    missing: dict[str, int]
    """Files that are not there, by sensor; sensors without a gap are left out."""
    first_missing: str | None
    damaged: dict[str, int]
    """Files that are cut short or not of their kind, by sensor."""
    first_damaged: str | None
    camera_sweeps: int
    """Images that samples look back on, each counted once."""
    camera_sweeps_missing: dict[str, int]
    """Those that are not there, by camera; only data.previous reads them."""
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing and not self.damaged


def find_info_files(root: Path) -> list[Path]:
    """Info files directly in `root`, by name; object databases are not among them. Raises BevctlError (exit 2)."""
    if not root.is_dir():
        raise BevctlError(
            f"The data root {root} does not exist.",
            f"Give a nuScenes folder, or make a small synthetic set: `bevctl data synth {root}`.",
        )
    found = sorted(path for path in root.glob("*.pkl") if "dbinfos" not in path.name)
    if not found:
        raise BevctlError(
            f"There is no info file (*.pkl) in {root}.",
            f"Make them from the tables: `bevctl data prepare --root {root} --version v1.0-mini`.",
        )
    return found


def check_info(path: Path, root: Path, progress: Progress | None = None) -> CheckedInfo:
    """Read `path` and look below `root` at each file it names: is it there, and as long as it should be? Contents are
    not looked at. Raises BevctlError (exit 2) if it is no info file."""
    info = read_info(path)
    total, missing, damaged = 0, _Tally(), _Tally()
    for index, sample in enumerate(info.samples):
        for sensor, name in _files_of(sample):
            total += 1
            found = locate(root, name, sensor)
            if found is None:
                missing.add(sensor, name)
            elif not (points_are_whole(found) if sensor == LIDAR else image_is_whole(found)):
                damaged.add(sensor, name)
        if progress is not None:
            progress(index + 1, len(info.samples), path.name)
    return CheckedInfo(
        path=path,
        format=info.format,
        version=info.version,
        box_convention=info.box_convention,
        samples=len(info.samples),
        sweeps=sum(len(sample.sweeps) for sample in info.samples),
        boxes=sum(len(sample.names) for sample in info.samples),
        per_class=_count_classes(info),
        files=total,
        missing=dict(sorted(missing.counts.items())),
        first_missing=missing.first,
        damaged=dict(sorted(damaged.counts.items())),
        first_damaged=damaged.first,
        camera_sweeps=0 if info.camera_sweeps is None else len(info.camera_sweeps.paths),
        camera_sweeps_missing=_missing_sweeps(info, root),
        notes=info.notes,
    )


class _Tally:
    """Counts files by sensor, and keeps the name of the first."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: str | None = None

    def add(self, sensor: str, name: str) -> None:
        self.counts[sensor] += 1
        self.first = self.first or name


def _missing_sweeps(info: InfoFile, root: Path) -> dict[str, int]:
    """By camera, which is the folder of an image."""
    by_camera: dict[str, list[str]] = {}
    for path in info.camera_sweeps.paths.tolist() if info.camera_sweeps is not None else ():
        name = os.fsdecode(path)
        by_camera.setdefault(PurePath(name).parent.name, []).append(name)
    counts = {camera: len(missing_files(root, names, camera)) for camera, names in by_camera.items()}
    return {camera: count for camera, count in sorted(counts.items()) if count}


def _files_of(sample: SampleInfo) -> Iterator[tuple[str, str]]:
    """(sensor, name) of every file of a sample."""
    yield LIDAR, sample.lidar_path
    for sweep in sample.sweeps:
        yield LIDAR, sweep.path
    for name, camera in sample.cameras.items():
        yield name, camera.path


def _count_classes(info: InfoFile) -> dict[str, int]:
    counts = Counter(name for sample in info.samples for name in sample.names)
    return dict(counts.most_common())
