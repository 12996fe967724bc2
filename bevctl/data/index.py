"""Info files of every usual layout, read into one form; and where the files they name really lie."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.data import layout_data_list, layout_infos, layout_petr
from bevctl.data.conventions import detect_convention, to_lwh
from bevctl.data.info import IGNORED, CameraInfo, CameraSweeps, InfoFile, SampleInfo, SweepInfo
from bevctl.data.unpickle import load_pickle
from bevctl.errors import BevctlError, ExitCode
from bevctl.garbage import no_collection

__all__ = ["IGNORED", "CameraInfo", "InfoFile", "SampleInfo", "SweepInfo", "locate", "read_info", "resolve"]


@no_collection()
def read_info(path: str | Path, box_convention: str = "auto") -> InfoFile:
    """Everything in an info file of mmdet3d (0.x, 1.0, 1.1 and newer), mit-bevfusion or PETR.

    `box_convention` says how boxes are stored: "lwh", "wlh" (see `bevctl.data.conventions`), or "auto" to tell it
    from the shapes of the objects. Raises BevctlError (exit 2) for a file that is not such a file.
    """
    path = Path(path)
    document = load_pickle(path)
    if not isinstance(document, Mapping) or not ({"data_list", "metainfo"} <= set(document) or "infos" in document):
        raise BevctlError(
            f"{path} is not an info file that bevctl knows: it holds {_describe(document)}.",
            "Known are files with `data_list` and `metainfo` (mmdet3d 1.1), or `infos` and `metadata` (mmdet3d 0.x and "
            "1.0, mit-bevfusion, PETR); `bevctl data prepare` makes one from nuScenes tables.",
        )
    newer = "data_list" in document
    samples = _read_data_list(path, document) if newer else _read_infos(path, document)
    camera_sweeps, samples = _read_camera_sweeps(path, document, samples)
    samples, left_out = _without_broken(samples)
    convention, note = _decide_convention(
        samples, box_convention, newer and not layout_data_list.is_early(document["metainfo"])
    )
    return InfoFile(
        path=path,
        format=layout_data_list.format_of(document["metainfo"])
        if newer
        else layout_infos.format_of(document, convention),
        version=str((document["metainfo"] if newer else document.get("metadata", {})).get("version", "unknown")),
        samples=_with_boxes(samples, convention),
        box_convention=convention,
        notes=tuple(filter(None, (note, left_out))),
        camera_sweeps=camera_sweeps,
    )


def _describe(document: Any) -> str:
    if isinstance(document, Mapping):
        return f"a dict with the keys {', '.join(map(repr, list(document)[:8])) or '(none)'}"
    return f"a {type(document).__name__}"


def _read_data_list(path: Path, document: Mapping[str, Any]) -> list[SampleInfo]:
    metainfo = document["metainfo"]
    names, early = layout_data_list.class_names(metainfo), layout_data_list.is_early(metainfo)
    return _read_all(path, document["data_list"], lambda entry: layout_data_list.read_sample(entry, names, early))


def _read_infos(path: Path, document: Mapping[str, Any]) -> list[SampleInfo]:
    return _read_all(path, document["infos"], layout_infos.read_sample)


def _read_all(path: Path, entries: Any, read: Callable[[Any], SampleInfo]) -> list[SampleInfo]:
    samples = []
    for index, entry in enumerate(entries):
        try:
            samples.append(_with_names(read(entry)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BevctlError(
                f"Sample {index} of {path} cannot be read: {type(error).__name__}: {error}.",
                "The file is damaged or of a layout that bevctl does not know; rebuild it with `bevctl data prepare`.",
            ) from None
    return samples


def _with_names(sample: SampleInfo) -> SampleInfo:
    """The sample itself. Raises ValueError where not every box has a name."""
    if sample.boxes is not None and len(sample.boxes) != len(sample.names):
        raise ValueError(f"{len(sample.boxes)} boxes have {len(sample.names)} names")
    return sample


def _read_camera_sweeps(
    path: Path, document: Mapping[str, Any], samples: list[SampleInfo]
) -> tuple[CameraSweeps | None, list[SampleInfo]]:
    try:
        if "data_list" in document:
            return layout_data_list.read_camera_sweeps(document, samples), samples
        return layout_petr.read_camera_sweeps(document["infos"], samples)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, np.linalg.LinAlgError) as error:
        raise BevctlError(
            f"The camera sweeps of {path} cannot be read: {type(error).__name__}: {error}.",
            "The file is damaged or of a layout that bevctl does not know; rebuild it with `bevctl data prepare`.",
        ) from None


def _decide_convention(samples: list[SampleInfo], asked: str, modern: bool) -> tuple[str, str]:
    """The box convention, and a sentence where it could not be told from the boxes."""
    annotated = [(sample.boxes, sample.names) for sample in samples if sample.boxes is not None]
    if asked != "auto":
        return asked, f"Boxes are read as {asked}, as asked."
    found = detect_convention(annotated)
    assumed = "lwh" if modern else "wlh"
    if found is not None or not any(names for _, names in annotated):
        return found or assumed, ""
    return assumed, (
        f"No object shows how the boxes are stored; {assumed} is assumed for this layout (data.box_convention sets it)."
    )


def _with_boxes(samples: list[SampleInfo], convention: str) -> tuple[SampleInfo, ...]:
    """Samples with boxes in the project's convention.

    mmdet3d drops the empty list of a sample without objects: where others have objects, that sample has none.
    """
    annotated = any(sample.boxes is not None for sample in samples)
    empty = np.zeros((0, 9)) if annotated else None
    return tuple(
        dataclasses.replace(sample, boxes=empty if sample.boxes is None else to_lwh(sample.boxes, convention))
        for sample in samples
    )


def _without_broken(samples: list[SampleInfo]) -> tuple[list[SampleInfo], str]:
    """Samples without the boxes of which a number is not finite, or a side not above zero, and a sentence that counts
    them: nothing can be learned from those, and the devkit's evaluation refuses them."""
    sound = [_sound(sample) for sample in samples]
    count = sum(0 if kept is None else int((~kept).sum()) for kept in sound)
    if not count:
        return samples, ""
    boxes = "1 annotated box is" if count == 1 else f"{count} annotated boxes are"
    note = f"{boxes} left out: a number that is not finite, or a side that is not above zero."
    return list(map(_only, samples, sound)), note


