from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.ops.matching import match


def test_a_cheap_pair_is_given_up_for_a_lower_total() -> None:
    cost = torch.tensor([[[1.0, 2.0], [2.0, 9.0], [9.0, 9.0]]])
    sample, prediction, obj = match(cost, [2])
    assert sample.tolist() == [0, 0]
    assert prediction.tolist() == [0, 1]
    assert obj.tolist() == [1, 0]


def test_padding_behind_a_samples_objects_is_not_used() -> None:
    cost = torch.full((3, 2, 2), 5.0)
    cost[:, :, 1] = -100.0
    sample, _, obj = match(cost, [1, 0, 2])
    assert sample.tolist() == [0, 2, 2]
    assert obj[0] == 0


def test_more_objects_than_predictions() -> None:
    cost = torch.tensor([[[3.0, 1.0, 2.0]]])
    sample, prediction, obj = match(cost, [3])
    assert (sample.tolist(), prediction.tolist(), obj.tolist()) == ([0], [0], [1])


def test_nothing_to_match() -> None:
    for indices in match(torch.zeros(2, 4, 0), [0, 0]):
        assert indices.shape == (0,)
        assert indices.dtype == torch.int64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_costs_still_give_every_object_a_partner(bad: float) -> None:
    cost = torch.full((1, 3, 2), bad)
    _, prediction, obj = match(cost, [2])
    assert sorted(obj.tolist()) == [0, 1]
    assert len(set(prediction.tolist())) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_no_other_assignment_is_cheaper(seed: int, predictions: int, objects: int) -> None:
    cost = torch.rand(1, predictions, objects, generator=torch.Generator().manual_seed(seed))
    _, prediction, obj = match(cost, [objects])
    found = float(cost[0, prediction, obj].sum())
    if predictions >= objects:
        options = (
            sum(float(cost[0, p, o]) for o, p in enumerate(order))
            for order in permutations(range(predictions), objects)
        )
    else:
        options = (
            sum(float(cost[0, p, o]) for p, o in enumerate(order))
            for order in permutations(range(objects), predictions)
        )
    assert found == pytest.approx(min(options), abs=1e-6)
    assert len(prediction) == min(predictions, objects)
