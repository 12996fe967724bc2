"""One operation at a time: done again in a wider format, and its inputs that it cannot take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload

from bevctl.numerics.operation import Call, traits_of
from bevctl.numerics.poles import pole_sentence
from bevctl.numerics.recent import RecentCalls
from bevctl.numerics.rerun import _HALF_ONLY, run_wide
from bevctl.numerics.verdict import judge

aten = torch.ops.aten


def _call(func: OpOverload, *args: Any, **kwargs: Any) -> Call:
    return Call(func, traits_of(func), args, kwargs)


def test_half_becomes_single_and_single_becomes_double() -> None:
    x = torch.full((2,), 300.0, dtype=torch.float16)
    (wide,) = run_wide(_call(aten.mul.Tensor, x, x), torch.float16)
    assert (wide.dtype, wide[0].item()) == (torch.float32, 90000.0)
    (wide,) = run_wide(_call(aten.exp.default, torch.tensor([100.0])), torch.float32)
    assert wide.dtype is torch.float64
    assert wide.isfinite().all()


def test_a_cast_is_done_without_it() -> None:
    (wide,) = run_wide(_call(aten._to_copy.default, torch.tensor([1e5]), dtype=torch.float16), torch.float16)
    assert (wide.dtype, wide.item()) == (torch.float32, 1e5)


def test_nothing_that_the_call_writes_to_is_touched() -> None:
    x, out = torch.ones(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    run_wide(_call(aten.add_.Tensor, x, x), torch.float16)
    run_wide(_call(aten.mul.out, x, x, out=out), torch.float16)
    assert (x.tolist(), out.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_an_integer_operand_stays_one() -> None:
    (wide,) = run_wide(
        _call(aten.index_select.default, torch.ones(3, dtype=torch.float16), 0, torch.tensor([2])), torch.float16
    )
    assert wide.tolist() == [1.0]


def test_what_does_not_exist_in_the_wider_format_is_unknown() -> None:
    call = _call(aten.mm.default, torch.ones(2, 3), torch.ones(2, 3))
    verdict = judge(call, (-1, -1), {torch.float32}, RecentCalls())
    assert verdict.kind == "unknown"
    assert "could not run in float64" in verdict.what


def _attention_inputs(seed: int, queries: int, keys: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, queries, channels), (2, 3, keys, channels), (2, 3, keys, channels))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


@given(st.integers(0, 999), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_plain_attention_and_its_gradients_equal_torchs(
    seed: int, queries: int, keys: int, channels: int, causal: bool
) -> None:
    query, key, value = (t.requires_grad_() for t in _attention_inputs(seed, queries, keys, channels))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.autograd.grad(out, (query, key, value), grad_out)
    bound = {"query": query, "key": key, "value": value, "is_causal": causal, "grad_out": grad_out}
    with torch.no_grad():
        forward = _HALF_ONLY["aten._scaled_dot_product_flash_attention.default"](bound)
        backward = _HALF_ONLY["aten._scaled_dot_product_flash_attention_backward.default"](bound)
    torch.testing.assert_close(forward[0], out)
    for got, wanted in zip(backward, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_every_operation_of_half_precision_only_exists() -> None:
    for name in _HALF_ONLY:
        packet, overload = name.removeprefix("aten.").split(".")
        arguments = {argument.name for argument in getattr(getattr(aten, packet), overload)._schema.arguments}
        wanted = {"query", "key", "value"} | ({"grad_out"} if "backward" in name else set())
        assert wanted <= arguments


POLES: Mapping[str, tuple[Callable[[], Call], str]] = {
    "log": (lambda: _call(aten.log.default, torch.tensor([0.0, -1.0, 2.0])), "logarithm of zero or less: 2 of 3"),
    "div": (
        lambda: _call(aten.div.Tensor, torch.ones(3), torch.tensor([0.0, 1.0, 0.0])),
        "division by zero: 2 of 3",
    ),
    "sqrt": (lambda: _call(aten.sqrt_.default, torch.tensor([-1.0])), "square root of a negative number: 1 of 1"),
    "softmax": (
        lambda: _call(aten._softmax.default, torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf]]), -1, False),
        "softmax of rows in which every entry is masked: 1 of 2",
    ),
    "mean": (lambda: _call(aten.mean.default, torch.empty(0)), "mean of no elements"),
    "var": (lambda: _call(aten.var.correction, torch.ones(1)), "variance of one element"),
    "a healthy log": (lambda: _call(aten.log.default, torch.tensor([0.5])), ""),
    "a healthy mean": (lambda: _call(aten.mean.default, torch.ones(2)), ""),
    "an addition": (lambda: _call(aten.add.Tensor, torch.ones(2), torch.ones(2)), ""),
}


@pytest.mark.parametrize("name", POLES)
def test_what_an_operation_cannot_take_is_said(name: str) -> None:
    make, sentence = POLES[name]
    assert pole_sentence(make()) == sentence
