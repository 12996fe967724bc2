from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bevctl.ops.backend import forced
from bevctl.ops.matching import match

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # without a GPU, Triton's interpreter


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs on the host and in the kernel (in Triton's interpreter where there is no GPU)."""
    with forced(request.param):
        yield


def pairs(cost: Tensor, counts: list[int]) -> list[tuple[int, int, int]]:
    """(sample, prediction, object) of every match."""
    matched = match(cost.to(DEVICE), counts).cpu()
    assert matched.shape == cost.shape[:2]
    assert matched.dtype == torch.int64
    return [(b, p, int(matched[b, p])) for b, p in (matched >= 0).nonzero().tolist()]


def total(cost: Tensor, counts: list[int]) -> float:
    found = pairs(cost, counts)
    assert len({(b, p) for b, p, _ in found}) == len({(b, o) for b, _, o in found}) == len(found)
    assert len(found) == sum(min(cost.shape[1], count) for count in counts)
    assert all(o < counts[b] for b, _, o in found)
    return sum(float(cost[index].double()) for index in found)


def best(cost: Tensor, counts: list[int]) -> float:
    samples = [cost[b, :, :count].double().numpy() for b, count in enumerate(counts)]
    return sum(float(sample[linear_sum_assignment(sample)].sum()) for sample in samples)


def test_a_cheap_pair_is_given_up_for_a_lower_total() -> None:
    cost = torch.tensor([[[1.0, 2.0], [2.0, 9.0], [9.0, 9.0]]])
    assert pairs(cost, [2]) == [(0, 0, 1), (0, 1, 0)]


def test_padding_behind_a_samples_objects_is_not_used() -> None:
    cost = torch.full((3, 2, 2), 5.0)
    cost[:, :, 1] = -100.0
    found = pairs(cost, [1, 0, 2])
    assert [sample for sample, _, _ in found] == [0, 2, 2]
    assert found[0][2] == 0


def test_more_objects_than_predictions() -> None:
    assert pairs(torch.tensor([[[3.0, 1.0, 2.0]]]), [3]) == [(0, 0, 1)]


@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 0, 3), (0, 4, 3), (2, 4, 3)])
def test_nothing_to_match(shape: tuple[int, int, int]) -> None:
    assert pairs(torch.zeros(shape), [0] * shape[0]) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_costs_still_give_every_object_a_partner(bad: float) -> None:
    cost = torch.full((1, 3, 2), bad)
    assert sorted(obj for _, _, obj in pairs(cost, [2])) == [0, 1]


def test_a_broken_cost_is_avoided() -> None:
    cost = torch.tensor([[[float("nan"), 3.0], [float("inf"), 4.0], [8.0, 1.0]]])
    assert pairs(cost, [2]) == [(0, 0, 1), (0, 2, 0)]


@pytest.mark.parametrize(
    ("shape", "counts"),
    [((2, 200, 24), [24, 7]), ((1, 12, 40), [40]), ((3, 17, 17), [17, 9, 1]), ((1, 300, 5), [5])],
)
@pytest.mark.parametrize("kind", ["random", "ties", "crowded"])
def test_real_sizes_reach_the_optimum(shape: tuple[int, int, int], counts: list[int], kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    cost = torch.rand(shape, generator=generator) - 0.5
    if kind == "ties":
        cost = (cost * 6).round()
    elif kind == "crowded":  # all objects want the same predictions
        cost = torch.rand(shape[0], shape[1], 1, generator=generator) + 1e-2 * cost
    assert total(cost, counts) == pytest.approx(best(cost, counts), abs=1e-5)


def test_any_strides_will_do() -> None:
    cost = torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(2)).permute(1, 2, 0)
    assert not cost.is_contiguous()
    assert pairs(cost, [5, 3]) == pairs(cost.contiguous(), [5, 3])


@pytest.mark.parametrize("counts", [[3], [1, 4], [-1, 2]])
def test_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts"):
        match(torch.zeros(2, 4, 3), counts)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_no_other_assignment_is_cheaper(seed: int, predictions: int, objects: int) -> None:
    cost = torch.rand(1, predictions, objects, generator=torch.Generator().manual_seed(seed))
    few, many = sorted((predictions, objects))
    table = cost[0] if predictions <= objects else cost[0].T
    options = (sum(float(table[i, j]) for i, j in enumerate(order)) for order in permutations(range(many), few))
    assert total(cost, [objects]) == pytest.approx(min(options), abs=1e-6)
