"""What only a CUDA device can show: autograd's own thread, fused attention, the same culprit over three replays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevctl.models.build import build_model
from bevctl.numerics.record import Culprit
from bevctl.numerics.trace import Trace
from tests.models.nano import nano_batch, nano_config
from tests.numerics.faults import FAULTS, HALF, Fault
from tests.numerics.test_faults import broken, traced_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CHOSEN = ("attention logits", "division by zero in the backward pass only", "NaN intensity", "huge box", "flat camera")


def _culprit(fault: Fault) -> Culprit:
    model, batch = broken(fault)
    culprit = traced_step(model.cuda(), batch.to("cuda"), fault.dtype).first_bad()
    assert culprit is not None
    return culprit


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_is_attributed(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    culprit = _culprit(fault)
    assert culprit.module.startswith(fault.module)
    assert (culprit.verdict.kind, culprit.record.phase) == (fault.verdict, fault.phase), culprit.verdict
    assert fault.samples in (None, culprit.samples)


def test_the_culprit_agrees_over_three_replays() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "map head")
    found = [_culprit(fault) for _ in range(3)]
    assert {(c.record.index, c.record.op, c.module, c.verdict.kind, c.samples) for c in found} == {
        (found[0].record.index, "aten.convolution.default", "heads.map.classifier.3", "overflow", (0, 1))
    }


def test_an_unchanged_model_is_silent() -> None:
    torch.manual_seed(0)
    model = build_model(nano_config()).cuda()
    assert traced_step(model, nano_batch(nano_config()).to("cuda"), HALF).first_bad() is None


def test_gradients_of_fused_attention_that_overflow_are_done_again_in_fp32() -> None:
    torch.manual_seed(0)
    query, key, value = (gain * torch.randn(2, 2, 8, 16, device="cuda") for gain in (1e-3, 100.0, 100.0))
    query, key, value = (part.half().requires_grad_() for part in (query, key, value))
    with Trace(nn.Identity()) as trace:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out.backward(torch.full_like(out, 1e4) * torch.randn_like(out))
    (origin,) = [record for record in trace.records if record.status == "origin"]
    assert "attention" in origin.op
    assert origin.verdict is not None
    assert origin.verdict.kind == "overflow", origin.verdict
