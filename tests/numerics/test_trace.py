"""The tracer on models of a few lines: who is the culprit, who inherits, where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevctl.models.layers import recompute
from bevctl.numerics.record import Culprit
from bevctl.numerics.trace import Trace


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Chain(nn.Module):
    """A linear layer, a function, another linear layer, a mean."""

    def __init__(self, function: Callable[[Tensor], Tensor], again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.middle = Apply(function)
        self.last = nn.Linear(4, 1)
        self.again = again

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle: Tensor = recompute(self.middle, self.first(x), enabled=self.again)
        return {"loss/task/total": self.last(middle.float()).mean()}


def traced(model: nn.Module, x: Tensor | None = None, scale: float = 1.0, keep: tuple[int, ...] = ()) -> Trace:
    """A step of a model that gives a loss."""
    with Trace(model, keep=keep) as trace:
        losses = model(torch.linspace(-1, 2, 8).view(2, 4) if x is None else x)
        (losses["loss/task/total"] * scale).backward()
    return trace


def culprit_of(function: Callable[[Tensor], Tensor], **options: Any) -> Culprit:
    culprit = traced(Chain(function), **options).first_bad()
    assert culprit is not None
    return culprit


class Reciprocal(torch.autograd.Function):
    """1 / x, whose backward pass divides once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 1 / x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad / (x * x)


def _write_behind_torch(x: Tensor) -> Tensor:
    """As an extension's kernel does: into memory that torch made, without torch's knowledge."""
    out = torch.zeros(x.shape)
    out.numpy()[0, 0] = float("nan")
    return x + out


def _change_a_view(x: Tensor) -> Tensor:
    y = x * 1
    y[:, :2].mul_(3)
    return y


HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "sine": torch.sin,
    "masked softmax": lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1),
    "infinity that is cut": lambda x: torch.where(x > 0.1, torch.inf, x).clamp(max=9.0),
    "infinity that a sigmoid swallows": lambda x: torch.sigmoid((1000 * x.detach().abs()).exp()) * x,
    "division that is made safe afterwards": lambda x: x + torch.where(x > 1e9, 1 / (0 * x.detach()), 0.0),
    "empty memory": lambda x: torch.empty_like(x).fill_(1.0) * x,
    "memory filled piece by piece": lambda x: x * torch.empty(2, 4).index_fill_(1, torch.arange(4), 2.0),
    "in place": lambda x: (x * 2).add_(1).mul_(3),
    "a view written in place": _change_a_view,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_no_culprit(name: str) -> None:
    assert traced(Chain(HEALTHY[name])).first_bad() is None


def test_a_log_of_zero_is_code_and_has_a_place() -> None:
    culprit = culprit_of(lambda x: (x * 0).log())
    assert (culprit.kind, culprit.record.op, culprit.record.phase) == ("operation", "aten.log.default", "forward")
    assert (culprit.module, culprit.scopes) == ("middle", ("middle",))
    assert culprit.record.place.file == __file__
    assert culprit.record.place.function == "<lambda>"
    assert (culprit.verdict.kind, culprit.verdict.what) == (
        "code",
        "logarithm of zero or less: 8 of 8: not finite in float64 either",
    )
    assert culprit.reached[0] == "loss/task/total"
    assert culprit.samples is None
    assert culprit.inherited > 2


def test_an_overflow_is_named_with_its_fp32_value() -> None:
    culprit = culprit_of(lambda x: (x * 0 + 300).half() * 300)
    assert culprit.verdict.kind == "overflow"
    assert culprit.verdict.is_range
    assert culprit.verdict.wide is not None
    assert culprit.verdict.wide.high == 90000.0
    assert "float16 ends at 65504" in culprit.verdict.what


def test_a_cast_that_overflows_is_an_overflow() -> None:
    culprit = culprit_of(lambda x: (x + 1e5).half())
    assert (culprit.record.op, culprit.verdict.kind) == ("aten._to_copy.default", "overflow")


