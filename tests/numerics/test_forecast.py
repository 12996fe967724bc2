from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bevctl.models.build import build_model
from bevctl.numerics.forecast import Forecast, assess, forecast
from bevctl.numerics.ranges import ModuleRange
from tests.models.nano import nano_batch, nano_config
from tests.numerics.faults import enlarged


def _range(module: str, phase: str, largest: float, exponent: int = 0, dtype: str = "bfloat16") -> ModuleRange:
    """A module all of whose numbers but the largest have one binary exponent."""
    exponents = [0] * 128
    exponents[exponent + 64] = 1000
    return ModuleRange(module, phase, dtype, largest, "aten.mm.default", "file.py:1", 0.0, tuple(exponents))


def test_large_activations_are_kept_in_fp32_the_outermost_module_only() -> None:
    ranges = [_range("head.conv", "forward", 3e4), _range("head", "forward", 2e5), _range("neck", "forward", 10.0)]
    found = assess(ranges, 1, planned_scale=1024.0)
    assert found.fp32_modules == ("head",)
    assert [(risk.module, risk.kind) for risk in found.risks] == [("head", "overflow"), ("head.conv", "overflow")]
    assert found.risks[1].headroom == pytest.approx(65504 / 3e4)
    assert found.patch(dynamic=True) == {"precision.fp32_modules": ["head"]}


def test_what_is_fp32_anyway_is_no_risk() -> None:
    assert assess([_range("loss", "forward", 1e9, dtype="float32")], 1, 1024.0).risks == ()


def test_large_gradients_lower_the_loss_scale() -> None:
    found = assess([_range("stem", "backward", 4.0)], 1, planned_scale=65536.0)
    assert (found.highest_scale, found.fp32_modules) == (2.0**10, ())
    assert [risk.kind for risk in found.risks] == ["overflow"]
    assert found.patch(dynamic=True) == {"precision.init_scale": 1024.0}
    assert found.patch(dynamic=False) == {"precision.loss_scale": 1024.0}


def test_a_measured_loss_scale_is_taken_out() -> None:
    plain = assess([_range("stem", "backward", 4.0, -20)], 1, 65536.0)
    scaled = assess([_range("stem", "backward", 4.0 * 256, -12)], 1, 65536.0, measured_scale=256.0)
    assert (scaled.highest_scale, scaled.lowest_scale) == (plain.highest_scale, plain.lowest_scale)
    assert scaled.risks[0].largest == plain.risks[0].largest


def test_small_gradients_raise_a_fixed_loss_scale() -> None:
    found = assess([_range("stem", "backward", 1e-6, -30)], 1, planned_scale=8.0)
    assert [(risk.kind, risk.lost) for risk in found.risks] == [("underflow", 1.0)]
    assert found.lowest_scale == 32.0
    assert found.patch(dynamic=False) == {"precision.loss_scale": 32.0}
    assert found.patch(dynamic=True) == {}


def test_a_quiet_model_needs_nothing() -> None:
    found = assess([_range("stem", "backward", 0.01, -8), _range("stem", "forward", 3.0)], 4, 1024.0)
    assert (found.risks, found.patch(True), found.patch(False)) == ((), {}, {})


def _forecast(model: nn.Module, dtype: torch.dtype, scale: float) -> Forecast:
    def gradients(seed: int) -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            losses: dict[str, Tensor] = model(nano_batch(nano_config(), seed=seed))
        total = torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum()
        (total * scale).backward()

    return forecast(model, range(2), gradients, planned_scale=128.0, measured_scale=scale)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 16.0)])
def test_the_next_module_to_break_is_forecast_while_all_is_still_finite(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    model = build_model(nano_config())
    quiet = _forecast(model, dtype, scale)
    assert quiet.fp32_modules == ()
    enlarged("heads.map.classifier.3", 2e4)(model)
    found = _forecast(model, dtype, scale)
    assert found.culprit is None
    assert found.steps == 2
    assert found.fp32_modules == ("heads.map.classifier.3",)
    risk = next(risk for risk in found.risks if risk.phase == "forward")
    assert "convolution" in risk.op
    assert 1 < risk.headroom < 8


def test_a_step_that_breaks_is_no_forecast() -> None:
    torch.manual_seed(0)
    model = build_model(nano_config())
    enlarged("heads.map.classifier.3", 8e5)(model)
    found = _forecast(model, torch.float16, 1.0)
    assert found.steps == 1
    assert found.culprit is not None
    assert found.culprit.module == "heads.map.classifier.3"
