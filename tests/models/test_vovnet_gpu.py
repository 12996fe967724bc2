"""VoVNet-99 on a CUDA device at the size that PETRv2 trains it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from bevctl.config.schema import VoVNetConfig
from bevctl.engine.cuda_graphs import record_parts
from bevctl.models.vovnet import VoVNet
from bevctl.ops import backend
from tests.models.rig import settle_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("full_float32"),
]
CUDA = torch.device("cuda")
MOST_ERROR = {torch.float16: 0.1, torch.bfloat16: 0.5, torch.float32: 1e-3}
"""Relative (L2), of outputs."""


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 320, 800, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def settled(checkpointing: bool = False, blocks: tuple[int, int, int, int] = (1, 3, 9, 3)) -> VoVNet:
    """VoVNet-99, or one of other depths, whose norms have the statistics of random images."""
    torch.manual_seed(0)
    with CUDA:
        model = VoVNet(VoVNetConfig(blocks=blocks), levels=2, checkpointing=checkpointing, norm_eval=True).train()
    with torch.no_grad():
        settle_statistics(model, images(2))
    return model


def outputs_and_gradients(model: VoVNet, batch: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All outputs and all gradients, each in a row; the loss is large enough for half precision."""
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
        maps = model(batch)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in maps]
    (1e3 * torch.stack([x.square().mean() for x in wide]).sum()).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([x.detach().flatten() for x in wide]), torch.cat(gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_are_as_exact_as_torch(dtype: torch.dtype) -> None:
    """A new network magnifies rounding, so that only float64 can tell a wrong kernel from another order of sums."""
    model, batch = settled(blocks=(1, 2, 1, 1)), images(2, seed=1)
    exact = outputs_and_gradients(copy.deepcopy(model).double(), batch.double(), torch.float64)
    errors = {}
    for choice in ("torch", "triton"):
        with backend.forced(choice):
            found = outputs_and_gradients(model, batch, dtype)
        errors[choice] = [float((x - e).norm() / e.norm()) for x, e in zip(found, exact, strict=True)]
    assert errors["triton"][0] < MOST_ERROR[dtype]
    for ours, torchs in zip(errors["triton"], errors["torch"], strict=True):
        assert ours < 1.5 * torchs, errors


def test_recomputing_gives_the_same_numbers_in_less_memory() -> None:
    batch, peaks, results = images(6), [], []
    for checkpointing in (False, True):
        model = settled(checkpointing)
        outputs_and_gradients(model, batch, torch.float16)  # kernels are compiled, cuDNN is warm
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results.append(outputs_and_gradients(model, batch, torch.float16))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    for plain, recomputed in zip(*results, strict=True):
        assert torch.allclose(plain, recomputed, rtol=1e-3, atol=1e-4)
    # Half precision keeps 95 million numbers an image without recomputing.
    assert peaks[0] < 6 * 0.30 * 2**30 + 1.0 * 2**30
    assert peaks[1] < 0.75 * peaks[0]


def test_it_is_recorded_as_a_graph_with_the_same_numbers() -> None:
    model, batch = settled(), images(2, seed=1)
    expected = outputs_and_gradients(model, batch, torch.float16)
    holder = torch.nn.ModuleDict({"backbone": model})
    reports: list[str] = []
    assert record_parts(holder, ["backbone"], reports.append) == ["backbone"]
    for _ in range(2):
        found = outputs_and_gradients(model, batch, torch.float16)
    assert reports == []
    for ours, plain in zip(found, expected, strict=True):
        assert float((ours - plain).norm() / plain.norm()) < 1e-3
