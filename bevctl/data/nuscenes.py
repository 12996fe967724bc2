"""Samples of a nuScenes-format data set: files read, augmented, and checked for what is absent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bevctl.batch import CAMERAS
from bevctl.config.schema import VEHICLE, Config
from bevctl.data.balance import balanced_positions, frames_by_class
from bevctl.data.index import read_info
from bevctl.data.info import CameraInfo, InfoFile, SampleInfo
from bevctl.data.loader import collate
from bevctl.data.maps import load_map, map_file, map_masks
from bevctl.data.paste import paste_objects
from bevctl.data.previous import PreviousFrames
from bevctl.data.sample import Item, Sample, Transform
from bevctl.data.sweeps import load_points
from bevctl.data.transforms import build_transforms
from bevctl.data.vehicles import around_ego, vehicle_mask
from bevctl.data.views import add_views, read_views
from bevctl.errors import BevctlError
from bevctl.geometry import Array

SPLITS = ("train", "val")
ATTEMPTS = 10
"""Samples tried in training, one in place of another, before an index is given up."""


class NuScenesDataset:
    """Samples of one split; index with (epoch, i) or i.

    Training augments and picks sweeps and earlier images at random, from a generator seeded by (seed, epoch, i);
    evaluation is deterministic. With data.cbgs training goes through a class-balanced draw of the samples, in which a
    sample may come several times. An unreadable file leaves a sentence in `Item.problems`; training then takes another
    sample (none after `ATTEMPTS` in a row), evaluation none. Where the config skips a sample, training takes the next
    one: the epoch keeps its length, and the other samples their places and augmentation. `notes` says once what the
    data set lacks.
    The maps it needs are opened here, so that forked loader workers share them.

    Raises BevctlError (exit 2) for a missing data root or an info file that cannot be used.
    """

    collate = staticmethod(collate)
    checkpoint_meta: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Config, split: str, info: InfoFile | None = None) -> None:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        self.config = config
        self.train = split == "train"
        self.root = Path(config.data.root)
        self.info = _read_split(config, self.train) if info is None else info
        self._labels = {name: label for label, name in enumerate(config.data.classes)}
        self._transforms = build_transforms(config, self.train)
        self._paste = self._open_paste()
        balanced = self.train and config.data.cbgs
        self._order = self._balanced() if balanced else np.arange(len(self.info.samples))
        self._skipped = self._find_skipped() if self.train else frozenset()
        names = [*CAMERAS, *sorted({name for sample in self.info.samples for name in sample.cameras} - set(CAMERAS))]
        self.cameras = tuple(n for n in names if any(n in sample.cameras for sample in self.info.samples))
        self._previous = self._find_previous()
        self.locations = self._find_maps()
        self.notes = tuple(self._describe_absent())

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int | tuple[int, int]) -> Item:
        epoch, position = index if isinstance(index, tuple) else (0, index)
        rng = self.generator(epoch, position)
        problems: list[str] = []
        for _ in range(ATTEMPTS if self.train else 1):
            while position in self._skipped:
                position = (position + 1) % len(self)
            info = self.info_at(position)
            try:
                return Item(self._load(info, epoch, rng), tuple(problems))
            except BevctlError as error:
                problems.append(f"Sample {info.token}: {error.message}")
                position = int(rng.integers(len(self)))
        return Item(None, tuple(problems))

    def info_at(self, position: int) -> SampleInfo:
        """What the info file says about the sample at a position of this data set, skipped or not."""
        return self.info.samples[self._order[position]]

    def position_of(self, token: str) -> int:
        """The first position of a sample. Raises BevctlError (exit 2) where there is none."""
        for position in range(len(self)):
            if self.info_at(position).token == token:
                return position
        raise BevctlError(f"There is no sample {token} in {self.info.path}.", "Give a token of that file, or an index.")

    def generator(self, epoch: int, position: int) -> np.random.Generator:
        """Whatever is random about a sample comes from this."""
        return np.random.default_rng([self.config.seed, epoch, position])

    def _balanced(self) -> NDArray[np.int64]:
        return balanced_positions(self.info.samples, self.config.data.classes, self.config.seed)

    def _open_paste(self) -> Transform | None:
        paste = self.config.data.paste
        if paste is None or not self.train or not self.config.data.augment or not self._needs_points():
            return None
        return paste_objects(self.config, paste)

    def _find_skipped(self) -> frozenset[int]:
        """Positions of the samples that the config leaves out of training."""
        positions = {sample.token: position for position, sample in enumerate(self.info.samples)}
        unknown = [token for token in self.config.data.skip_samples if token not in positions]
        if unknown:
            raise BevctlError(
                f"data.skip_samples: {self.info.path} has no sample {unknown[0]}.",
                "Take tokens of that file that this set does not have out of data.skip_samples.",
            )
        left_out = [positions[token] for token in self.config.data.skip_samples]
        skipped = frozenset(np.flatnonzero(np.isin(self._order, left_out)).tolist())
        if len(skipped) == len(self):
            raise BevctlError("data.skip_samples leaves no sample to train on.", "Take some tokens out of it.")
        return skipped

    def _load(self, info: SampleInfo, epoch: int, rng: np.random.Generator) -> Sample:
        sample = self.bare_sample(info)
        for step in self.steps(info, epoch).values():
            sample = step(sample, rng)
        return sample

    def bare_sample(self, info: SampleInfo) -> Sample:
        """What the info file itself says about a sample; `steps` turn it into what the model gets."""
        boxes, labels = self._targets(info)
        nothing = np.zeros((0, 4, 4))
        sample = Sample(
            token=info.token,
            images=None,
            points=None,
            intrinsics=nothing,
            camera2lidar=nothing,
            times=np.zeros(0),
            image_aug=nothing,
            lidar_aug=np.eye(4),
            boxes=boxes,
            labels=labels,
            has_boxes=info.boxes is not None,
        )
        return self._with_views(sample, info, info.cameras)

    def steps(self, info: SampleInfo, epoch: int) -> dict[str, Transform]:
        """What is done to the `bare_sample` of `info` in an epoch, by name and in order; reading comes first."""
        steps: dict[str, Transform] = {}
        previous = self._previous
        if previous is not None:
            steps["choose previous frame"] = lambda sample, rng: self._with_views(
                sample, info, previous.images(info, self.cameras, rng)
            )
        if self.config.model.camera is not None:
            steps["read images"] = lambda sample, _: read_views(self.root, self.cameras, sample)
        if self._needs_points():
            steps["read points"] = lambda sample, rng: dataclasses.replace(sample, points=self._read_points(info, rng))
        paste = self.config.data.paste
        if self._paste is not None and paste is not None and epoch < paste.stop_epoch:
            steps["paste objects"] = self._paste
        steps |= self._transforms
        if self.config.model.map is not None:
            steps["draw map"] = lambda sample, _: dataclasses.replace(
                sample, bev_map=self._map_of(info, sample.lidar_aug)
            )
        return steps

    def _needs_points(self) -> bool:
        return self.config.model.reads_points

    def _read_points(self, info: SampleInfo, rng: np.random.Generator) -> NDArray[np.float32]:
        data = self.config.data
        random = self.train if data.sweep_choice == "auto" else data.sweep_choice == "random"
        return load_points(self.root, info, data.sweeps, rng if random else None, data.sweep_pose)

    def _with_views(self, sample: Sample, info: SampleInfo, images: Mapping[str, CameraInfo]) -> Sample:
        return add_views(sample, tuple(images.get(name) for name in self.cameras), info.timestamp)

    def _find_previous(self) -> PreviousFrames | None:
        config = self.config.data.previous
        if config is None or self.config.model.camera is None:
            return None
        return PreviousFrames(self.info, config, self.train)

    def _targets(self, info: SampleInfo) -> tuple[Array, NDArray[np.int64]]:
        """Boxes of the trained classes with at least one LiDAR or radar point, and their labels."""
        if info.boxes is None:
            return np.zeros((0, 9)), np.zeros(0, dtype=np.int64)
        labels = np.array([self._labels.get(name, -1) for name in info.names], dtype=np.int64)
        kept = (labels >= 0) & info.valid
        return info.boxes[kept], labels[kept]

    @property
    def _map_layers(self) -> tuple[str, ...]:
        """The map classes that are drawn from the map, in their order."""
        return tuple(name for name in self.config.data.map_classes if name != VEHICLE)

    def _find_maps(self) -> frozenset[str]:
        """Locations whose map expansion is there, opened."""
        if self.config.model.map is None or not self._map_layers:
            return frozenset()
        wanted = {sample.location for sample in self.info.samples if sample.location}
        found = frozenset(location for location in wanted if map_file(self.root, location).is_file())
        for location in found:
            load_map(str(self.root), location)
        return found

    def _map_of(self, info: SampleInfo, lidar_aug: Array) -> NDArray[np.uint8] | None:
        """(K, X, Y) 0/1 of all map classes; None where one of them cannot be known."""
        head = self.config.model.map
        assert head is not None, "only a map head asks for it"
        masks: dict[str, NDArray[np.uint8]] = {}
        if self._map_layers:
            if info.location not in self.locations:
                return None
            layers = load_map(str(self.root), info.location or "")
            drawn = map_masks(layers, self._map_layers, info.lidar2global, lidar_aug, head.xbound, head.ybound)
            masks = dict(zip(self._map_layers, drawn, strict=True))
        if VEHICLE in self.config.data.map_classes:
            origin = around_ego(info) if self.config.data.vehicle_origin == "ego" else np.eye(4)
            vehicles = vehicle_mask(info, lidar_aug @ origin, head.xbound, head.ybound)
            if vehicles is None:
                return None
            masks[VEHICLE] = vehicles
        return np.stack([masks[name] for name in self.config.data.map_classes])

    def _describe_absent(self) -> Iterable[str]:
        """One sentence for each thing that the configured model would use and the data set lacks."""
        samples, total = self.info.samples, len(self.info.samples)
        yield from self.info.notes
        if self.train and self.config.data.cbgs:
            yield self._describe_balance()
        if self._paste is not None and self.config.model.camera is not None:
            yield "Pasted objects are in the point cloud and among the boxes, but not in the images (data.paste)."
        if self.config.model.object is not None:
            bare = sum(sample.boxes is None for sample in samples)
            if bare:
                yield f"{bare} of {total} samples have no boxes; they are left out of the detection loss."
        if self.config.model.camera is not None:
            yield from _describe_absent_cameras(samples)
        if self._previous is not None:
            yield from self._previous.notes()
        if self.config.model.map is not None:
            yield from self._describe_absent_maps()

    def _describe_balance(self) -> str:
        shown = frames_by_class(self.info.samples, self.config.data.classes)
        absent = [name for name in self.config.data.classes if name not in shown]
        missing = f"; there are no objects of {', '.join(absent)}" if absent else ""
        return f"CBGS draws {len(self)} times from {len(self.info.samples)} samples{missing}."

    def _describe_absent_maps(self) -> Iterable[str]:
        total = len(self.info.samples)
        bare = sum(sample.boxes is None for sample in self.info.samples)
        if VEHICLE in self.config.data.map_classes and bare:
            yield f"{bare} of {total} samples have no boxes to draw vehicles from; they are left out of the map loss."
        if not self._map_layers:
            return
        nowhere = sum(sample.location is None for sample in self.info.samples)
        if nowhere:
            yield (
                f"{nowhere} of {total} samples of {self.info.path.name} name no map location; they are left out of the "
                "map loss (`bevctl data prepare` writes it)."
            )
        for location in sorted({s.location for s in self.info.samples if s.location} - self.locations):
            count = sum(sample.location == location for sample in self.info.samples)
            yield (
                f"There is no {map_file(self.root, location)}; the {count} samples of {location} are left out of the "
                "map loss (it comes with the nuScenes map expansion)."
            )


def _describe_absent_cameras(samples: Sequence[SampleInfo]) -> Iterable[str]:
    for name in CAMERAS:
        missing = sum(name not in sample.cameras for sample in samples)
        if missing:
            yield f"{missing} of {len(samples)} samples have no {name}; the model sees nothing there."


def _read_split(config: Config, train: bool) -> InfoFile:
    """The info file that the config names for a split."""
    root = Path(config.data.root)
    if not root.is_dir():
        raise BevctlError(
            f"The data root {root} does not exist.",
            f"Set data.root to a nuScenes folder, or make a small synthetic set: `bevctl data synth {root}`.",
        )
    path = root / (config.data.info_train if train else config.data.info_val)
    if not path.is_file():
        raise BevctlError(
            f"There is no info file {path}.",
            f"Make it from the tables: `bevctl data prepare --root {root} --version v1.0-trainval`; or set "
            f"data.info_{'train' if train else 'val'}.",
        )
    info = read_info(path, config.data.box_convention)
    if not info.samples:
        raise BevctlError(f"{path} holds no samples.", "Give an info file of another split.")
    return info