def test_an_overflow_of_fp32_is_told_from_one_of_fp16() -> None:
    culprit = culprit_of(lambda x: (x * 1e30) * 1e30)
    assert culprit.verdict.kind == "overflow"
    assert "float32 ends at" in culprit.verdict.what


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / ((x * 0).half() + 1e-9).float(),
        lambda x: x / ((x.half() * 0 + 1e-4) * 1e-5),
        lambda x: torch.log(1 - torch.sigmoid(x.half() * 0 + 12) + 1e-12),
    ],
    ids=["epsilon", "product", "difference"],
)
def test_a_zero_made_by_half_precision_is_an_underflow(function: Callable[[Tensor], Tensor]) -> None:
    culprit = culprit_of(function)
    assert culprit.verdict.kind == "underflow", culprit.verdict
    assert culprit.verdict.lost_in
    assert "rounded to zero in half precision" in culprit.verdict.what


def test_an_underflow_long_before_the_backward_pass_is_proved_by_a_second_trace() -> None:
    def norm(x: Tensor) -> Tensor:
        small = (x * 0 + 1e-4).half()
        length = (small * small).float().sum(-1, keepdim=True).sqrt()
        for _ in range(40):
            length = length + 1
        return length * x

    model = Chain(norm)
    first = traced(model).first_bad()
    assert first is not None
    assert (first.record.node, first.verdict.kind) == ("SqrtBackward0", "code")
    model.zero_grad()
    trace = traced(model, keep=first.lineage)
    second = trace.first_bad()
    assert second is not None
    assert second.record.index == first.record.index
    assert second.verdict.kind == "underflow"
    lost = next(record for record in trace.records if record.index == second.verdict.lost_in[0])
    assert (lost.op, lost.phase) == ("aten.mul.Tensor", "forward")
    assert second.lineage == ()


def test_division_by_zero_in_the_backward_pass_names_the_line_of_the_forward_pass() -> None:
    culprit = culprit_of(lambda x: (x * 0).abs().sqrt())
    assert (culprit.record.phase, culprit.record.node, culprit.module) == ("backward", "SqrtBackward0", "middle")
    assert culprit.record.place.file == __file__
    assert culprit.verdict.what.startswith("division by zero")
    assert culprit.lineage == ()
    assert culprit.reached[0] == "gradient of first.weight"


def test_an_autograd_function_is_looked_into_forward() -> None:
    culprit = culprit_of(lambda x: Reciprocal.apply(x * 0))
    assert (culprit.record.op, culprit.record.place.function, culprit.module) == (
        "aten.reciprocal.default",
        "forward",
        "middle",
    )


def test_an_autograd_function_is_looked_into_backward() -> None:
    culprit = culprit_of(lambda x: Reciprocal.apply(x * 0 + 1e-30))
    assert (culprit.record.phase, culprit.record.place.function) == ("backward", "backward")
    assert (culprit.record.node, culprit.module) == ("ReciprocalBackward", "middle")
    assert culprit.verdict.kind == "code"


def test_what_is_computed_again_is_no_second_culprit() -> None:
    trace = traced(Chain(lambda x: (x * 0).log(), again=True))
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.record.phase, culprit.module) == ("forward", "middle")
    assert {record.module for record in trace.records if record.phase == "recompute"} == {"middle"}


def test_only_the_gradient_overflows_at_a_large_loss_scale() -> None:
    model = Chain(lambda x: x.half() * 2)
    assert traced(model, scale=1024.0).first_bad() is None
    culprit = traced(model, scale=2.0**24).first_bad()
    assert culprit is not None
    assert (culprit.record.phase, culprit.verdict.kind) == ("backward", "overflow")
    assert culprit.record.is_gradient
    assert all(name.startswith("gradient of first") for name in culprit.reached)


def test_masked_nan_is_named_with_its_mask_when_everything_ends_finite() -> None:
    culprit = culprit_of(lambda x: x + torch.nan_to_num((x.detach() * 0).log() * 0))
    assert culprit.record.op == "aten.log.default"
    assert culprit.reached == ()
    assert culprit.masked_by is not None
    assert (culprit.masked_by.op, culprit.masked_by.module) == ("aten.nan_to_num.default", "middle")


def test_masked_nan_that_breaks_the_gradient_is_blamed_on_the_forward_pass() -> None:
    culprit = culprit_of(lambda x: torch.nan_to_num((x * 0).log() * 0))
    assert (culprit.record.op, culprit.record.phase) == ("aten.log.default", "forward")
    assert culprit.masked_by is not None
    assert culprit.reached[0] == "gradient of first.weight"


