"""PETRv2 on a CUDA device: the CPU's numbers, every precision, CUDA graphs, no waiting, attention at its real size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.load import load
from bevctl.config.schema import Config, PetrConfig
from bevctl.engine.cuda_graphs import record_parts
from bevctl.engine.precision import keep_fp32
from bevctl.engine.step import TrainStep
from bevctl.measure.timing import build_step
from bevctl.models.build import build_model, static_parts
from bevctl.models.petrv2_loss import detection_losses
from bevctl.models.petrv2_transformer import Attention, ImageMemory, PetrDecoderLayer
from bevctl.ops import backend
from tests.models.nano_petrv2 import nano_petrv2_batch, nano_petrv2_config
from tests.waits import host_never_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("full_float32"),
]
CUDA = torch.device("cuda")
SHIPPED = {"precision.fp32_modules": load("petrv2").config.precision.fp32_modules}
QUERIES, FEATURES = 900, 12_000


def losses_on(device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = nano_petrv2_config()
    model = build_model(config).to(device).eval()
    losses: dict[str, Tensor] = model(nano_petrv2_batch(config).to(device))
    return {name: value.detach().cpu() for name, value in losses.items()}


def test_losses_equal_the_cpus() -> None:
    on_cpu, on_gpu = losses_on(torch.device("cpu")), losses_on(CUDA)
    assert on_gpu.keys() == on_cpu.keys()
    for name, value in on_cpu.items():
        assert torch.allclose(on_gpu[name], value, rtol=2e-3, atol=2e-3), (name, on_gpu[name], value)


def steps(step: TrainStep, batches: Sequence[Batch], count: int) -> list[float]:
    return [float(step.run([batches[number % len(batches)]], number).total) for number in range(count)]


@pytest.mark.parametrize("checkpointing", [(), ("camera", "decoder")])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_batch_is_learnt_in_every_precision(dtype: str, checkpointing: tuple[str, ...]) -> None:
    config = nano_petrv2_config(**SHIPPED, **{"model.checkpointing": checkpointing, "optim.warmup": 0})
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=3e-3, schedule="constant"))
    reports: list[str] = []
    totals = steps(build_step(config, dtype, CUDA, reports.append), [nano_petrv2_batch(config)], 60)
    assert reports == []  # every part was recorded
    assert totals[-1] < 0.75 * totals[0]


def test_the_first_loss_scale_holds() -> None:
    config = nano_petrv2_config(**SHIPPED, **{"optim.warmup": 0})
    step = build_step(config, "fp16", CUDA)
    steps(step, [nano_petrv2_batch(config, seed=seed) for seed in range(4)], 40)
    assert float(step.state.scaler.value) > 128


def test_a_step_never_waits_for_the_device() -> None:
    config = nano_petrv2_config(**SHIPPED)
    step = build_step(config, "fp16", CUDA)
    batches = [nano_petrv2_batch(config, seed=seed).pin_memory() for seed in range(2)]
    steps(step, batches, 4)
    with host_never_waits():
        tensors = step.run([batches[0]], 4)
    assert torch.isfinite(tensors.total)


def recorded_and_plain(config: Config) -> list[list[Tensor]]:
    runs = []
    for record in (False, True):
        torch.manual_seed(0)
        model = build_model(config).to(CUDA).train()
        reports: list[str] = []
        if record:
            assert record_parts(model, static_parts(config.model), reports.append)
        totals = []
        torch.manual_seed(1)
        for seed in range(2):
            with torch.autocast("cuda", torch.float16):
                losses = model(nano_petrv2_batch(config, seed=seed).to(CUDA))
            totals.append(torch.stack(list(losses.values())).sum())
            totals[-1].backward()
        assert reports == []
        runs.append([*(t.detach() for t in totals), *(p.grad for p in model.parameters() if p.grad is not None)])
    return runs


def test_recorded_parts_give_the_same_losses_and_gradients() -> None:
    plain, recorded = recorded_and_plain(nano_petrv2_config())
    assert len(plain) == len(recorded)
    for expected, found in zip(plain, recorded, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_heads_can_be_recorded_with_modules_in_fp32_inside() -> None:
    """Gradients follow the weights over several steps, whatever autocast rounded when the heads were recorded."""
    config = nano_petrv2_config(**SHIPPED, **{"model.petr.dropout": 0.0})
    runs = []
    for record in (False, True):
        torch.manual_seed(0)
        model = build_model(config).to(CUDA).train()
        keep_fp32(model, config.precision.fp32_modules, "cuda")
        reports: list[str] = []
        if record:
            assert record_parts(model, ["heads.object", "heads.map"], reports.append)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        totals = []
        for seed in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                losses = model(nano_petrv2_batch(config, seed=seed).to(CUDA))
            totals.append(torch.stack(list(losses.values())).sum())
            totals[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert reports == []
        runs.append([t.detach() for t in (*totals, *model.state_dict().values()) if t.is_floating_point()])
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_deterministic_training_repeats_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = nano_petrv2_config(**SHIPPED)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [steps(build_step(config, "fp16", CUDA), [nano_petrv2_batch(config)], 6) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_attention_of_the_real_size_keeps_its_error_and_no_weights(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    attention = Attention(256, 8, 0.0).to(CUDA)
    query = torch.randn(1, QUERIES, 256, device=CUDA, requires_grad=True)
    keys, values = torch.randn(2, 1, FEATURES, 256, device=CUDA)
    exact = attention.double()
    expected = exact(query.double(), keys.double(), values.double()).detach()
    attention.float()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype):
        found = attention(query, keys, values)
    found.float().sum().backward()
    assert float((found.detach().double() - expected).norm() / expected.norm()) < bound
    weights = 8 * QUERIES * FEATURES * 2
    assert torch.cuda.max_memory_allocated() - before < weights / 2


def test_padded_features_are_not_looked_at_in_half_precision() -> None:
    torch.manual_seed(0)
    layer = PetrDecoderLayer(PetrConfig(dropout=0.0)).to(CUDA)
    keys, values = torch.randn(2, 2, 600, 256, device=CUDA)
    padding = torch.zeros(2, 600, dtype=torch.bool, device=CUDA)
    padding[:, 500:] = True
    query, position = torch.randn(2, 50, 256, device=CUDA), torch.randn(50, 256, device=CUDA)
    with torch.autocast("cuda", torch.float16):
        masked = layer(query, position, ImageMemory(keys, values, padding, None))
        shortened = layer(query, position, ImageMemory(keys[:, :500], values[:, :500], None, None))
    torch.testing.assert_close(masked, shortened, rtol=2e-2, atol=2e-2)


def test_losses_of_the_real_size_equal_those_that_the_host_matches() -> None:
    torch.manual_seed(0)
    config = nano_petrv2_config()
    batch = nano_petrv2_batch(config).to(CUDA)
    boxes = [F.pad(torch.rand(count, 7, device=CUDA) * 8 + 0.5, (0, 2)) for count in (60, 35)]
    labels = [torch.randint(0, 10, (len(b),), device=CUDA) for b in boxes]
    batch = dataclasses.replace(batch, boxes=boxes, labels=labels)
    logits, codes = torch.randn(6, 2, QUERIES, 10, device=CUDA), 3 * torch.randn(6, 2, QUERIES, 10, device=CUDA)
    found = detection_losses(logits, codes, batch)
    with backend.forced("torch"):
        expected = detection_losses(logits, codes, batch)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
