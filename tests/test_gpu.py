"""What only a CUDA device can show: the CPU's numbers, every precision, a step without waiting, determinism."""

from __future__ import annotations

import functools
from typing import cast

import pytest
import torch
from torch import Tensor

from bevctl.batch import Batch
from bevctl.config.schema import Config
from bevctl.engine.feed import Feed
from bevctl.engine.optim import build_optimizer
from bevctl.engine.precision import MatmulCounter, resolve_precision
from bevctl.engine.scaler import LossScaler
from bevctl.measure.timing import build_step
from bevctl.models.bev_decoder import BevDecoder
from bevctl.models.bevfusion import BEVFusion
from bevctl.models.build import bev_grid, build_model
from bevctl.models.map_head import MapHead
from bevctl.models.transfusion import TransFusionHead
from bevctl.ops.bev_pool import index_points, lift_splat
from tests.models.nano import nano_batch, nano_config
from tests.waits import host_never_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("full_float32"),
]
CUDA = torch.device("cuda")


def _losses(config: Config, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build_model(config).to(device).eval()
    losses: dict[str, Tensor] = model(nano_batch(config).to(device))
    return {name: value.detach().cpu() for name, value in losses.items()}


def test_losses_equal_the_cpus() -> None:
    config = nano_config()
    on_cpu, on_gpu = _losses(config, torch.device("cpu")), _losses(config, CUDA)
    assert on_gpu.keys() == on_cpu.keys()
    for name, value in on_cpu.items():
        assert torch.allclose(on_gpu[name], value, rtol=2e-3, atol=2e-3), (name, on_gpu[name], value)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_batch_is_learnt_in_every_precision(dtype: str) -> None:
    config = nano_config(**{"precision.dtype": dtype, "precision.init_scale": 1024.0})
    first, last = _train(config, nano_batch(config).to(CUDA), steps=60)
    assert last < 0.6 * first


def _train(config: Config, batch: Batch, steps: int) -> tuple[float, float]:
    """Total loss of the first and of the last of `steps` steps on one batch."""
    torch.manual_seed(0)
    precision = resolve_precision(config.precision.dtype, CUDA)
    model = build_model(config).to(CUDA)
    optimizer = build_optimizer(model, config.optim, 2e-3)
    scaler = LossScaler(config.precision, precision.is_half, CUDA)
    totals = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            losses = model(batch)
        total = torch.stack([value.float() for name, value in losses.items() if name.startswith("loss/")]).sum()
        scaler.scale(total).backward()
        scaler.unscale(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        totals.append(total.detach())
    return float(totals[0]), float(totals[-1])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_most_work_is_in_half_precision(dtype: str) -> None:
    config = nano_config()
    precision = resolve_precision(dtype, CUDA)
    model = build_model(config).to(CUDA)
    with MatmulCounter() as counter, precision.autocast():
        model(nano_batch(config).to(CUDA))
    assert counter.share(precision.dtype) > 0.8


def test_lift_splat_equals_the_cpus_forward_and_backward() -> None:
    torch.manual_seed(0)
    logits, cells = torch.randn(2, 3, 4 + 7, 5, 6), torch.randint(-1, 16, (2, 3, 5, 6, 4))
    results = []
    for device in (torch.device("cpu"), CUDA):
        moved = logits.to(device).requires_grad_()
        pooled = lift_splat(moved, index_points(cells.to(device), (4, 4)))
        (gradient,) = torch.autograd.grad((pooled**2).sum(), moved)
        results.append([t.detach().cpu() for t in (pooled, gradient)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-4)


def test_deterministic_training_repeats_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = nano_config(**{"precision.dtype": "fp16", "precision.init_scale": 1024.0})
    batch = nano_batch(config).to(CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        assert _train(config, batch, steps=8) == _train(config, batch, steps=8)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_waits_for_the_device_only_where_sizes_come_from_it() -> None:
    """Scaling, clipping, the guarded step and the scale's update never ask the device for a number."""
    config = nano_config(**{"precision.dtype": "fp16"})
    model = build_model(config).to(CUDA)
    optimizer = build_optimizer(model, config.optim, 1e-3)
    scaler = LossScaler(config.precision, True, CUDA)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    scaler.step(optimizer)  # the first step allocates the optimizer's state
    with host_never_waits():
        scaler.unscale(parameters)
        scaler.reject_if_nonfinite(torch.nn.utils.clip_grad_norm_(parameters, 35.0))
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(scaler.value)


def test_heads_and_losses_never_wait_for_the_device() -> None:
    config = nano_config()
    model = build_model(config).to(CUDA)
    assert isinstance(model, BEVFusion)
    heads = cast("list[TransFusionHead | MapHead]", list(model.heads.values()))
    batch = nano_batch(config).to(CUDA)
    cells = bev_grid(config.model).shape
    assert isinstance(model.decoder, BevDecoder)
    bev = torch.randn(batch.size, model.decoder.channels, *cells, device=CUDA, requires_grad=True)
    bev.grad = torch.zeros_like(bev)

    def run() -> list[Tensor]:
        losses = [head.loss(head(bev), batch) for head in heads]
        values = [value for found in losses for name, value in found.items() if name.startswith("loss/")]
        torch.stack(values).sum().backward()
        return values

    run()  # kernels are compiled, workspaces allocated
    with host_never_waits():
        values = run()
    assert torch.stack(values).isfinite().all()


def test_a_batch_arrives_whole_beside_running_kernels() -> None:
    """Each of many batches is read right after it was asked for, and its memory is used again soon."""
    feed, weight = Feed(CUDA), torch.randn(2048, 2048, device=CUDA)
    batch = nano_batch(nano_config())
    assert batch.images is not None
    for number in range(30):
        sent = batch.map_tensors(functools.partial(torch.full_like, fill_value=number % 2)).pin_memory()
        for _ in range(4):
            weight = (weight @ weight).clamp(-1, 1)
        received = feed(sent)
        assert received.images is not None
        total = received.images.float().sum()
        del received
        assert total.item() == (number % 2) * batch.images.numel()


def test_an_update_in_one_pass_never_waits_for_the_device() -> None:
    step = build_step(nano_config(**{"train.cuda_graphs": False}), "fp16", CUDA)
    batch = nano_batch(nano_config())
    for number in range(2):  # the first makes the optimizer's state, the second compiles kernels
        step.run([batch], number)
    losses = step.gradients([batch])
    with host_never_waits():
        tensors = step.update(losses, 2)
    assert torch.isfinite(tensors.total)
