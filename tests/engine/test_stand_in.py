from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.engine.stand_in import (
    StandIn,
    detached,
    difference,
    gradients_of,
    state_kept,
    tensors_in,
    with_tensors,
    without_cast_cache,
)


class ByHand(torch.autograd.Function):
    """x · weightᵀ with gradients in Python, whose products autocast would round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class InSingle(nn.Module):
    """A product in FP32 inside a model in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = ByHand.apply(x.float(), self.weight)
        return out


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: list[Tensor]


class Part(nn.Module):
    """A layer, BatchNorm and dropout that answers with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: list[Tensor]) -> Pair:
        out = self.drop(self.norm(self.linear(inputs[0] + inputs[1])))
        return Pair(out, [out.argmax(dim=1)])


class Altered(StandIn):
    """The module, its result changed by `change`."""

    kind = "changes"

    def __init__(self, module: nn.Module, change: Any, reports: list[str]) -> None:
        super().__init__("part", module, reports.append)
        self.change = change
        self.runs = 0

    def run(self, *inputs: Any) -> Any:
        self.runs += 1
        return self.change(self.plain(*inputs))


def scaled(factor: float) -> Any:
    return lambda pair: Pair(pair.first * factor, pair.second)


def call(stand_in: Altered) -> Pair:
    result: Pair = stand_in([torch.randn(5, 3), torch.randn(5, 3)])
    return result


def test_an_equal_stand_in_is_proven_once_and_then_runs_alone() -> None:
    reports: list[str] = []
    stand_in = Altered(Part(), scaled(1.0), reports)
    for _ in range(3):
        call(stand_in)
    assert stand_in.runs == 4
    assert reports == []


def test_the_proof_leaves_no_trace() -> None:
    part, twin = Part(), Part()
    twin.load_state_dict(part.state_dict())
    inputs = [torch.randn(5, 3), torch.randn(5, 3)]
    torch.manual_seed(3)
    expected = twin(inputs)
    torch.manual_seed(3)
    found = Altered(part, scaled(1.0), [])(inputs)
    assert torch.equal(found.first, expected.first)
    for ours, theirs in zip(part.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(p.grad is None for p in part.parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled(1.1), "its numbers are off by 10.0%"),
        (scaled(math.nan), "its numbers are off by 100.0%"),
        (lambda pair: pair.first[:2], "it returns other shapes"),
        (lambda pair: pair.third, "AttributeError"),
    ],
)
def test_another_result_or_a_failure_is_reported_and_never_used(change: Any, reason: str) -> None:
    reports: list[str] = []
    part, twin = Part(), Part()
    twin.load_state_dict(part.state_dict())
    stand_in = Altered(part, change, reports)
    torch.manual_seed(4)
    found = [call(stand_in).first for _ in range(2)]
    torch.manual_seed(4)
    expected = [twin([torch.randn(5, 3), torch.randn(5, 3)]).first for _ in range(2)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(reports) == 1
    assert reports[0].startswith("part runs without changes: ")
    assert reason in reports[0]
    assert stand_in.runs == 1


def test_evaluation_and_no_grad_run_the_module() -> None:
    stand_in = Altered(Part(), scaled(1.0), [])
    with torch.no_grad():
        call(stand_in)
    stand_in.module.eval()
    call(stand_in)
    assert stand_in.runs == 0


def test_running_out_of_memory_is_no_reason_to_go_on() -> None:
    def fail(_: Pair) -> Pair:
        raise torch.cuda.OutOfMemoryError("memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        call(Altered(Part(), fail, []))


def test_difference_forgives_rounding_and_what_cancels() -> None:
    large, tiny = torch.randn(100), torch.full((10,), 1e-7)
    assert difference([large * 1.0001, tiny * 2], [large, tiny]) is None
    assert difference([large * 1.01], [large]) == "its numbers are off by 1.0%"
    assert difference([(large * 1.01).half()], [large.half()]) is None


def test_tensors_are_found_and_put_back_in_nested_values() -> None:
    value = Pair(torch.zeros(1), [torch.ones(2), torch.full((3,), 2.0)])
    nested = [value, (torch.full((1,), 3.0), "text")]
    assert [float(t[0]) for t in tensors_in(nested)] == [0, 1, 2, 3]
    doubled = with_tensors(nested, iter([t * 2 for t in tensors_in(nested)]))
    assert [float(t[0]) for t in tensors_in(doubled)] == [0, 2, 4, 6]
    assert isinstance(doubled[0], Pair)
    assert doubled[1][1] == "text"


def test_detached_tensors_are_leaves_that_share_memory() -> None:
    source = torch.ones(2, requires_grad=True) * 2
    (copy,) = detached([source])
    assert copy.is_leaf
    assert copy.requires_grad
    assert copy.data_ptr() == source.data_ptr()


def test_state_is_put_back() -> None:
    norm = nn.BatchNorm1d(2)
    before, random = [buffer.clone() for buffer in norm.buffers()], torch.get_rng_state()
    with state_kept(norm):
        norm(torch.randn(4, 2))
        assert not torch.equal(next(norm.buffers()), before[0])
    assert all(torch.equal(buffer, saved) for buffer, saved in zip(norm.buffers(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_are_rounded_anew_without_the_cache() -> None:
    linear = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with without_cast_cache():
            assert not torch.is_autocast_cache_enabled()
            linear(torch.randn(1, 2)).sum().backward()
        assert torch.is_autocast_cache_enabled()


def test_a_backward_pass_inside_of_autocast_is_one_outside() -> None:
    torch.manual_seed(0)
    part, x = InSingle(), torch.randn(4, 3, requires_grad=True)
    weights = torch.randn(4, 5)
    expected = (weights @ part.weight, weights.T @ x)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_of([part(x)], [x, part.weight], [weights])
    for ours, exact in zip(found, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, exact.detach(), rtol=1e-6, atol=1e-6)
