"""What to generate, and what came out. Standard library only, so that the command line can read the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevctl.errors import BevctlError

MINI_TRAIN = (
    "scene-0061",
    "scene-0553",
    "scene-0655",
    "scene-0757",
    "scene-0796",
    "scene-1077",
    "scene-1094",
    "scene-1100",
)
MINI_VAL = ("scene-0103", "scene-0916")
VERSIONS = ("v1.0-mini", "v1.0-trainval")
TRAIN_LOCATIONS = ("boston-seaport", "singapore-onenorth", "singapore-queenstown")
VAL_LOCATION = "singapore-hollandvillage"


@dataclass(frozen=True)
class SynthOptions:
    """A synthetic data set in nuScenes format; the defaults give the quickstart's set.

    Raises BevctlError for a value out of range.
    """

    seed: int = 0
    version: str = "v1.0-mini"
    """Name of the tables. The devkit's splits go by scene name; `v1.0-mini` has 8 training and 2 held-out names."""
    train_scenes: int = 8
    val_scenes: int = 2
    keyframes: int = 8
    """Annotated samples a scene, half a second apart."""
    image_scale: float = 0.5
    """Image size over 1600×900; the intrinsics are scaled alike."""
    sweeps: bool = True
    """LiDAR sweeps at 20 Hz between the keyframes."""
    camera_sweeps: bool = False
    """Unannotated images at 10 Hz between the keyframes."""
    azimuth_steps: int = 300
    """LiDAR firings a revolution; the real sensor has about 1084."""
    lidar_beams: int = 32
    """Beams of the LiDAR, from 30.67° below to 10.67° above the horizon; the real sensor has 32."""
    processes: int | None = None
    """Worker processes; None: one a core. Never changes a byte of the result."""

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise BevctlError(f"unknown version {self.version!r}", f"Use one of: {', '.join(VERSIONS)}.")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(self.train_scenes >= 1, "train_scenes", self.train_scenes, "1 or more")
        _require(self.val_scenes >= 0, "val_scenes", self.val_scenes, "0 or more")
        _require(2 <= self.keyframes <= 40, "keyframes", self.keyframes, "2 to 40 (velocity needs two)")
        _require(0.05 <= self.image_scale <= 1.0, "image_scale", self.image_scale, "0.05 to 1")
        _require(36 <= self.azimuth_steps <= 2400, "azimuth_steps", self.azimuth_steps, "36 to 2400")
        _require(2 <= self.lidar_beams <= 128, "lidar_beams", self.lidar_beams, "2 to 128")
        _require(self.processes is None or self.processes >= 1, "processes", self.processes, "1 or more")
        _take(self.train_scenes, self.split_names()[0], "training", self.version)
        _take(self.val_scenes, self.split_names()[1], "held-out", self.version)

    def split_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All scene names that the devkit counts as training and as validation in this version."""
        if self.version == "v1.0-mini":
            return MINI_TRAIN, MINI_VAL
        from nuscenes.utils import splits  # here, as the devkit imports matplotlib and OpenCV

        return tuple(splits.train), tuple(splits.val)

    def scene_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the training and of the held-out scenes to generate."""
        train, val = self.split_names()
        return train[: self.train_scenes], val[: self.val_scenes]


def _require(valid: bool, name: str, value: object, expected: str) -> None:
    if not valid:
        raise BevctlError(f"{name} is {value}", f"Choose {expected}.")


def _take(count: int, names: tuple[str, ...], what: str, version: str) -> None:
    if count > len(names):
        raise BevctlError(
            f"{count} {what} scenes asked for, but the devkit's split of {version} names only {len(names)}",
            "Ask for fewer, or use version v1.0-trainval.",
        )


@dataclass(frozen=True)
class SynthSummary:
    """What `make_dataset` wrote."""

    root: Path
    version: str
    train_scenes: tuple[str, ...]
    val_scenes: tuple[str, ...]
    samples: int
    annotations: int
    images: int
    sweeps: int
    """LiDAR files, those of the keyframes included."""
    bytes: int
    seconds: float
