"""Augmentation and filters: functions (sample, generator) → sample whose matrices say exactly what was done.

Pixel coordinates are continuous with pixel i covering [i, i + 1): resizing is u·s, mirroring is W - u, and the pixel
of a point is the floor of its coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bevctl.config.schema import Config, ImageAugmentConfig, SpaceAugmentConfig
from bevctl.data.files import ImageArray, ImageFile
from bevctl.data.grid_mask import mask_images
from bevctl.data.sample import Sample, Transform
from bevctl.geometry import Array, rotation_z, transform_boxes, transform_points

SOURCE_WIDTH = 1600
"""Width of the image that resize factors are meant for."""
_BLOCK = 8192
"""Points moved at once: few enough for what is computed on the way to stay in the processor's cache."""


@dataclass(frozen=True)
class ImageChange:
    """What is done to one image, in this order."""

    resize: float
    """Factor for an image of `SOURCE_WIDTH`; a narrower one is enlarged accordingly."""
    crop: float = 0.5
    """Horizontal position of the crop: 0 left, 1 right. It is aligned with the bottom."""
    flip: bool = False
    rotate: float = 0.0
    """Degrees, counter-clockwise as seen."""
    pad: bool = False
    """An image lower than what is asked for lies at its top, instead of at its bottom."""


def draw_image_change(config: ImageAugmentConfig, rng: np.random.Generator) -> ImageChange:
    return ImageChange(
        pad=config.pad,
        resize=rng.uniform(*config.resize),
        crop=rng.uniform(0.0, 1.0),
        flip=bool(config.flip and rng.random() < 0.5),
        rotate=rng.uniform(*config.rotate),
    )


def change_image(
    source: ImageArray | ImageFile, change: ImageChange, size: tuple[int, int], draft: bool = False
) -> tuple[ImageArray, Array]:
    """The (height, width) = `size` image, and the 4×4 map from source pixels to its pixels; zeros where no source is.

    The order and the bicubic and nearest filters are those of the published BEVFusion training. With `draft` a JPEG
    that is reduced to a half or less is decoded at a size near the one it gets. Raises BevctlError (exit 4) for a
    truncated file.
    """
    height, width = size
    source_width, source_height = _size_of(source)
    factor = change.resize * SOURCE_WIDTH / source_width
    new_width, new_height = max(1, round(source_width * factor)), max(1, round(source_height * factor))
    left, top = int(change.crop * max(0, new_width - width)), new_height - height
    top = max(0, top) if change.pad else top
    picture = _picture(source, (new_width, new_height) if draft else None)
    picture = _resize_and_crop(picture, (new_width, new_height), (left, top, left + width, top + height))
    matrix = np.diag([new_width / source_width, new_height / source_height, 1.0, 1.0])
    matrix[:2, 3] = -left, -top
    if change.flip:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        matrix = _plane([[-1.0, 0.0], [0.0, 1.0]], [width, 0.0]) @ matrix
    if change.rotate:
        picture = picture.rotate(change.rotate)
        matrix = _rotation_about([width / 2, height / 2], np.deg2rad(change.rotate)) @ matrix
    return np.asarray(picture), matrix


