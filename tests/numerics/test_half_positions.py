"""The NaN that hides in the public PETR head under FP16: found, named and cured; absent in ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bevctl.engine.precision import keep_fp32
from bevctl.models.build import build_model
from bevctl.numerics.trace import Trace
from tests.models.nano_petrv2 import nano_petrv2_batch, nano_petrv2_config
from tests.numerics.half_positions import BEYOND_RANGE, MODULE, half_positions, masked_half_positions

CONFIG = nano_petrv2_config(**BEYOND_RANGE, **{"model.map": None})


def traced(change: Callable[[nn.Module], None], fp32: tuple[str, ...] = ()) -> tuple[Trace, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build_model(CONFIG).train()
    change(model)
    keep_fp32(model, fp32, "cpu")
    with Trace(model) as trace:
        with torch.autocast("cpu", dtype=torch.float16):
            losses = model(nano_petrv2_batch(CONFIG))
        torch.stack(list(losses.values())).sum().backward()
    return trace, losses


def test_positions_in_half_precision_are_named() -> None:
    trace, losses = traced(half_positions)
    assert all(not value.isfinite() for value in losses.values())
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.module, culprit.record.op, culprit.record.phase) == (MODULE, "aten.div.Tensor", "forward")
    assert culprit.verdict.kind == "overflow"
    assert "float16 ends at 65504" in culprit.verdict.what
    assert culprit.record.place.function == "inverse_sigmoid"


def test_zeros_in_the_place_of_nan_hide_nothing_from_a_trace() -> None:
    trace, losses = traced(masked_half_positions)
    assert all(value.isfinite() for value in losses.values())
    culprit = trace.first_bad()
    assert culprit is not None
    assert (culprit.module, culprit.record.op) == (MODULE, "aten.div.Tensor")
    assert culprit.masked_by is not None
    assert culprit.masked_by.op.startswith("aten.nan_to_num")


@pytest.mark.parametrize("change", [half_positions, masked_half_positions])
def test_the_module_in_fp32_is_the_cure(change: Callable[[nn.Module], None]) -> None:
    trace, losses = traced(change, (MODULE,))
    assert trace.first_bad() is None
    assert all(value.isfinite() for value in losses.values())


def test_ours_is_silent_without_any_module_in_fp32() -> None:
    trace, losses = traced(lambda _: None)
    assert trace.first_bad() is None
    assert all(value.isfinite() for value in losses.values())
