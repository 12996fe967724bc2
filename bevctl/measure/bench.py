"""What a training step of a config costs in each precision: time by part, memory, use of the hardware, loss."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import bevctl
from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.engine.determinism import algorithms
from bevctl.engine.graph_memory import graph_bytes
from bevctl.engine.precision import MatmulCounter
from bevctl.engine.step import TrainStep
from bevctl.errors import BevctlError, ExitCode
from bevctl.measure.bench_inputs import Inputs, make_inputs
from bevctl.measure.bench_report import Report, Result, Split, Spread
from bevctl.measure.part_clock import PartClock, now, seconds_between
from bevctl.measure.timing import (
    build_step,
    float32_products,
    kernel_times,
    loss_of,
    step_seconds,
)
from bevctl.models.build import parts_of
from bevctl.ops import backend

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
"""tf32 is FP32 whose products may use TF32 on the tensor cores; fp32 is without."""
_BATCHES_ON_GPU, _BATCHES_ON_CPU = 4, 2
"""Different batches that a measurement goes through in turn."""
_HOST_STEPS = 5
_WORK_PER_FORWARD = 3
"""A step's arithmetic over that of its forward pass: the backward pass does each product twice."""


def default_precisions(device: torch.device) -> tuple[str, ...]:
    """What is worth measuring on `device`: a CPU has no TF32, and FP16 there is emulated, tens of times slower."""
    if device.type != "cuda":
        return ("fp32", "bf16")
    capability = torch.cuda.get_device_capability(device)
    return PRECISIONS if capability >= (8, 0) else ("fp32", "fp16")


def bench(
    config: Config,
    precisions: Sequence[str],
    device: torch.device,
    steps: int,
    tell: Callable[[str], None] = lambda _: None,
    inputs: Inputs | None = None,
) -> Report:
    """Measures a training step of `config` in each of `precisions`, with equal seeds and batches.

    Args:
        steps: steps timed.
        tell: gets a sentence on what goes on.
        inputs: batches to measure with; by default those of `make_inputs`.

    Raises:
        BevctlError: data or device cannot be used, or memory ran out in every precision (exit code 4).
    """
    on_gpu = device.type == "cuda"
    if inputs is None:
        inputs = make_inputs(config, min(_BATCHES_ON_GPU if on_gpu else _BATCHES_ON_CPU, steps), pin=on_gpu)
    tell(f"{config.train.batch} samples a step, {_source(inputs)}")
    flops = _forward_flops(config, inputs.batches[0], device)
    rates = {name: matmul_rate(name, device) for name in precisions}
    results = []
    for name in precisions:
        tell(f"Measuring {name}")
        result = _measure(config, name, inputs.batches, device, steps, tell)
        results.append(_with_mfu(result, flops, rates[name]))
    if all(result.step_s is None for result in results):
        raise BevctlError(str(results[0].error), "Lower --batch, or use --grad-checkpoint.", ExitCode.RUN_FAILED)
    return Report(_hardware(device, rates), _versions(), _settings(config), _describe(inputs), flops, results)


def _with_mfu(result: Result, flops: int, rate: float) -> Result:
    if result.step_s is None:
        return result
    return dataclasses.replace(result, mfu=_WORK_PER_FORWARD * flops / result.step_s.median / rate)


def _source(inputs: Inputs) -> str:
    points = f", {inputs.points_per_sample:,} points each" if inputs.points_per_sample else ""
    return f"from {inputs.source}{points}" if inputs.source != "synthetic" else f"made in memory{points}"


def _describe(inputs: Inputs) -> dict[str, Any]:
    return {
        "source": inputs.source,
        "batches": len(inputs.batches),
        "points_per_sample": inputs.points_per_sample,
        "loading_s_per_batch": inputs.loading_s,
    }


