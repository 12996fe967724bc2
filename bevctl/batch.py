"""The one contract between data, models and evaluation: `Batch` goes in, losses or `Predictions` come out.

Frames. "LiDAR" is the sensor frame of the keyframe sweep after augmentation, in metres: on the nuScenes car x points
right, y forward, z up.
Everything bird's-eye-view is (..., X, Y): the first spatial axis is LiDAR x, the second LiDAR y.
Boxes are rows (x, y, z, l, w, h, yaw, vx, vy): *gravity* centre, length along the heading, yaw counter-clockwise from
LiDAR x to the heading, velocity in m/s in the LiDAR frame (NaN where unknown, which is legitimate).
Views are the images of a sample: V = frames × N cameras, the N of the keyframe first, then the N of an earlier frame in
the same order of cameras. Everything is in the keyframe's LiDAR frame, whenever its image was taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

OBJECT_CLASSES = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)
MAP_CLASSES = ("drivable_area", "ped_crossing", "walkway", "stop_line", "carpark_area", "divider")
CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")


def _map_tensors(value: Any, function: Any) -> Any:
    """`function` applied to each tensor inside a tensor, list, or dataclass; other values pass through."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list):
        return [_map_tensors(item, function) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


@dataclass(frozen=True)
class Calibration:
    """Geometry of a batch; 4×4 matrices act on column vectors, float32."""

    intrinsics: Tensor
    """(B, V, 4, 4) camera frame → pixels of the *source* image (before augmentation)."""
    camera2lidar: Tensor
    """(B, V, 4, 4) camera frame at the image's time → LiDAR frame of the keyframe *before* augmentation: the motion of
    the car in between is in it."""
    lidar2image: Tensor
    """(B, V, 4, 4) LiDAR frame before augmentation → source pixels, homogeneous (u·d, v·d, d, 1)."""
    image_aug: Tensor
    """(B, V, 4, 4) source pixels → pixels of the network's image: [:2, :2] linear part, [:2, 3] translation."""
    lidar_aug: Tensor
    """(B, 4, 4) LiDAR frame → augmented LiDAR frame (rotation · scale, translation, flips)."""
    times: Tensor
    """(B, V) age of each image, s: time of the keyframe's LiDAR sweep - time of the image."""


@dataclass(frozen=True)
class Batch:
    """B samples. A sensor that the data lacks or the model does not use is None."""

    images: Tensor | None
    """(B, V, 3, H, W): uint8 RGB (normalised on the device by the model) or float, already normalised."""
    points: list[Tensor] | None
    """B × (P_i, 5) float32: x, y, z (m, augmented LiDAR frame), intensity 0..255, dt ≥ 0 s (0 in the keyframe)."""
    calibration: Calibration
    boxes: list[Tensor]
    """B × (n_i, 9) float32, see the module's docstring; empty where not annotated."""
    labels: list[Tensor]
    """B × (n_i,) int64 index into the config's object classes."""
    bev_map: Tensor | None
    """(B, K, X, Y) float32 0/1 of the map grid, K map classes; None where no sample has one."""
    has_boxes: Tensor
    """(B,) bool: False masks the sample in the detection loss."""
    has_map: Tensor
    """(B,) bool: False masks the sample in the map loss."""
    tokens: list[str] = field(default_factory=list)
    """B sample tokens (or other stable ids)."""
    padding: Tensor | None = None
    """(B, V, H, W) bool, True on pixels that fill an image up to the network's size; None where nothing is filled."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each unreadable file met while the batch was made (training: replaced by another sample;
    evaluation: the sample is left out, so that B may be smaller, even 0)."""

    @property
    def size(self) -> int:
        return len(self.boxes)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed."""
        changed: Batch = _map_tensors(self, change)
        return changed

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`."""
        return self.map_tensors(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory; DataLoader calls this."""
        return self.map_tensors(lambda t: t.pin_memory())


SomeBatch = TypeVar("SomeBatch", bound="AnyBatch")


class AnyBatch(Protocol):
    """What the engine asks of a batch; only the model that it is for looks inside."""

    @property
    def size(self) -> int: ...

    @property
    def tokens(self) -> list[str]: ...

    @property
    def problems(self) -> list[str]: ...

    def map_tensors(self: SomeBatch, change: Callable[[Tensor], Tensor]) -> SomeBatch: ...

    def to(self: SomeBatch, device: torch.device | str, non_blocking: bool = False) -> SomeBatch: ...

    def pin_memory(self: SomeBatch) -> SomeBatch: ...


@dataclass(frozen=True)
class Predictions:
    """What a model says about a batch. A task without a head is None."""

    boxes: list[Tensor] | None = None
    """B × (n_i, 9) float32, gravity centre, augmented LiDAR frame."""
    scores: list[Tensor] | None = None
    """B × (n_i,) float32 in 0..1, descending."""
    labels: list[Tensor] | None = None
    """B × (n_i,) int64."""
    bev_map: Tensor | None = None
    """(B, K, X, Y) float32 probabilities."""

    def to(self, device: torch.device | str) -> Predictions:
        moved: Predictions = _map_tensors(self, lambda t: t.to(device))
        return moved
