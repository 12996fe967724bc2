"""The tracer on models of a few lines: who is the culprit, who inherits, where it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bevctl.numerics.record import Culprit
from bevctl.numerics.trace import Trace


class Chain(nn.Module):
    """A linear layer, `inner`, another linear layer, a mean."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.middle = Apply(inner)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss/task/total": self.last(self.middle(self.first(x))).float().mean()}


class Apply(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _culprit(inner: Callable[[Tensor], Tensor], half: bool = False, x: Tensor | None = None) -> Culprit | None:
    model = Chain(inner)
    with Trace(model) as trace:
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            losses = model(torch.ones(2, 4) if x is None else x)
        losses["loss/task/total"].backward()
    return trace.first_bad()


HEALTHY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1),
    lambda x: torch.where(x > 9, torch.inf, x).clamp(max=9.0),
    lambda x: torch.empty_like(x).fill_(1.0) * x,
]


@pytest.mark.parametrize("inner", HEALTHY)
def test_a_healthy_step_has_no_culprit(inner: Callable[[Tensor], Tensor]) -> None:
    assert _culprit(inner) is None


def test_a_log_of_zero_is_code_and_has_a_place() -> None:
    culprit = _culprit(lambda x: (x * 0).log())
    assert culprit is not None
    assert (culprit.kind, culprit.record.op, culprit.record.phase) == ("operation", "aten.log.default", "forward")
    assert culprit.module == "middle"
    assert culprit.record.place.file == __file__
    assert culprit.verdict.kind == "code"
    assert culprit.reached[0] == "loss/task/total"
    assert culprit.inherited > 2


def test_an_overflow_of_half_precision_is_named_with_its_fp32_value() -> None:
    culprit = _culprit(lambda x: ((x * 0 + 300).half() * 300).float())
    assert culprit is not None
    assert culprit.verdict.kind == "overflow"
    assert culprit.verdict.wide is not None
    assert culprit.verdict.wide.high == 90000.0
