"""Injected faults are attributed to cause, module and sample; their healthy twins stay silent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevctl.batch import Batch
from bevctl.models.build import build_model
from bevctl.numerics.trace import Trace
from tests.models.nano import nano_batch, nano_config
from tests.numerics.faults import FAULTS, HALF, SINGLE, Fault

named = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def traced_step(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Trace:
    device = next(model.parameters()).device.type
    with Trace(model) as trace:
        with torch.autocast(device, dtype=HALF, enabled=dtype is HALF):
            losses = model(batch)
        torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum().backward()
    return trace


def broken(fault: Fault) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = build_model(nano_config())
    fault.break_model(model)
    return model, fault.break_batch(nano_batch(nano_config()))


@named
def test_a_fault_is_attributed(fault: Fault) -> None:
    culprit = traced_step(*broken(fault), fault.dtype).first_bad()
    assert culprit is not None
    if fault.module.endswith("."):
        assert culprit.module.startswith(fault.module)
    else:
        assert culprit.module == fault.module
    assert culprit.verdict.kind == fault.verdict, culprit.verdict
    assert culprit.record.phase == fault.phase
    assert culprit.record.op.startswith(fault.op)
    assert culprit.record.place.line > 0
    assert fault.samples in (None, culprit.samples)
    assert (culprit.source.name if culprit.source else "") == fault.source
    assert (culprit.masked_by.op if culprit.masked_by else "").startswith(fault.masked_by or "")
    assert (culprit.masked_by is None) == (not fault.masked_by)


@named
def test_its_healthy_twin_is_silent(fault: Fault) -> None:
    torch.manual_seed(0)
    model, batch = build_model(nano_config()), fault.twin_batch(nano_batch(nano_config()))
    (fault.twin_model or fault.break_model)(model)
    trace = traced_step(model, batch, SINGLE if fault.twin_model is None else fault.dtype)
    assert trace.first_bad() is None
    assert trace.faults == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unchanged_model_is_silent(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trace = traced_step(build_model(nano_config()), nano_batch(nano_config()), dtype)
    assert trace.first_bad() is None
    assert {record.status for record in trace.records} <= {"fine", "declared"}
