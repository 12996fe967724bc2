"""What an info file holds, and which of the files it names are there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

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
    camera_sweeps: int
    """Images that samples look back on, each counted once."""
    camera_sweeps_missing: dict[str, int]
    """Those that are not there, by camera; only data.previous reads them."""
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing


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
    """Read `path` and look below `root` for each file it names. Raises BevctlError (exit 2) if it is no info file."""
    info = read_info(path)
    total, missing, first = 0, Counter[str](), None
    for index, sample in enumerate(info.samples):
        for sensor, name in _files_of(sample):
            total += 1
            if locate(root, name, sensor) is None:
                missing[sensor] += 1
                first = first or name
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
        missing=dict(sorted(missing.items())),
        first_missing=first,
        camera_sweeps=0 if info.camera_sweeps is None else len(info.camera_sweeps.paths),
        camera_sweeps_missing=_missing_sweeps(info, root),
        notes=info.notes,
    )


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
