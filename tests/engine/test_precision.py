from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from bevctl.engine.precision import MatmulCounter, Precision, keep_fp32, precision_sentence, resolve_precision
from bevctl.errors import BevctlError

CPU = torch.device("cpu")


def _fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla Test")
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "expected"), [((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((9, 0), "bf16")]
)
def test_auto_follows_the_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    assert resolve_precision("auto", _fake_gpu(monkeypatch, capability)).name == expected


def test_auto_is_fp32_on_a_cpu() -> None:
    assert resolve_precision("auto", CPU) == Precision("fp32", "cpu")
    assert resolve_precision("fp16", CPU).is_half


@pytest.mark.parametrize(
    ("requested", "capability", "way_out"),
    [("bf16", (7, 0), "--fp16"), ("fp16", (6, 0), "--fp32"), ("bf16", (6, 0), "--fp32")],
)
def test_a_format_the_gpu_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, requested: str, capability: tuple[int, int], way_out: str
) -> None:
    with pytest.raises(BevctlError, match="Tesla Test has compute capability") as caught:
        resolve_precision(requested, _fake_gpu(monkeypatch, capability))
    assert way_out in caught.value.hint


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: list[Tensor]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, pair: Pair) -> Tensor:
        self.seen = [pair.left.dtype, pair.right[0].dtype]
        result: Tensor = self.linear(pair.left + pair.right[0])
        return result


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.coder = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        result: Tensor = self.coder(Pair(y, [y]))
        return result


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_matched_modules_compute_in_fp32_under_autocast(name: str) -> None:
    model, precision = Outer(), Precision(name, "cpu")
    with precision.autocast():
        assert model(torch.ones(2, 4)).dtype == precision.dtype
    assert model.coder.seen == [precision.dtype] * 2
    assert keep_fp32(model, ["cod*"], "cpu") == ["coder"]
    with precision.autocast():
        out = model(torch.ones(2, 4))
    assert out.dtype == torch.float32
    assert model.coder.seen == [torch.float32] * 2
    out.sum().backward()
    assert model.stem.weight.grad is not None


def test_a_pattern_without_a_match_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(BevctlError, match="'codr' matches no module") as caught:
        keep_fp32(Outer(), ["codr"], "cpu")
    assert "coder" in caught.value.hint


def test_counts_the_work_by_the_type_that_ran() -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 2)
    x = torch.rand(1, 3, 6, 6)
    precision = Precision("bf16", "cpu")
    with MatmulCounter() as counter:
        with precision.autocast():
            y = stem(x)
        head(y.float().mean((2, 3)))
    convolution, linear = 2 * 36 * 8 * 3 * 9, 2 * 8 * 2
    assert counter.flops == {torch.bfloat16: convolution, torch.float32: linear}
    assert counter.share(torch.bfloat16) == pytest.approx(convolution / (convolution + linear))
    assert "BF16 active: 100% of matmul/conv work in BF16" in precision_sentence(precision, counter, 1.0)


def test_says_when_half_precision_is_not_active() -> None:
    with MatmulCounter() as counter:
        nn.Linear(4, 4)(torch.ones(2, 4))
    sentence = precision_sentence(Precision("fp16", "cpu"), counter, 65536.0)
    assert sentence == "FP16 NOT active: 0% of matmul/conv work in half precision, loss scale 65536"


def test_nothing_counted_is_no_share() -> None:
    assert MatmulCounter().share(torch.float16) == 0.0