def padding_mask(matrix: Array, source_size: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
    """(height, width) = `size`: True beyond the edges of the changed image's source of (width, height).

    `matrix` (4, 4) is what `change_image` returned. A pixel counts by its centre. The black corners of a turned crop do
    not count where the source goes on.
    """
    height, width = size
    inverse = np.linalg.inv(matrix)
    v, u = np.ogrid[0.5:height, 0.5:width]
    x, y = inverse[0, 0] * u + inverse[0, 3], inverse[1, 1] * v + inverse[1, 3]
    if inverse[0, 1] or inverse[1, 0]:  # turned: a row of the image is no row of the source
        x, y = x + inverse[0, 1] * v, y + inverse[1, 0] * u
    covered: NDArray[np.bool_] = ((x >= 0) & (x < source_size[0])) & ((y >= 0) & (y < source_size[1]))
    return ~covered


def _size_of(source: ImageArray | ImageFile) -> tuple[int, int]:
    """(width, height)"""
    return source.size if isinstance(source, ImageFile) else (source.shape[1], source.shape[0])


def _picture(source: ImageArray | ImageFile, at_least: tuple[int, int] | None) -> Image.Image:
    return source.decode(at_least) if isinstance(source, ImageFile) else Image.fromarray(source)


def _resize_and_crop(picture: Image.Image, size: tuple[int, int], crop: tuple[int, int, int, int]) -> Image.Image:
    """Resize to (width, height), then crop; where the crop lies inside, only its part is computed."""
    left, top, right, bottom = crop
    if left < 0 or top < 0 or right > size[0] or bottom > size[1]:
        return picture.resize(size, Image.Resampling.BICUBIC).crop(crop)
    across, down = picture.width / size[0], picture.height / size[1]
    box = (left * across, top * down, min(right * across, picture.width), min(bottom * down, picture.height))
    return picture.resize((right - left, bottom - top), Image.Resampling.BICUBIC, box=box)


def _plane(linear: Sequence[Sequence[float]] | Array, shift: Sequence[float] | Array) -> Array:
    matrix = np.eye(4)
    matrix[:2, :2], matrix[:2, 3] = linear, shift
    return matrix


def _rotation_about(centre: Sequence[float], angle: float) -> Array:
    """Counter-clockwise as seen, hence clockwise in pixel coordinates, whose v axis points down."""
    linear = rotation_z(-angle)[:2, :2]
    return _plane(linear, np.asarray(centre) - linear @ np.asarray(centre))


def augment_images(config: ImageAugmentConfig, size: tuple[int, int], random: bool, draft: bool = False) -> Transform:
    """Each image decoded, resized, cropped, and if `random` flipped and rotated, on its own or all alike."""

    def transform(sample: Sample, rng: np.random.Generator) -> Sample:
        sources = sample.encoded or sample.images
        if not sources:
            return sample
        changes = _draw_changes(config, len(sources), rng if random else None)
        changed = [change_image(source, one, size, draft) for source, one in zip(sources, changes, strict=True)]
        return dataclasses.replace(
            sample,
            images=tuple(image for image, _ in changed),
            image_aug=np.stack(
                [matrix @ before for (_, matrix), before in zip(changed, sample.image_aug, strict=True)]
            ),
            padding=_padding(sources, changed, size) if config.pad else None,
            encoded=(),
        )

    return transform


def _padding(
    sources: Sequence[ImageArray | ImageFile], changed: Sequence[tuple[ImageArray, Array]], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """(V, height, width)"""
    masks: dict[tuple[bytes, tuple[int, int]], NDArray[np.bool_]] = {}
    keys = [(matrix.tobytes(), _size_of(source)) for source, (_, matrix) in zip(sources, changed, strict=True)]
    for key, (_, matrix) in zip(keys, changed, strict=True):
        if key not in masks:
            masks[key] = padding_mask(matrix, key[1], size)
    return np.stack([masks[key] for key in keys])


def _draw_changes(config: ImageAugmentConfig, count: int, rng: np.random.Generator | None) -> list[ImageChange]:
    """What is done to each of `count` images; without a generator, what evaluation does."""
    if rng is None:
        return [ImageChange(config.resize_eval, pad=config.pad)] * count
    if config.shared:
        return [draw_image_change(config, rng)] * count
    return [draw_image_change(config, rng) for _ in range(count)]


def draw_space_change(config: SpaceAugmentConfig, rng: np.random.Generator) -> Array:
    """4×4: p' = F · s · (R p + t) with rotation R about z, translation t, scale s and axis flips F."""
    rotation = rotation_z(rng.uniform(*config.rotate))
    translation = rng.normal(0.0, config.translate, size=3)
    scale = rng.uniform(*config.scale)
    flips = np.where(rng.random(2) < 0.5, -1.0, 1.0) if config.flip else np.ones(2)
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation, translation
    return np.diag([*(scale * flips), scale, 1.0]) @ matrix


def move_space(sample: Sample, matrix: Array) -> Sample:
    """Points, boxes and velocities carried along by a change of the LiDAR frame, which `lidar_aug` records."""
    points = sample.points
    if points is not None:
        points = points.copy()
        for start in range(0, len(points), _BLOCK):
            block = points[start : start + _BLOCK, :3]
            block[...] = transform_points(matrix, block)
    return dataclasses.replace(
        sample,
        points=points,
        boxes=transform_boxes(matrix, sample.boxes),
        lidar_aug=matrix @ sample.lidar_aug,
    )


def augment_space(config: SpaceAugmentConfig) -> Transform:
    """A random rotation, translation, scale and flip of the whole scene."""
    return lambda sample, rng: move_space(sample, draw_space_change(config, rng))


def crop_to_range(limits: Sequence[float]) -> Transform:
    """Keep points inside (x, y, z lower, x, y, z upper), and boxes whose centre is inside it as seen from above."""
    low, high = np.asarray(limits[:3], dtype=np.float64), np.asarray(limits[3:], dtype=np.float64)
    below, above = _next_float32(low, -np.inf), _next_float32(high, np.inf)

    def transform(sample: Sample, rng: np.random.Generator) -> Sample:
        del rng
        points = sample.points
        if points is not None:
            columns = np.ascontiguousarray(points[:, :3].T)
            inside = [(c > a) & (c < b) for c, a, b in zip(columns, below, above, strict=True)]
            points = points.take(np.flatnonzero(inside[0] & inside[1] & inside[2]), axis=0)
        centres = sample.boxes[:, :2]
        kept = ((centres > low[:2]) & (centres < high[:2])).all(axis=1)
        return dataclasses.replace(sample, points=points, boxes=sample.boxes[kept], labels=sample.labels[kept])

    return transform


def _next_float32(bound: Array, direction: float) -> NDArray[np.float32]:
    """The nearest single-precision numbers not inside of `bound`: points compare with them as with `bound` itself."""
    rounded = bound.astype(np.float32)
    inside = rounded < bound if direction > 0 else rounded > bound
    return np.where(inside, np.nextafter(rounded, np.float32(direction)), rounded)


def shuffle_points(sample: Sample, rng: np.random.Generator) -> Sample:
    """Points in random order, so that a full voxel does not always keep the same ones."""
    if sample.points is None:
        return sample
    return dataclasses.replace(sample, points=sample.points.take(rng.permutation(len(sample.points)), axis=0))


def build_transforms(config: Config, train: bool) -> dict[str, Transform]:
    """What happens to a sample that was read, by name and in order. In evaluation nothing is random."""
    random = train and config.data.augment
    image = config.data.image
    steps: dict[str, Transform] = {}
    if config.model.camera is not None:
        size = config.model.camera.image_size
        steps["decode and augment images"] = augment_images(image, size, random, train and image.draft)
        if random and image.grid_mask:
            steps["grid mask"] = mask_images(image.grid_mask, image.grid_mask_ratio)
    if random:
        steps["augment space"] = augment_space(config.data.space)
    steps["crop to range"] = crop_to_range(config.model.point_cloud_range)
    if train:
        steps["shuffle points"] = shuffle_points
    return steps
