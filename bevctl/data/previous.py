"""The images of an earlier moment: which one a sample sees, and from where.

Their poses end in the keyframe's LiDAR frame: camera → world at the image's own time → LiDAR at the keyframe's. What
stands still in the world therefore stands still in that frame, whatever the car did in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from bevctl.config.schema import PreviousFrameConfig
from bevctl.data.info import CameraInfo, CameraSweeps, InfoFile, SampleInfo
from bevctl.geometry import Array, invert_rigid

CAMERA_PERIOD = 1 / 12
"""s between images of a camera of nuScenes."""
KEYFRAME_PERIOD = 0.5
SWEEPS_PER_KEYFRAME = 6
LONGEST_PAUSE = 1.0
"""Samples that are further apart are of two scenes, where the info file does not name scenes, s."""


def usual_age(config: PreviousFrameConfig, place: int) -> float:
    """How long before the keyframe the images of a place were taken in nuScenes, s."""
    return (place + 1) * (CAMERA_PERIOD if config.source == "sweeps" else KEYFRAME_PERIOD)


class PreviousFrames:
    """Chooses an earlier moment for each sample of an info file, as `data.previous` says.

    Places count back in time from 0; one beyond the first moment of a scene means that moment. Where the file holds no
    camera sweeps, a keyframe stands for the `SWEEPS_PER_KEYFRAME` places up to it.
    """

    def __init__(self, info: InfoFile, config: PreviousFrameConfig, train: bool) -> None:
        self._info, self._config = info, config
        self._random = train if config.choice == "auto" else config.choice == "random"
        stored = any(len(sample.camera_sweeps) for sample in info.samples)
        self._table = info.camera_sweeps if config.source == "sweeps" and stored else None
        self.stands_in = config.source == "sweeps" and self._table is None
        """Whether keyframes are taken for sweeps that the file does not hold."""
        self.reads_sweeps = self._table is not None

    def images(self, sample: SampleInfo, cameras: Sequence[str], rng: np.random.Generator) -> dict[str, CameraInfo]:
        """The images that `cameras` took at an earlier moment, as seen from the keyframe of `sample`.

        A camera that has none at that moment gives its nearest in time; one without any earlier image is left out. The
        first sample of a scene gets its own images again, as old as if neither the car nor anything else had moved.
        """
        place = self._place(rng)
        moments = self.moments(sample)
        if len(moments) == 0:
            return {name: self._aged(image, place) for name, image in sample.cameras.items()}
        place = min(place // SWEEPS_PER_KEYFRAME if self.stands_in else place, len(moments) - 1)
        nearest_first = sorted(range(len(moments)), key=lambda i: (abs(i - place), i))
        found = {
            name: next((image for i in nearest_first if (image := moments.image(i, name)) is not None), None)
            for name in cameras
        }
        return {name: image for name, image in found.items() if image is not None}

    def moments(self, sample: SampleInfo) -> _Sweeps | _Keyframes:
        """The earlier moments of a sample, nearest in time first."""
        if self._table is not None:
            return _Sweeps(self._table, sample)
        return _Keyframes(list(self._earlier_keyframes(sample)), sample)

    def notes(self) -> Iterator[str]:
        """One sentence for each thing that is not as the config asks."""
        name, total = self._info.path.name, len(self._info.samples)
        if self.stands_in:
            yield (
                f"{name} holds no camera sweeps; earlier keyframes stand in for them (`bevctl data prepare` writes "
                "them)."
            )
        alone = sum(len(self.moments(sample)) == 0 for sample in self._info.samples)
        if alone:
            yield f"{alone} of {total} samples of {name} have no earlier images; they see their own twice."

    def _place(self, rng: np.random.Generator) -> int:
        if not self._random:
            return self._config.eval
        first, last = self._config.train
        return int(rng.integers(first, last + 1))

    def _aged(self, image: CameraInfo, place: int) -> CameraInfo:
        """The image, taken as long ago as images of `place` usually are: velocity is a way over this time."""
        return dataclasses.replace(image, timestamp=image.timestamp - usual_age(self._config, place))

    def _earlier_keyframes(self, sample: SampleInfo) -> Iterator[SampleInfo]:
        token = sample.token
        while token in self._before:
            earlier = self._before[token]
            yield earlier
            token = earlier.token

    @cached_property
    def _before(self) -> Mapping[str, SampleInfo]:
        return _predecessors(self._info.samples)


@dataclass(frozen=True, eq=False)
class _Sweeps:
    """Earlier images out of the table of an info file."""

    table: CameraSweeps
    sample: SampleInfo

    def __len__(self) -> int:
        return len(self.sample.camera_sweeps)

    def image(self, place: int, camera: str) -> CameraInfo | None:
        """As seen from the keyframe; None where the camera has none at that place."""
        columns = self.table.cameras
        index = int(self.sample.camera_sweeps[place, columns.index(camera)]) if camera in columns else -1
        return None if index < 0 else self.table.image(index, self._global2lidar)

    @cached_property
    def _global2lidar(self) -> Array:
        return invert_rigid(self.sample.lidar2global)


@dataclass(frozen=True, eq=False)
class _Keyframes:
    """Earlier samples of the same scene."""

    earlier: Sequence[SampleInfo]
    sample: SampleInfo

    def __len__(self) -> int:
        return len(self.earlier)

    def image(self, place: int, camera: str) -> CameraInfo | None:
        """As seen from the keyframe; None where the camera has none at that place."""
        earlier = self.earlier[place]
        if camera not in earlier.cameras:
            return None
        image = earlier.cameras[camera]
        moved = invert_rigid(self.sample.lidar2global) @ earlier.lidar2global @ image.camera2lidar
        return dataclasses.replace(image, camera2lidar=moved)


def _predecessors(samples: Sequence[SampleInfo]) -> dict[str, SampleInfo]:
    """The sample before each one of the same scene, by token; the first of a scene has none."""
    in_order = sorted(samples, key=lambda sample: (_drive(sample), sample.timestamp))
    return {later.token: earlier for earlier, later in pairwise(in_order) if _follows(earlier, later)}


def _follows(earlier: SampleInfo, later: SampleInfo) -> bool:
    same = _drive(earlier) == _drive(later)
    pause = later.timestamp - earlier.timestamp
    return same and pause > 0 and (later.scene is not None or pause <= LONGEST_PAUSE)


def _drive(sample: SampleInfo) -> str:
    """The scene, or where the file does not say, what nuScenes' file names begin with: car and start of the drive."""
    return sample.scene or PurePath(sample.lidar_path).name.partition("__")[0]
