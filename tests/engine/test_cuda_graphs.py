from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.engine.cuda_graphs import RecordedForward, record_parts
from bevctl.engine.optim import build_optimizer
from bevctl.engine.precision import keep_fp32
from bevctl.models.build import build_model, static_parts
from tests.engine.test_stand_in import InSingle
from tests.models.nano import nano_batch, nano_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.linear(x)))
        return out


def recorded(module: nn.Module) -> tuple[RecordedForward, list[str]]:
    """The stand-in that `module` gets on the GPU, and its reports."""
    reports: list[str] = []
    record_parts(nn.ModuleDict({"part": module.to(CUDA)}), ["part"], reports.append)
    stand_in = module.forward
    assert isinstance(stand_in, RecordedForward)
    return stand_in, reports


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("checkpointing", [(), ("camera", "decoder")])
def test_training_is_the_same_to_the_bit(checkpointing: tuple[str, ...]) -> None:
    """Steps of two batches with FP16, stochastic depth, dropout and BatchNorm: losses, weights, random states."""
    config = nano_config(**{"model.checkpointing": checkpointing})
    batches = [nano_batch(config).to(CUDA), nano_batch(config, seed=1).to(CUDA)]
    runs = []
    for record in (False, True):
        torch.manual_seed(0)
        model = build_model(config).to(CUDA).train()
        reports: list[str] = []
        if record:
            assert record_parts(model, static_parts(config.model), reports.append)
        runs.append((*_train(model, batches, steps=3), *model.state_dict().values(), torch.cuda.get_rng_state()))
        assert reports == []
    for plain, replayed in zip(*runs, strict=True):
        assert torch.equal(replayed, plain)


def _train(model: nn.Module, batches: list[Batch], steps: int) -> list[Tensor]:
    optimizer = build_optimizer(model, nano_config().optim, 1e-3)
    torch.manual_seed(1)
    totals = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with torch.autocast("cuda", torch.float16):
                losses = model(batch)
            total = torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum()
            total.backward()
            totals.append(total.detach())
        optimizer.step()
    return totals


def test_gradients_of_a_part_in_fp32_follow_its_weights() -> None:
    """Nothing rounded at the recording stays: neither weights of then, nor memory that was only lent."""
    torch.manual_seed(0)
    model, reports = nn.ModuleDict({"part": InSingle()}).to(CUDA).train(), list[str]()
    assert record_parts(model, ["part"], reports.append)
    weight = model.get_parameter("part.weight")
    for _ in range(3):
        x, weights = torch.randn(4, 3, device=CUDA, requires_grad=True), torch.randn(4, 5, device=CUDA)
        with torch.autocast("cuda", torch.float16):
            out = model["part"](x)
        found = torch.autograd.grad(out, (x, weight), weights)
        for ours, expected in zip(found, (weights @ weight, weights.T @ x), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            weight.mul_(-2.0)
    assert reports == []


def test_other_shapes_run_as_they_are() -> None:
    part = Part()
    stand_in, reports = recorded(part)
    part(torch.randn(8, 3, device=CUDA))
    assert stand_in.recording is not None
    part(torch.randn(5, 3, device=CUDA)).sum().backward()
    assert stand_in.recording.runs == 2, "the proof and one call"
    assert reports == []


def test_a_module_that_moves_to_fp32_is_recorded_anew() -> None:
    part = Part()
    stand_in, reports = recorded(part)
    x = torch.randn(8, 3, device=CUDA)
    with torch.autocast("cuda", torch.float16):
        part(x)
        first = stand_in.recording
        part(x)
        assert stand_in.recording is first
        keep_fp32(part, ["linear"], "cuda")
        out = part(x)
    assert stand_in.recording is not first
    assert out.dtype == torch.float32
    assert reports == []


def test_a_module_whose_dropout_is_switched_off_is_recorded_anew() -> None:
    part = Part()
    _, reports = recorded(part)
    x = torch.randn(64, 3, device=CUDA)
    assert int((part(x) == 0).sum()) > 64, "half of them dropped"
    part.drop.eval()
    assert int((part(x) == 0).sum()) == 0
    assert reports == []


def test_a_part_that_waits_for_the_device_is_reported() -> None:
    class Waiting(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum().item() > -1e9)

    part = Waiting()
    _, reports = recorded(part)
    out = part(torch.randn(8, 3, device=CUDA))
    out.sum().backward()
    assert reports == ["part runs without CUDA graphs: RuntimeError: it waits for the device"]
    assert torch.isfinite(torch.ones(2, device=CUDA).sum()), "the device still works"


def test_a_second_forward_pass_before_the_backward_pass_is_an_error() -> None:
    part = Part()
    recorded(part)
    x = torch.randn(8, 3, device=CUDA)
    first = part(x)
    part(x)
    with pytest.raises(RuntimeError, match="ran again before the backward pass"):
        first.sum().backward()