def test_bad_numbers_overwritten_in_place_are_noticed() -> None:
    def overwrite(x: Tensor) -> Tensor:
        broken = (x.detach() * 0).log()
        broken[torch.isinf(broken)] = 0
        return x + broken

    culprit = culprit_of(overwrite)
    assert culprit.masked_by is not None
    assert "index_put" in culprit.masked_by.op


@pytest.mark.parametrize(
    "hide",
    [
        lambda x: torch.where(torch.isfinite(x), x, 0),
        lambda x: x.masked_fill(x.isinf() | x.isnan(), 0),
        lambda x: torch.where(x != x, 0, torch.where(x == -torch.inf, 0, x)),
        lambda x: x[~x.isinf()].sum() + torch.zeros_like(x),
    ],
    ids=["where", "masked_fill", "comparison", "index"],
)
def test_a_mask_made_of_a_test_for_finiteness_is_seen(hide: Callable[[Tensor], Tensor]) -> None:
    culprit = culprit_of(lambda x: x + hide((x.detach() * 0).log()))
    assert culprit.record.op == "aten.log.default"
    assert culprit.masked_by is not None
    assert culprit.reached == ()


def test_the_culprit_is_seen_through_in_place_operations_and_views() -> None:
    def change(x: Tensor) -> Tensor:
        y = x * 1
        y.view(-1)[2:3].div_(0 * x.view(-1)[:1].detach())
        return y.t().contiguous().t()

    culprit = culprit_of(change)
    assert (culprit.record.op, culprit.module) == ("aten.div_.Tensor", "middle")
    assert culprit.record.inputs[0].bad is False


def test_memory_changed_behind_torch_is_told() -> None:
    culprit = culprit_of(_write_behind_torch)
    assert (culprit.kind, culprit.record.op) == ("unseen", "aten.zeros.default")
    assert culprit.module == "middle"


def test_a_bad_weight_is_named() -> None:
    model = Chain(torch.sin)
    with torch.no_grad():
        model.last.weight[0, 2] = torch.nan
    culprit = traced(model).first_bad()
    assert culprit is not None
    assert (culprit.kind, culprit.verdict.kind, culprit.module) == ("weight", "weights", "last")
    assert culprit.source is not None
    assert culprit.source.name == "last.weight"


@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_a_norm_count_where_they_are_used(training: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss/task/total": (self.norm(x) * x).log().sum()}

    model = Model().train(training)
    model.norm.get_buffer("running_var")[1] = torch.nan
    culprit = traced(model).first_bad()
    assert culprit is not None
    expected = ("operation", "aten.log.default") if training else ("weight", "aten.native_batch_norm.default")
    assert (culprit.kind, culprit.record.op) == expected


def test_bad_data_is_named_with_the_sample() -> None:
    x = torch.ones(2, 4)
    x[1, 3] = torch.inf
    culprit = traced(Chain(torch.sin), x).first_bad()
    assert culprit is not None
    assert (culprit.kind, culprit.samples, culprit.module) == ("data", (1,), "first")
    assert [fault.kind for fault in culprit.faults] == ["nonfinite"]


@pytest.mark.parametrize("clip", [35.0, float("inf")])
def test_whole_steps_with_clipping_and_an_optimizer_are_healthy(clip: float) -> None:
    model = Chain(torch.sin)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Trace(model) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4))["loss/task/total"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    assert trace.first_bad() is None
    assert any("adamw" in record.op for record in trace.records)


def test_a_number_of_the_code_is_no_unknown_source() -> None:
    def mark(x: Tensor) -> Tensor:
        unknown = x.detach() * 1
        unknown[0] = torch.nan
        return x + torch.nan_to_num(unknown)

    trace = traced(Chain(mark))
    assert trace.first_bad() is None
    assert "declared" in {record.status for record in trace.records}


def test_memory_that_is_freed_and_used_again_is_not_mistaken() -> None:
    """Addresses of freed tensors come back at once; what was measured there must not."""

    def reuse(x: Tensor) -> Tensor:
        for _ in range(50):
            passing = x.detach() * 3
            del passing
            fresh = torch.from_numpy(x.detach().numpy() * float("nan"))  # torch does not see this one being made
            x = x + fresh
        return x

    culprit = culprit_of(reuse)
    assert culprit.kind == "unseen"
    assert culprit.record.op == "aten.add.Tensor"
    assert culprit.record.bad_parents[0] < 0


def test_a_norm_of_finite_gradients_that_overflows_is_named() -> None:
    model = Chain(torch.sin)
    with Trace(model) as trace:
        (model(torch.ones(2, 4))["loss/task/total"] * 1e30).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 35.0)
    assert norm.isinf()
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.record.phase, culprit.verdict.kind, culprit.reached) == ("outside", "overflow", ())
    assert "norm" in culprit.record.op


