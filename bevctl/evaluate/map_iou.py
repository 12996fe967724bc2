"""Intersection over union of bird's-eye-view map classes, each at its best threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

THRESHOLDS = (0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.65)


@dataclass(frozen=True)
class MapResult:
    """IoU in 0..1; None where no evaluated sample has a cell of the class."""

    miou: float | None
    """Mean of the classes that have one."""
    per_class: dict[str, float | None]
    thresholds: dict[str, float | None]
    """The threshold each IoU was reached at."""
    samples: int
    """Samples with a ground-truth map."""


class MapCounts:
    """True positives, false positives and false negatives per threshold and class, added up over a data set.

    Counts stay on the device, and adding to them never waits for it.
    """

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.counts = torch.zeros(3, len(THRESHOLDS), classes, dtype=torch.int64, device=device)
        self.samples = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, probability: Tensor, truth: Tensor, has_map: Tensor) -> None:
        """Count a batch: `probability` and `truth` (0/1) are (B, K, X, Y); samples where `has_map` (B,) is False don't
        count.

        Raises ValueError for shapes that differ.
        """
        if probability.shape != truth.shape or probability.shape[1] != self.counts.shape[2]:
            expected = f"{self.counts.shape[2]} classes"
            raise ValueError(f"map {tuple(probability.shape)} against {tuple(truth.shape)}, expected {expected}")
        valid = has_map.view(-1, 1, 1, 1)
        true, false = (truth > 0.5) & valid, (truth <= 0.5) & valid
        for index, threshold in enumerate(THRESHOLDS):
            chosen = probability >= threshold
            self.counts[0, index] += (chosen & true).sum(dim=(0, 2, 3))
            self.counts[1, index] += (chosen & false).sum(dim=(0, 2, 3))
            self.counts[2, index] += (~chosen & true).sum(dim=(0, 2, 3))
        self.samples += has_map.sum()

    def all_reduce(self) -> None:
        """Add the counts of every rank of the default process group."""
        torch.distributed.all_reduce(self.counts)
        torch.distributed.all_reduce(self.samples)

    def result(self, names: Sequence[str]) -> MapResult:
        """IoU of each class; `names` are the K classes in order."""
        hit, wrong, missed = self.counts.cpu().double()
        iou = hit / (hit + wrong + missed).clamp(min=1)
        best, index = iou.max(dim=0)
        present = ((hit + missed)[0] > 0).tolist()
        values = {n: float(b) if p else None for n, b, p in zip(names, best, present, strict=True)}
        chosen = {n: THRESHOLDS[i] if p else None for n, i, p in zip(names, index.tolist(), present, strict=True)}
        known = [value for value in values.values() if value is not None]
        mean = sum(known) / len(known) if known else None
        return MapResult(mean, values, chosen, int(self.samples))
