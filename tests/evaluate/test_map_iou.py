"""Map IoU: a hand-made case, the best threshold, masks, and sums over batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.evaluate.map_iou import THRESHOLDS, MapCounts, MapResult

NAMES = ("road", "line")
YES = torch.tensor([True])


def iou(probability: torch.Tensor, truth: torch.Tensor, has_map: torch.Tensor) -> MapResult:
    counts = MapCounts(probability.shape[1], "cpu")
    counts.add(probability, truth, has_map)
    return counts.result([str(k) for k in range(probability.shape[1])])


def test_hand_made_case() -> None:
    truth = torch.zeros(1, 2, 2, 3)
    truth[0, 0, 0] = 1  # three cells of road
    truth[0, 1, 1, 0] = 1
    probability = torch.zeros(1, 2, 2, 3)
    probability[0, 0] = torch.tensor([[0.9, 0.9, 0.42], [0.47, 0.1, 0.0]])
    counts = MapCounts(2, "cpu")
    counts.add(probability, truth, YES)
    result = counts.result(NAMES)
    # road: from 0.35 three hits and one wrong (3/4), from 0.45 two hits, one wrong, one missed, above two hits (2/3)
    assert result.per_class == {"road": 0.75, "line": 0.0}
    assert result.thresholds["road"] == 0.35
    assert result.miou == 0.375
    assert result.samples == 1


def test_the_best_threshold_is_taken_over_the_whole_set() -> None:
    truth = torch.ones(1, 1, 1, 4)
    sure = torch.tensor([0.9, 0.9, 0.9, 0.9]).view(1, 1, 1, 4)
    wrong = torch.full((1, 1, 1, 4), 0.5)
    counts = MapCounts(1, "cpu")
    counts.add(sure, truth, YES)
    counts.add(wrong, torch.zeros_like(truth), YES)
    result = counts.result(["road"])
    assert result.per_class["road"] == 1.0
    assert result.thresholds["road"] == 0.55


def test_samples_without_a_map_do_not_count() -> None:
    truth = torch.ones(2, 1, 3, 3)
    probability = torch.stack([torch.ones(1, 3, 3), torch.zeros(1, 3, 3)])
    result = iou(probability, truth, torch.tensor([True, False]))
    assert result.per_class["0"] == 1.0
    assert result.samples == 1


def test_a_class_without_a_cell_is_null_and_not_in_the_mean() -> None:
    truth = torch.zeros(1, 2, 2, 2)
    truth[0, 0] = 1
    result = iou(torch.ones(1, 2, 2, 2), truth, YES)
    assert result.per_class == {"0": 1.0, "1": None}
    assert result.miou == 1.0
    assert iou(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), YES).miou is None


def test_a_wrong_shape_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 3\)"):
        MapCounts(3, "cpu").add(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3), YES)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3))
def test_any_split_into_batches_gives_the_plain_definition(seed: int, batch: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probability = torch.rand(batch, classes, 3, 5, generator=generator)
    truth = (torch.rand(batch, classes, 3, 5, generator=generator) > 0.6).float()
    has_map = torch.rand(batch, generator=generator) > 0.3
    counts = MapCounts(classes, "cpu")
    for i in range(batch):
        counts.add(probability[i : i + 1], truth[i : i + 1], has_map[i : i + 1])
    result = counts.result([str(k) for k in range(classes)])
    assert result == iou(probability, truth, has_map)
    for k in range(classes):
        real = truth[has_map, k].bool()
        if not real.any():
            assert result.per_class[str(k)] is None
            continue
        chosen = [probability[has_map, k] >= threshold for threshold in THRESHOLDS]
        expected = max(float((c & real).sum() / (c | real).sum()) for c in chosen)
        assert result.per_class[str(k)] == pytest.approx(expected, abs=1e-6)