def _sound(sample: SampleInfo) -> NDArray[np.bool_] | None:
    """(n,) which boxes of a sample can be; None where it is not annotated."""
    if sample.boxes is None:
        return None
    sound: NDArray[np.bool_] = np.isfinite(sample.boxes[:, :7]).all(axis=1) & (sample.boxes[:, 3:6] > 0).all(axis=1)
    return sound


def _only(sample: SampleInfo, kept: NDArray[np.bool_] | None) -> SampleInfo:
    """The sample with some of its boxes."""
    if sample.boxes is None or kept is None or kept.all():
        return sample
    return dataclasses.replace(
        sample,
        boxes=sample.boxes[kept],
        names=tuple(itertools.compress(sample.names, kept)),
        num_lidar_pts=sample.num_lidar_pts[kept],
        num_radar_pts=sample.num_radar_pts[kept],
        valid=sample.valid[kept],
        attributes=tuple(itertools.compress(sample.attributes, kept)),
    )


def locate(root: str | Path, name: str, sensor: str) -> Path | None:
    """The file that an info file calls `name`, or None. Tried in order: the path as given, below `root`, below
    `root`/samples/`sensor` and `root`/sweeps/`sensor`, and, for a path stored with another machine's root, its part
    from samples/ or sweeps/ on below `root`."""
    return next((path for path in _candidates(Path(root), name, sensor) if path.is_file()), None)


def resolve(root: str | Path, name: str, sensor: str) -> Path:
    """`locate`, or BevctlError (exit 4) where there is no such file."""
    found = locate(root, name, sensor)
    if found is None:
        raise BevctlError(
            f"{sensor} file {name!r} is not in {root}.",
            "`bevctl data check` counts what is missing; data.root sets the folder.",
            ExitCode.RUN_FAILED,
        )
    return found


def missing_files(root: str | Path, names: Sequence[str], sensor: str) -> list[str]:
    """Those of `names` that `locate` would not find; each folder is listed once, however many files are looked for."""
    there: dict[Path, frozenset[str]] = {}

    def lies(path: Path) -> bool:
        if path.parent not in there:
            there[path.parent] = _listed(path.parent)
        return path.name in there[path.parent]

    return [name for name in names if not any(lies(path) for path in _candidates(Path(root), name, sensor))]


def _listed(folder: Path) -> frozenset[str]:
    """Names in a folder; none where there is no such folder."""
    try:
        return frozenset(entry.name for entry in os.scandir(folder))
    except OSError:
        return frozenset()


def _candidates(root: Path, name: str, sensor: str) -> Iterator[Path]:
    yield Path(name)
    yield root / name
    yield root / "samples" / sensor / name
    yield root / "sweeps" / sensor / name
    parts = Path(name).parts
    for folder in ("samples", "sweeps"):
        if folder in parts:
            yield root.joinpath(*parts[len(parts) - 1 - parts[::-1].index(folder) :])