def test_inference_mode_is_watched_too() -> None:
    model = Chain(lambda x: (x * 0).add_(1).mul_(0).log())
    with Trace(model) as trace, torch.inference_mode():
        model(torch.ones(2, 4))
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.record.op, culprit.module) == ("aten.log.default", "middle")


def test_an_operation_that_raises_is_the_culprit() -> None:
    model = Chain(lambda x: x.index_select(0, torch.tensor([9])))
    with pytest.raises((RuntimeError, IndexError)), Trace(model) as trace:
        model(torch.zeros(4, 4))
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.record.status, culprit.module, culprit.verdict.kind) == ("raised", "middle", "code")
    assert "index out of range" in culprit.verdict.what


def test_an_error_that_the_code_expects_is_none() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return x.index_select(0, torch.tensor([9]))
        except (RuntimeError, IndexError):
            return x

    assert traced(Chain(careful)).first_bad() is None


@dataclass
class Pair:
    left: Tensor
    right: list[Tensor]


class Structured(nn.Module):
    """Gives a dataclass, and reads one."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.make = Apply(lambda x: Pair(x, [function(x)]))

    def forward(self, x: Tensor) -> Pair:
        pair: Pair = self.make(self.first(x))
        return Pair(pair.left + pair.right[0], pair.right)


def test_outputs_may_be_dataclasses_and_lists() -> None:
    model = Structured(lambda x: (x * 0).log())
    with Trace(model) as trace:
        pair = model(torch.ones(2, 4))
        pair.left.sum().backward()
    culprit = trace.first_bad()
    assert culprit is not None
    assert culprit.module == "make"
    assert culprit.reached[:2] == ("left", "right[0]")


def test_a_method_of_a_module_that_is_called_directly_has_its_name() -> None:
    class Head(nn.Module):
        def loss(self, x: Tensor) -> Tensor:
            return (x * 0).log().mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.head.loss(x)

    model = Model()
    with Trace(model) as trace:
        model(torch.ones(2))
    culprit = trace.first_bad()
    assert culprit is not None
    assert culprit.module == "head"


def test_two_batches_of_one_step_are_both_watched() -> None:
    model = Chain(lambda x: x.log())
    with Trace(model) as trace:
        model(torch.full((2, 4), 1e3))["loss/task/total"].backward()
        trace_of_first = len(trace.records)
        model(torch.full((2, 4), -1e3))["loss/task/total"].backward()
    records = [record for record in trace.records if record.status == "origin"]
    assert trace.first_bad() is not None
    assert any(record.index >= trace_of_first for record in records)


def test_the_step_is_the_same_with_and_without_a_trace() -> None:
    results = []
    for watched in (False, True):
        model = Chain(lambda x: torch.nn.functional.dropout((x.half() * 300).relu_(), 0.5))
        torch.manual_seed(1)
        if watched:
            traced(model)
        else:
            model(torch.linspace(-1, 2, 8).view(2, 4))["loss/task/total"].backward()
        results.append([model.first.weight.grad, torch.rand(1)])
    for plain, seen in zip(*results, strict=True):
        assert plain is not None
        assert seen is not None
        assert torch.equal(plain, seen)


def test_finding_a_cause_leaves_random_numbers_alone() -> None:
    """The operation that is done again may draw some."""
    drawn = []
    for watched in (False, True):
        torch.manual_seed(3)
        function = Chain(lambda x: torch.nn.functional.dropout((x * 0).log(), 0.5))
        torch.manual_seed(4)
        if watched:
            traced(function)
        else:
            function(torch.linspace(-1, 2, 8).view(2, 4))["loss/task/total"].backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
