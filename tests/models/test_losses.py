from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed

from bevctl.models.losses import gaussian_focal_loss, mean_over_ranks, sigmoid_focal_loss


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize(
    ("target", "alpha", "expected"),
    [
        (1.0, 0.25, 0.25 * 0.2**2 * -math.log(0.8)),
        (0.0, 0.25, 0.75 * 0.8**2 * -math.log(0.2)),
        (1.0, None, 0.2**2 * -math.log(0.8)),
        (0.0, None, 0.8**2 * -math.log(0.2)),
    ],
)
def test_sigmoid_focal_loss_by_hand(target: float, alpha: float | None, expected: float) -> None:
    loss = sigmoid_focal_loss(torch.tensor(logit(0.8)), torch.tensor(target), alpha=alpha)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("probability", "target", "expected"),
    [
        (0.8, 1.0, 0.2**2 * -math.log(0.8)),
        (0.8, 0.5, 0.8**2 * -math.log(0.2) * 0.5**4),
        (0.8, 0.0, 0.8**2 * -math.log(0.2)),
    ],
)
def test_gaussian_focal_loss_by_hand(probability: float, target: float, expected: float) -> None:
    loss = gaussian_focal_loss(torch.tensor(logit(probability)), torch.tensor(target))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e4, 1e4), st.sampled_from([0.0, 1.0]))
def test_finite_and_not_negative_for_any_logit(value: float, target: float) -> None:
    logits = torch.tensor(value, requires_grad=True)
    loss = sigmoid_focal_loss(logits, torch.tensor(target)) + gaussian_focal_loss(logits, torch.tensor(target))
    loss.backward()
    assert float(loss.detach()) >= 0
    assert logits.grad is not None
    assert math.isfinite(float(logits.grad))


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([12.0], dtype=torch.float16)
    assert sigmoid_focal_loss(logits, torch.zeros(1)).dtype == torch.float32
    assert float(gaussian_focal_loss(logits, torch.zeros(1))) == pytest.approx(-math.log(1e-4), rel=1e-3)


def test_gradient_of_the_focal_loss() -> None:
    logits = torch.linspace(-3, 3, 7, requires_grad=True)
    targets = torch.tensor([0.0, 1, 0, 1, 0, 1, 0])
    sigmoid_focal_loss(logits, targets).sum().backward()
    step = 1e-2
    with torch.no_grad():
        numeric = (sigmoid_focal_loss(logits + step, targets) - sigmoid_focal_loss(logits - step, targets)) / (2 * step)
    torch.testing.assert_close(logits.grad, numeric, rtol=1e-2, atol=1e-3)


def test_a_count_alone_is_itself() -> None:
    assert [mean_over_ranks(count, torch.device("cpu")) for count in (7, 1, 0)] == [7.0, 1.0, 1.0]


@pytest.mark.parametrize(("counts", "mean"), [((3, 8), 5.5), ((0, 4), 2.0), ((0, 0), 1.0), ((1, 0), 1.0)])
def test_a_count_is_averaged_over_ranks(counts: tuple[int, int], mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_the_other(total: Tensor) -> None:
        total += counts[1]

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: len(counts))
    monkeypatch.setattr(distributed, "all_reduce", add_the_other)
    assert float(mean_over_ranks(counts[0], torch.device("cpu"))) == mean