def _measure(
    config: Config,
    name: str,
    batches: Sequence[AnyBatch],
    device: torch.device,
    steps: int,
    tell: Callable[[str], None],
) -> Result:
    batch = config.train.batch
    try:
        with algorithms(config.train.deterministic), float32_products(tf32=name == "tf32"):
            # Nothing here holds the step: its memory must be free again before the next measurement.
            result = _measure_step(build_step(config, "fp32" if name == "tf32" else name, device, tell), batches, steps)
            return dataclasses.replace(result, precision=name, batch=batch)
    except torch.cuda.OutOfMemoryError as error:
        return Result(name, batch, error=f"GPU memory ran out in {name}: {str(error).split('. ')[0]}.")
    finally:
        gc.collect()  # a recorded part and its module refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_step(step: TrainStep, batches: Sequence[AnyBatch], steps: int) -> Result:
    with _without_dropout(step.state.model):
        loss = loss_of(step, batches[0]).item()
    if step.device.type != "cuda":
        step_seconds(step, batches, 1)  # warm-up
        spread = Spread.of(step_seconds(step, batches, steps))
        return Result("", 0, step_s=spread, split=_split(step, batches, steps), loss=loss)
    step_seconds(step, batches, len(batches))
    torch.cuda.reset_peak_memory_stats(step.device)
    spread = Spread.of(step_seconds(step, batches, steps))
    allocated = torch.cuda.max_memory_allocated(step.device) + graph_bytes(step.device)
    reserved = torch.cuda.max_memory_reserved(step.device)
    split = _split(step, batches, steps)
    host = _medians(_clocked(step, batches, _HOST_STEPS, idle=True).host_seconds())
    kernels = kernel_times(step, batches)
    return Result(
        "",
        0,
        step_s=spread,
        split=split,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        host_s=sum(host.values()),
        host_by_part=host,
        kernel_s=kernels.seconds,
        launches=kernels.launches,
        loss=loss,
    )


def _clocked(step: TrainStep, batches: Sequence[AnyBatch], steps: int, idle: bool = False) -> PartClock:
    """A clock that has seen `steps` steps, each begun on an idle device if asked for."""
    model = step.state.model
    clock = PartClock(model, parts_of(model), step.device)
    with clock.attached():
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), steps)):
            if idle:
                torch.cuda.synchronize(step.device)
            with clock.step():
                step.run([batch], number)
    return clock


def _medians(measured: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(times.get(name, 0.0) for times in measured) for name in measured[0]}


def _split(step: TrainStep, batches: Sequence[AnyBatch], steps: int) -> Split:
    medians = _medians(_clocked(step, batches, max(2, steps // 2)).seconds())
    forward, backward = (_below(f"{phase}/", medians) for phase in ("forward", "backward"))
    return Split(
        data=medians["data"],
        forward=sum(forward.values()),
        backward=sum(backward.values()),
        optimizer=medians["optimizer"],
        forward_by_part=forward,
        backward_by_part=backward,
    )


def _below(prefix: str, times: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in times.items() if name.startswith(prefix)}


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Everything as in training but dropout and stochastic depth; BatchNorm uses the batch's statistics."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def _forward_flops(config: Config, batch: AnyBatch, device: torch.device) -> int:
    """Counted in plain torch operations, as the kernels of our own are invisible to the counter."""
    step = build_step(config, "fp32", device)
    with torch.no_grad(), backend.forced("torch"), MatmulCounter() as counter:
        loss_of(step, batch)
    return sum(counter.flops.values())


def matmul_rate(precision: str, device: torch.device) -> float:
    """Arithmetic per second of a large square matrix product in one of PRECISIONS: the median of ten."""
    size = 8192 if device.type == "cuda" else 768
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    with float32_products(tf32=precision == "tf32"):
        a @ b
        instants = [now(device)]
        for _ in range(10):
            a @ b
            instants.append(now(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = statistics.median(seconds_between(start, end) for start, end in itertools.pairwise(instants))
    return 2 * size**3 / seconds


def gains_of_half(half: str, device: torch.device) -> tuple[float, float]:
    """How many times as fast a large product is in `half` as in FP32, and as in TF32."""
    rate = matmul_rate(half, device)
    return rate / matmul_rate("fp32", device), rate / matmul_rate("tf32", device)


def _hardware(device: torch.device, rates: dict[str, float]) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "cpu_threads": torch.get_num_threads() if not on_gpu else os.cpu_count(),
        "matmul_flops_per_s": rates,
        "operations": backend.reason(device),
    }


def _settings(config: Config) -> dict[str, Any]:
    train = config.train
    return {
        "config": config.name,
        "checkpointing": list(config.model.checkpointing),
        "compile": train.compile,
        "cuda_graphs": train.cuda_graphs,
        "deterministic": train.deterministic,
    }


def _versions() -> dict[str, str | None]:
    return {
        "bevctl": bevctl.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
