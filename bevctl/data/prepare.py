"""Info files from nuScenes tables: the mmdet3d 1.1 layout, with map location, class and attribute names added.

mmdet3d 1.1 and newer read them too: labels are numbered in its order, sweeps carry true inverses, and the earlier
images of `bevctl.data.prepare_sweeps` lie beside what it knows.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bevctl.batch import CAMERAS
from bevctl.data.info import IGNORED
from bevctl.data.prepare_sweeps import EarlierImages, has_sweeps
from bevctl.data.sweeps import LIDAR
from bevctl.errors import BevctlError
from bevctl.files import atomic_write_bytes
from bevctl.geometry import Array, invert_rigid, quaternion_to_rotation, rigid, yaw_of

CATEGORIES = (
    "car",
    "truck",
    "trailer",
    "bus",
    "construction_vehicle",
    "bicycle",
    "motorcycle",
    "pedestrian",
    "traffic_cone",
    "barrier",
)
"""The number of each class in the files; mmdet3d's order, which is not bevctl's own."""
SPLITS = {
    "v1.0-mini": {"train": "mini_train", "val": "mini_val"},
    "v1.0-trainval": {"train": "train", "val": "val"},
    "v1.0-test": {"test": "test"},
}
"""For each version, the info files to write and the devkit's name of their split."""
MICROSECONDS = 1e-6

Progress = Callable[[int, int, str], None]
"""Called with (samples done, samples in all, name of the file)."""


@dataclass(frozen=True)
class PreparedFile:
    """One info file that was written."""

    path: Path
    split: str
    samples: int
    boxes: int


def prepare(
    root: str | Path,
    version: str,
    *,
    prefix: str = "nuscenes",
    max_sweeps: int = 10,
    camera_sweeps: int = 30,
    progress: Progress | None = None,
) -> tuple[PreparedFile, ...]:
    """Write `<root>/<prefix>_infos_<split>.pkl` for each split of `version` and say what is in them.

    Up to `max_sweeps` earlier LiDAR sweeps and `camera_sweeps` earlier images of each camera a sample, nearest first;
    no images where all are of keyframes. A file is replaced whole or not at all. Raises BevctlError (exit 2) for a
    folder without these tables.
    """
    tables = open_tables(root, version)
    steps = camera_sweeps if has_sweeps(tables) else 0
    written = []
    for name, scenes in _scenes(version).items():
        split = _Split(name, tables, max_sweeps, EarlierImages(tables, steps))
        path = Path(root) / f"{prefix}_infos_{name}.pkl"
        written.append(_write_split(path, split, _samples_of(tables, scenes), progress))
    return tuple(written)


