"""The kernels against torch's own AdamW: equal norms, weights and state, skipped steps, missing gradients."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bevctl.config.schema import OptimConfig, ParamGroupConfig
from bevctl.engine.one_pass_adamw import OnePassAdamW
from bevctl.engine.optim import build_optimizer
from bevctl.ops.backend import forced

from .fakes import Bench, point_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # without a GPU, Triton's interpreter
# On a GPU torch computes 1 - beta2^step in float32, which after two steps has lost five digits.
RELATIVE, ABSOLUTE = (1e-5, 1e-6) if DEVICE.type == "cuda" else (2e-6, 1e-7)
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, groups=(ParamGroupConfig(match="slow", lr=0.1, decay=0.0),))


class _Model(nn.Module):
    """Sizes below, at and above a chunk, a scalar, and one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"small": (3, 5), "slow": (7,), "exact": (4096,), "large": (9000,), "one": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        order = torch.channels_last
        self.strided = nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator).contiguous(memory_format=order))


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with forced("triton"):
        yield


def _pair() -> tuple[torch.optim.AdamW, torch.optim.AdamW]:
    """Two equal optimizers, one step old."""
    model = _Model().to(DEVICE)
    first = build_optimizer(model, OPTIM, OPTIM.lr)
    _set_gradients(first, seed=1)
    first.step()
    other = copy.deepcopy(model)
    second = build_optimizer(other, OPTIM, OPTIM.lr)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return first, second


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _set_gradients(optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in _parameters(optimizer):
        values = torch.randn(p.shape, generator=generator).to(DEVICE) * scale
        p.grad = torch.empty_like(p).copy_(values)


def _everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state[p] for p in _parameters(optimizer)]
    return [p.detach() for p in _parameters(optimizer)] + [
        s[k] for s in states for k in ("step", "exp_avg", "exp_avg_sq")
    ]


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def test_steps_are_those_of_torch() -> None:
    ours, torchs = _pair()
    kernels = OnePassAdamW(ours)
    for number in range(3):
        for optimizer in (ours, torchs):
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = group["lr"] * 0.7, (0.9 - 0.02 * number, 0.999)
        _set_gradients(torchs, seed=number + 2)
        torchs.step()
        _set_gradients(ours, seed=number + 2, scale=8.0)
        assert kernels.prepare()
        kernels.step(_scalar(1 / 8), _scalar(0.0))
    for a, b in zip(_everything(ours), _everything(torchs), strict=True):
        torch.testing.assert_close(a, b, rtol=RELATIVE, atol=ABSOLUTE)


def test_norms_are_of_the_unscaled_gradients() -> None:
    ours, _ = _pair()
    _set_gradients(ours, seed=5, scale=1e20)  # their squares are beyond float32
    _parameters(ours)[0].grad = None
    kernels = OnePassAdamW(ours)
    assert kernels.prepare()
    norms = kernels.norms(_scalar(1e-20))
    expected = [0.0 if p.grad is None else float((p.grad * 1e-20).norm()) for p in _parameters(ours)]
    torch.testing.assert_close(norms.cpu(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_shows_in_its_norm(bad: float) -> None:
    ours, _ = _pair()
    _set_gradients(ours, seed=6)
    grad = _parameters(ours)[2].grad
    assert grad is not None
    grad.view(-1)[-1] = bad
    kernels = OnePassAdamW(ours)
    assert kernels.prepare()
    assert torch.isfinite(kernels.norms(_scalar(1.0))).tolist().count(False) == 1


def test_a_skipped_step_changes_nothing() -> None:
    ours, untouched = _pair()
    _set_gradients(ours, seed=7)
    kernels = OnePassAdamW(ours)
    assert kernels.prepare()
    kernels.step(_scalar(1.0), _scalar(1.0))
    assert all(torch.equal(a, b) for a, b in zip(_everything(ours), _everything(untouched), strict=True))


def test_a_parameter_without_a_gradient_stays() -> None:
    ours, torchs = _pair()
    for optimizer in (ours, torchs):
        _set_gradients(optimizer, seed=8)
        _parameters(optimizer)[3].grad = None
    kernels = OnePassAdamW(ours)
    assert kernels.prepare()
    kernels.step(_scalar(1.0), _scalar(0.0))
    torchs.step()
    for a, b in zip(_everything(ours), _everything(torchs), strict=True):
        torch.testing.assert_close(a, b, rtol=RELATIVE, atol=ABSOLUTE)


def test_strides_of_axes_of_length_one_are_nobodys_business() -> None:
    """A 1×1 kernel's gradient comes as channels-last: other strides, the same order."""
    model = nn.Module()
    model.kernel = nn.Parameter(torch.randn(6, 4, 1, 1, device=DEVICE))
    optimizer = build_optimizer(model, OPTIM, OPTIM.lr)
    kernels = OnePassAdamW(optimizer)
    gradient = torch.randn(6, 4, 1, 1, device=DEVICE)
    model.kernel.grad = gradient
    optimizer.step()
    model.kernel.grad = gradient.as_strided(gradient.shape, (4, 1, 4, 4))
    assert model.kernel.grad.stride() != model.kernel.stride()
    assert kernels.prepare()
    torch.testing.assert_close(kernels.norms(_scalar(1.0)), gradient.norm()[None])
    model.kernel.grad = gradient.view(4, 6).T.unflatten(1, (4, 1, 1))
    assert not kernels.prepare(), "another order"


def test_what_it_cannot_do_it_says() -> None:
    model = _Model().to(DEVICE)
    optimizer = build_optimizer(model, OPTIM, OPTIM.lr)
    _set_gradients(optimizer, seed=1)
    kernels = OnePassAdamW(optimizer)
    assert not kernels.prepare(), "no state yet"
    optimizer.step()
    assert kernels.prepare()
    model.strided.grad = torch.randn(2, 3, 4, 5, device=DEVICE)
    assert not kernels.prepare(), "another memory order"
    with forced("torch"):
        assert not kernels.prepare()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_is_that_of_torch(tmp_path: Path, bench: Bench, dtype: str) -> None:
    """With steps that overflow and are skipped in FP16, and clipping that bites."""
    bench.plain = True  # without BatchNorm no gradient is rounding alone
    found = {}
    for backend in ("torch", "triton"):
        precision = {"dtype": dtype, "init_scale": 2.0**22, "growth_interval": 3}
        config = point_config(tmp_path / backend, precision=precision, optim={"clip": 0.5})
        with forced(backend):
            bench.train(dataclasses.replace(config, device=DEVICE.type))
        records = [json.loads(line) for line in (tmp_path / backend / "log.jsonl").read_text().splitlines()]
        found[backend] = bench.weights, records
    (plain, plain_records), (ours, our_records) = found["torch"], found["triton"]
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
    for key in ("skipped_steps", "loss_scale"):
        assert [r.get(key) for r in our_records] == [r.get(key) for r in plain_records]
    norms = [
        [r["grad_norm"] for r in records if r["grad_norm"] is not None] for records in (plain_records, our_records)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_a_run_is_resumed_to_the_bit(tmp_path: Path, bench: Bench) -> None:
    whole, halves = (
        dataclasses.replace(point_config(tmp_path / name), device=DEVICE.type) for name in ("whole", "halves")
    )
    bench.train(whole, max_iters=6)
    expected = bench.weights
    bench.train(halves, max_iters=3)
    bench.train(halves, resume="auto", max_iters=6)
    assert all(torch.equal(value, bench.weights[name]) for name, value in expected.items())
