"""Pictures of evaluated samples, drawn from the files themselves rather than from the network's small images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bevctl.batch import CAMERAS
from bevctl.config.schema import Config
from bevctl.data.files import read_image
from bevctl.data.index import SampleInfo, resolve
from bevctl.data.sweeps import load_points
from bevctl.errors import BevctlError
from bevctl.evaluate.draw import DrawnMap, draw_sample
from bevctl.evaluate.draw_bev import Ground
from bevctl.evaluate.draw_camera import DrawnBoxes, View
from bevctl.evaluate.results import Objects, SampleResult
from bevctl.evaluate.run import Evaluation
from bevctl.files import atomic_path
from bevctl.geometry import invert_rigid

MIN_SCORE = 0.2
"""Predictions below this are not drawn, unless none reaches it."""
FALLBACK = 10
"""How many of the best are drawn then."""


def spread(samples: Sequence[SampleInfo], count: int) -> tuple[SampleInfo, ...]:
    """`count` samples evenly spread over the set, the first one included."""
    places = np.linspace(0, len(samples), min(count, len(samples)), endpoint=False)
    return tuple(samples[int(place)] for place in places)


def write_pictures(
    folder: Path, evaluation: Evaluation, samples: Sequence[SampleInfo], config: Config, min_score: float = MIN_SCORE
) -> Iterator[Path]:
    """Write `<folder>/<token>.png` for each of `samples` that was evaluated; yields the paths as they are made.

    Maps are drawn where `evaluate_model` was told to keep them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    thresholds = evaluation.map.thresholds if evaluation.map else {}
    for sample in samples:
        result = evaluation.results.get(sample.token)
        if result is None:
            continue
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', sample.token)}.png"
        with atomic_path(path) as temporary:
            draw_result(sample, result, config, min_score, thresholds).save(temporary, format="PNG")
        yield path


def draw_result(
    sample: SampleInfo,
    result: SampleResult,
    config: Config,
    min_score: float = MIN_SCORE,
    thresholds: Mapping[str, float | None] | None = None,
) -> Image.Image:
    """The picture of one sample: its files, what the model said and what is annotated.

    `thresholds` are those of the map classes, 0.5 where none is given.
    """
    predictions = chosen_predictions(result.objects, config.data.classes, min_score)
    truth = _annotations(sample, config.data.classes)
    bev_map, head = None, config.model.map
    if result.bev_map is not None and head is not None:
        cuts = [(thresholds or {}).get(name) or 0.5 for name in config.data.map_classes]
        painted = result.bev_map >= np.array(cuts)[:, None, None]
        ground = Ground(painted.astype(np.float32), config.data.map_classes, head.xbound, head.ybound)
        bev_map = DrawnMap(ground, result.true_map)
    assert predictions.scores is not None
    lowest = min(min_score, *predictions.scores) if len(predictions) else min_score
    said = f"{len(predictions)} predictions with a score from {lowest:.2g}"
    return draw_sample(
        f"sample {sample.token}  ·  {said}  ·  {len(truth)} annotated boxes",
        dict(_views(sample, Path(config.data.root))),
        _points(sample, Path(config.data.root)),
        predictions,
        truth,
        reach=max(abs(bound) for bound in (*config.model.point_cloud_range[:2], *config.model.point_cloud_range[3:5])),
        bev_map=bev_map,
    )


def chosen_predictions(objects: Objects | None, classes: Sequence[str], min_score: float) -> DrawnBoxes:
    """The predictions to draw: from `min_score` on, or the `FALLBACK` best where none reaches it."""
    if objects is None:
        return DrawnBoxes(np.zeros((0, 9)), (), np.zeros(0))
    usable = np.flatnonzero(objects.usable())
    best = usable[np.argsort(-objects.scores[usable], kind="stable")]
    kept = best[objects.scores[best] >= min_score]
    kept = kept if len(kept) else best[:FALLBACK]
    names = tuple(classes[label] for label in objects.labels[kept])
    return DrawnBoxes(objects.boxes[kept], names, objects.scores[kept])


def _annotations(sample: SampleInfo, classes: Sequence[str]) -> DrawnBoxes:
    """Annotated boxes that a sensor's point lies on, of the network's classes."""
    if sample.boxes is None:
        return DrawnBoxes(np.zeros((0, 9)), ())
    kept = [i for i, name in enumerate(sample.names) if name in classes and sample.valid[i]]
    return DrawnBoxes(sample.boxes[kept], tuple(sample.names[i] for i in kept))


def _views(sample: SampleInfo, root: Path) -> Iterator[tuple[str, View]]:
    for name in CAMERAS:
        camera = sample.cameras.get(name)
        # A model without cameras was evaluated without these files; a picture can do without them too.
        with suppress(BevctlError):
            if camera is not None:
                image = Image.fromarray(read_image(resolve(root, camera.path, name)))
                yield name, View(image, camera.intrinsics, invert_rigid(camera.camera2lidar))


def _points(sample: SampleInfo, root: Path) -> NDArray[np.float32]:
    """(P, 5) points of the keyframe; none where the file is missing, which a camera model doesn't mind."""
    try:
        return load_points(root, sample, 0, None)
    except BevctlError:
        return np.zeros((0, 5), np.float32)
