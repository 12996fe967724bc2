"""Run a model over an evaluation loader and score what it says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bevctl.batch import AnyBatch, Batch, Predictions
from bevctl.config.schema import Config
from bevctl.data.index import InfoFile
from bevctl.engine.dist import World, on_each, on_main
from bevctl.engine.signals import Interruptible
from bevctl.errors import BevctlError, ExitCode
from bevctl.evaluate.map_iou import MapCounts, MapResult
from bevctl.evaluate.results import Objects, SampleResult

if TYPE_CHECKING:
    from bevctl.evaluate.detection import DetectionResult


class Progress(Protocol):
    """Told of finished samples; `Console.progress` gives one."""

    def advance(self, n: int = 1) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on one info file. A part that the model or the ground truth lacks is None."""

    detection: DetectionResult | None
    recall_2m: float | None
    map: MapResult | None
    samples: int
    """Samples that were read and scored."""
    skipped: int
    """Samples of the info file that could not be read; their ground truth is left out too."""
    notes: tuple[str, ...]
    """What the reader of the numbers has to know: what was skipped, and why."""
    results: Mapping[str, SampleResult] = field(repr=False)
    """Predictions by sample token."""

    def metrics(self) -> dict[str, float]:
        """mAP, NDS, recall_2m and mIoU in 0..1, those that exist."""
        values = {
            "mAP": self.detection.mean_ap if self.detection else None,
            "NDS": self.detection.nds if self.detection else None,
            "recall_2m": self.recall_2m,
            "mIoU": self.map.miou if self.map else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def document(self) -> dict[str, Any]:
        """The body of a bevctl.eval/1 document, of plain JSON types."""
        detection = map_part = None
        if self.detection:
            detection = {
                "mAP": self.detection.mean_ap,
                "NDS": self.detection.nds,
                "per_class": self.detection.per_class,
                "tp_errors": self.detection.tp_errors,
                "recall_2m": self.recall_2m,
                "ground_truth": self.detection.source,
            }
        if self.map:
            map_part = {
                "mIoU": self.map.miou,
                "per_class": self.map.per_class,
                "thresholds": self.map.thresholds,
                "samples": self.map.samples,
            }
        return {
            "detection": detection,
            "map": map_part,
            "samples": self.samples,
            "skipped": self.skipped,
            "notes": list(self.notes),
        }


def evaluate_model(
    model: nn.Module,
    loader: Iterable[AnyBatch],
    infos: InfoFile,
    config: Config,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    ranks: World = World(),
    progress: Progress | None = None,
    keep_maps: Collection[str] = (),
    interruptible: Interruptible = nullcontext,
) -> Evaluation:
    """Predict every sample of `loader` and score the union of all ranks.

    `model` is the bare model (not its DDP wrapper), and batches go to where its parameters are; its modules' training
    flags are as before afterwards. Loaders of the ranks don't overlap and need the default process group when there
    are several. Every rank returns the same metrics; rank 0 computes those of detection. `keep_maps` names the samples
    whose map stays in `results`. `interruptible` is entered for what a rank does without the others; an Interrupted
    of one is raised on all.

    Raises BevctlError (RUN_FAILED) when no sample could be read, or more than `data.max_bad_samples` could not.
    """
    counts = MapCounts(len(config.data.map_classes), _device_of(model))
    parts = on_each(ranks, lambda: _predict(model, loader, autocast, counts, progress, keep_maps), interruptible)
    results = {token: result for part, _ in parts for token, result in part.items()}
    problems = [problem for _, said in parts for problem in said]
    if ranks.size > 1:
        counts.all_reduce()
    _check_readable(len(infos.samples), results, problems, config.data.max_bad_samples)
    detection, recall, notes = None, None, [f"left out: {problem}" for problem in problems]
    if any(result.objects is not None for result in results.values()):
        detection, recall, said = on_main(ranks, lambda: _score(results, infos, config), interruptible)
        notes += said
    map_result = None
    if config.model.map is not None:
        map_result, said = _map_result(counts, config.data.map_classes)
        notes += said
    skipped = sum(sample.token not in results for sample in infos.samples)
    return Evaluation(detection, recall, map_result, len(results), skipped, tuple(notes), results)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """model.eval(), and afterwards the flag of each module as it was: a frozen part stays frozen."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@torch.no_grad()  # not inference_mode: what a model caches must stay trainable
def _predict(
    model: nn.Module,
    loader: Iterable[AnyBatch],
    autocast: Callable[[], AbstractContextManager[Any]],
    counts: MapCounts,
    progress: Progress | None,
    keep_maps: Collection[str],
) -> tuple[dict[str, SampleResult], list[str]]:
    results: dict[str, SampleResult] = {}
    problems: list[str] = []
    device = _device_of(model)
    with _evaluation_mode(model):
        for host_batch in loader:
            problems += host_batch.problems
            if not host_batch.size:
                continue
            batch = host_batch.to(device, non_blocking=True)
            with autocast():
                predictions: Predictions = model.predict(batch)  # type: ignore[operator]
            if predictions.bev_map is not None and isinstance(batch, Batch) and batch.bev_map is not None:
                counts.add(predictions.bev_map, batch.bev_map, batch.has_map)
            results |= {result.token: result for result in _host_results(predictions, batch, keep_maps)}
            if progress is not None:
                progress.advance(batch.size)
    return results, problems


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _host_results(predictions: Predictions, batch: AnyBatch, keep_maps: Collection[str]) -> Iterator[SampleResult]:
    for i, token in enumerate(batch.tokens):
        objects = bev_map = true_map = None
        if predictions.boxes and predictions.scores and predictions.labels:
            boxes, scores, labels = predictions.boxes[i], predictions.scores[i], predictions.labels[i]
            objects = Objects(_host(boxes), _host(scores), labels.cpu().numpy())
        if token in keep_maps and predictions.bev_map is not None:
            bev_map = _host(predictions.bev_map[i])
            if isinstance(batch, Batch) and batch.bev_map is not None and bool(batch.has_map[i]):
                true_map = _host(batch.bev_map[i])
        yield SampleResult(token, objects, bev_map, true_map)


def _host(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().cpu().numpy()
    return array


def _check_readable(total: int, results: Mapping[str, SampleResult], problems: Sequence[str], limit: int) -> None:
    first = problems[0].rstrip(".") if problems else "the loader gave no sample"
    if not results:
        raise BevctlError(
            f"None of the {total} samples could be read: {first}.",
            "Check data.root and data.info_val.",
            ExitCode.RUN_FAILED,
        )
    if len(problems) > limit:
        raise BevctlError(
            f"{len(problems)} samples could not be read, more than data.max_bad_samples={limit}; the first: {first}.",
            "Repair or fetch the files, or raise data.max_bad_samples.",
            ExitCode.RUN_FAILED,
        )


def _score(
    results: Mapping[str, SampleResult], infos: InfoFile, config: Config
) -> tuple[DetectionResult | None, float | None, list[str]]:
    # nuscenes-devkit pulls in matplotlib and OpenCV, seconds that a map-only model doesn't need.
    from bevctl.evaluate.detection import evaluate_detection, open_tables, recall_within

    read = [sample for sample in infos.samples if sample.token in results]
    annotated = [sample for sample in read if sample.boxes is not None]
    objects = {token: result.objects for token, result in results.items() if result.objects is not None}
    if not annotated:
        return None, None, ["no sample is annotated with boxes: detection is not scored"]
    notes = []
    if len(annotated) < len(read):
        notes.append(f"{len(read) - len(annotated)} samples without annotated boxes are left out of detection")
    root, tokens = Path(config.data.root), [sample.token for sample in annotated]
    tables, reason = open_tables(root, infos.version, tokens)
    if tables is None:
        notes.append(f"ground truth is the info file's ({reason}): the bike-rack filter is skipped")
    detection = evaluate_detection(objects, annotated, config.data.classes, tables)
    recall = recall_within(objects, annotated, config.data.classes, config.model.point_cloud_range)
    return detection, recall, notes + list(detection.notes)


def _map_result(counts: MapCounts, names: Sequence[str]) -> tuple[MapResult | None, list[str]]:
    result = counts.result(names)
    if not result.samples:
        return None, ["no sample has a ground-truth map: map IoU is not scored"]
    absent = [name for name, value in result.per_class.items() if value is None]
    if absent:
        return result, [f"no cell of {', '.join(absent)} in the ground truth: left out of mIoU"]
    return result, []
