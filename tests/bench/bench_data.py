"""Samples a second that one core prepares, beside a straightforward pipeline: python tests/bench/bench_data.py.

The straightforward one decodes each JPEG whole, resizes all of it, then crops, flips and rotates, moves each sweep on
its own and normalises images, step by step as the published recipe lists it, in PIL and NumPy. Both make the same
samples from the same random numbers, in turn, on one core; processor time is compared. Without --root a synthetic set
of the real sensors' size is made first. Exits 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from bevctl.config.load import load
from bevctl.data.index import resolve
from bevctl.data.info import SampleInfo
from bevctl.data.loader import collate
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.data.prepare import prepare
from bevctl.data.synth.dataset import make_dataset
from bevctl.data.synth.options import SynthOptions
from bevctl.data.transforms import ImageChange, draw_image_change, draw_space_change
from bevctl.geometry import transform_boxes

TARGET = 1.7
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def plain_sample(dataset: NuScenesDataset, position: int, normalise: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(6, 3, H, W) images, points and boxes of a training sample."""
    config, info, rng = dataset.config, dataset.info_at(position), dataset.generator(0, position)
    assert config.model.camera is not None
    points = plain_points(dataset, info, rng)
    images = []
    for name in dataset.cameras:
        picture = Image.open(resolve(dataset.root, info.cameras[name].path, name)).convert("RGB")
        changed = plain_image(picture, draw_image_change(config.data.image, rng), config.model.camera.image_size)
        images.append(changed)
    matrix = draw_space_change(config.data.space, rng)
    points[:, :3] = points[:, :3] @ matrix[:3, :3].T.astype(np.float32) + matrix[:3, 3].astype(np.float32)
    boxes = transform_boxes(matrix, dataset.bare_sample(info).boxes)
    low, high = np.array(config.model.point_cloud_range, dtype=np.float32).reshape(2, 3)
    points = points[np.all((points[:, :3] > low) & (points[:, :3] < high), axis=1)]
    boxes = boxes[np.all((boxes[:, :2] > low[:2]) & (boxes[:, :2] < high[:2]), axis=1)]
    points = points[rng.permutation(len(points))]
    stacked = np.stack([plain_normalised(image) if normalise else image for image in images])
    return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)), points, boxes


def plain_points(dataset: NuScenesDataset, info: SampleInfo, rng: np.random.Generator) -> np.ndarray:
    count = dataset.config.data.sweeps
    keyframe = np.fromfile(resolve(dataset.root, info.lidar_path, "LIDAR_TOP"), dtype=np.float32).reshape(-1, 5)
    keyframe[:, 4] = 0
    clouds = [keyframe]
    chosen = rng.choice(len(info.sweeps), size=count, replace=False) if len(info.sweeps) > count else None
    for sweep in info.sweeps if chosen is None else [info.sweeps[i] for i in chosen]:
        points = np.fromfile(resolve(dataset.root, sweep.path, "LIDAR_TOP"), dtype=np.float32).reshape(-1, 5)
        points = points[~((np.abs(points[:, 0]) < 1) & (np.abs(points[:, 1]) < 1))]
        points[:, :3] = points[:, :3] @ sweep.sweep2key[:3, :3].T
        points[:, :3] += sweep.sweep2key[:3, 3]
        points[:, 4] = info.timestamp - sweep.timestamp
        clouds.append(points)
    near = (np.abs(keyframe[:, 0]) < 1) & (np.abs(keyframe[:, 1]) < 1)
    clouds += [] if info.sweeps else [keyframe[~near]] * count
    return np.concatenate(clouds)


def plain_image(picture: Image.Image, change: ImageChange, size: tuple[int, int]) -> np.ndarray:
    height, width = size
    factor = change.resize * 1600 / picture.width
    new_width, new_height = round(picture.width * factor), round(picture.height * factor)
    left, top = int(change.crop * max(0, new_width - width)), new_height - height
    picture = picture.resize((new_width, new_height), Image.Resampling.BICUBIC)
    picture = picture.crop((left, top, left + width, top + height))
    if change.flip:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(picture.rotate(change.rotate))


def plain_normalised(image: np.ndarray) -> np.ndarray:
    scaled = image.astype(np.float32) / 255
    return (scaled - MEAN.astype(np.float32)) / DEVIATION.astype(np.float32)


def own_sample(dataset: NuScenesDataset, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    item = dataset[(0, position)]
    batch = collate([item])
    assert batch.images is not None
    assert batch.points is not None
    return batch.images[0].numpy(), batch.points[0].numpy(), batch.boxes[0].numpy()


def check(dataset: NuScenesDataset, position: int) -> None:
    """Both pipelines make the same sample, but for the filter that scales decoded images."""
    ours = own_sample(dataset, position)
    plain = plain_sample(dataset, position, normalise=False)
    difference = np.abs(ours[0].astype(int) - plain[0].astype(int))
    print(f"sample {position}: {len(ours[1])} points; images differ by {difference.mean():.2f} of 255 on average")
    assert difference.mean() < 1.0
    np.testing.assert_allclose(ours[1], plain[1], atol=2e-4)
    np.testing.assert_allclose(ours[2], plain[2], atol=1e-4)


def seconds(function: Callable[..., object], *arguments: object) -> float:
    started = time.process_time()
    function(*arguments)
    return time.process_time() - started


def measure(dataset: NuScenesDataset, rounds: int) -> dict[str, list[float]]:
    """Processor seconds a sample of each pipeline, in turn."""
    costs: dict[str, list[float]] = {"bevctl": [], "straightforward, not normalised": [], "straightforward": []}
    for number in range(rounds):
        for position in range(len(dataset)):
            once = (
                seconds(own_sample, dataset, position),
                seconds(plain_sample, dataset, position, False),
                seconds(plain_sample, dataset, position, True),
            )
            for values, cost in zip(costs.values(), once, strict=True) if number else ():
                values.append(cost)
    return costs


def make_set(root: Path) -> None:
    options = SynthOptions(train_scenes=1, val_scenes=0, keyframes=4, image_scale=1.0, azimuth_steps=1084)
    make_dataset(root, options)
    prepare(root, options.version, prefix="synth")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="data set to measure with")
    parser.add_argument("--info", default="synth_infos_train.pkl", help="its info file")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        root = options.root or Path(folder, "synth")
        if options.root is None:
            make_set(root)
        sets = [f"data.root={root}", f"data.info_train={options.info}"]
        dataset = NuScenesDataset(load("bevfusion_det", sets=sets).config, "train")
        for position in range(min(2, len(dataset))):
            check(dataset, position)
        costs = measure(dataset, options.rounds)
    medians = {name: statistics.median(values) for name, values in costs.items()}
    for name, median in medians.items():
        print(f"{name:32} {1e3 * median:7.1f} ms {1 / median:6.1f} samples/s")
    ratios = {name: median / medians["bevctl"] for name, median in medians.items()}
    met = ratios["straightforward"] >= TARGET
    print(f"{ratios['straightforward, not normalised']:.2f} x without normalising in the straightforward one")
    print(f"{'met   ' if met else 'MISSED'} {ratios['straightforward']:.2f} x its samples/s, at least {TARGET}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