def open_tables(root: str | Path, version: str) -> Any:
    """The devkit's `NuScenes` of a data set. Raises BevctlError (exit 2) where it cannot be opened."""
    root = Path(root)
    if version not in SPLITS:
        raise BevctlError(f"Unknown nuScenes version {version!r}.", f"Known: {', '.join(SPLITS)}.")
    if not (root / version).is_dir():
        raise BevctlError(
            f"There are no tables {root / version}.",
            "Unpack the nuScenes metadata there, or make a small synthetic set: `bevctl data synth DIR`.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the devkit's plotting libraries announce deprecations
            from nuscenes.nuscenes import NuScenes

            return NuScenes(version=version, dataroot=str(root), verbose=False)
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise BevctlError(
            f"The tables in {root / version} cannot be opened: {type(error).__name__}: {error!s:.200}.",
            "Unpack the nuScenes metadata again.",
        ) from error


def _scenes(version: str) -> dict[str, frozenset[str]]:
    """Scene names of each split of a version, as the devkit fixes them."""
    from nuscenes.utils.splits import create_splits_scenes

    names = create_splits_scenes()
    return {split: frozenset(names[devkit]) for split, devkit in SPLITS[version].items()}


def _samples_of(tables: Any, scenes: frozenset[str]) -> list[tuple[Any, str]]:
    """(sample record, location) of the scenes, in the order of the tables and of time."""
    found = []
    for scene in tables.scene:
        if scene["name"] in scenes:
            location = tables.get("log", scene["log_token"])["location"]
            token = scene["first_sample_token"]
            while token:
                sample = tables.get("sample", token)
                found.append((sample, location))
                token = sample["next"]
    return found


@dataclass(frozen=True)
class _Split:
    """What the entries of one info file are made from."""

    name: str
    tables: Any
    max_sweeps: int
    earlier: EarlierImages

    @property
    def annotated(self) -> bool:
        return self.name != "test"


def _write_split(
    path: Path, split: _Split, samples: Sequence[tuple[Any, str]], progress: Progress | None
) -> PreparedFile:
    entries = []
    for index, (sample, location) in enumerate(samples):
        entries.append(_entry(split, index, sample, location))
        if progress is not None:
            progress(index + 1, len(samples), path.name)
    metainfo = {
        "categories": {name: label for label, name in enumerate(CATEGORIES)},
        "dataset": "nuscenes",
        "version": split.tables.version,
        "info_version": "1.1",
    }
    document = {"metainfo": metainfo, "data_list": entries, "camera_sweeps": split.earlier.document()}
    atomic_write_bytes(path, pickle.dumps(document, protocol=4))
    return PreparedFile(path, split.name, len(entries), sum(len(entry.get("instances", ())) for entry in entries))


def _entry(split: _Split, index: int, sample: Any, location: str) -> dict[str, Any]:
    """One element of `data_list`."""
    tables = split.tables
    lidar = tables.get("sample_data", sample["data"][LIDAR])
    lidar2ego, ego2global = _poses(tables, lidar)
    global2lidar = invert_rigid(ego2global @ lidar2ego)
    entry = {
        "sample_idx": index,
        "token": sample["token"],
        "timestamp": lidar["timestamp"] * MICROSECONDS,
        "location": location,
        "scene_token": sample["scene_token"],
        "ego2global": ego2global.tolist(),
        "lidar_points": {
            "num_pts_feats": 5,
            "lidar_path": Path(lidar["filename"]).name,
            "lidar2ego": lidar2ego.tolist(),
        },
        "images": {
            name: _image(tables, sample["data"][name], global2lidar) for name in CAMERAS if name in sample["data"]
        },
        "lidar_sweeps": [_sweep(tables, data, global2lidar) for data in _earlier(tables, lidar, split.max_sweeps)],
        "camera_sweeps": split.earlier.of(sample),
    }
    if split.annotated:
        entry["instances"] = [_instance(tables, token, global2lidar) for token in sample["anns"]]
    return entry


def _poses(tables: Any, sample_data: Any) -> tuple[Array, Array]:
    """sensor2ego and ego2global, (4, 4) each, at the time of a `sample_data` record."""
    sensor = tables.get("calibrated_sensor", sample_data["calibrated_sensor_token"])
    ego = tables.get("ego_pose", sample_data["ego_pose_token"])
    return _pose(sensor), _pose(ego)


def _pose(record: Any) -> Array:
    return rigid(quaternion_to_rotation(record["rotation"]), record["translation"])


def _image(tables: Any, token: str, global2lidar: Array) -> dict[str, Any]:
    data = tables.get("sample_data", token)
    camera2ego, ego2global = _poses(tables, data)
    sensor = tables.get("calibrated_sensor", data["calibrated_sensor_token"])
    return {
        "img_path": Path(data["filename"]).name,
        "cam2img": np.asarray(sensor["camera_intrinsic"], dtype=np.float64).tolist(),
        "cam2ego": camera2ego.tolist(),
        "lidar2cam": invert_rigid(global2lidar @ ego2global @ camera2ego).tolist(),
        "sample_data_token": token,
        "timestamp": data["timestamp"] * MICROSECONDS,
        "height": data["height"],
        "width": data["width"],
    }


def _earlier(tables: Any, lidar: Any, count: int) -> Iterator[Any]:
    """Up to `count` LiDAR records before a keyframe's, nearest first."""
    token = lidar["prev"]
    while token and count > 0:
        data = tables.get("sample_data", token)
        yield data
        token, count = data["prev"], count - 1


def _sweep(tables: Any, data: Any, global2lidar: Array) -> dict[str, Any]:
    lidar2ego, ego2global = _poses(tables, data)
    return {
        "timestamp": data["timestamp"] * MICROSECONDS,
        "sample_data_token": data["token"],
        "ego2global": ego2global.tolist(),
        "lidar_points": {
            "num_pts_feats": 5,
            # with its folder: mmdet3d tells sweeps from keyframes by it
            "lidar_path": data["filename"],
            "lidar2ego": lidar2ego.tolist(),
            "lidar2sensor": invert_rigid(global2lidar @ ego2global @ lidar2ego).tolist(),
        },
    }


def _instance(tables: Any, token: str, global2lidar: Array) -> dict[str, Any]:
    """One annotated object in the LiDAR frame of its keyframe."""
    from nuscenes.eval.detection.utils import category_to_detection_name

    annotation = tables.get("sample_annotation", token)
    pose = global2lidar @ _pose(annotation)
    width, length, height = annotation["size"]
    name = category_to_detection_name(annotation["category_name"])
    label = CATEGORIES.index(name) if name in CATEGORIES else -1
    velocity = global2lidar[:3, :3] @ np.array([*tables.box_velocity(token)[:2], 0.0])
    attributes = [tables.get("attribute", attribute)["name"] for attribute in annotation["attribute_tokens"]]
    return {
        "bbox_3d": [*pose[:3, 3].tolist(), length, width, height, yaw_of(pose)],
        "bbox_label": label,
        "bbox_label_3d": label,
        "name": name or IGNORED,
        "attribute": attributes[0] if attributes else "",
        "velocity": velocity[:2].tolist(),
        "num_lidar_pts": annotation["num_lidar_pts"],
        "num_radar_pts": annotation["num_radar_pts"],
        "bbox_3d_isvalid": annotation["num_lidar_pts"] + annotation["num_radar_pts"] > 0,
        "annotation_token": token,
    }
