"""How long a training step takes here. The one place where steps are timed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.engine.acceleration import accelerate
from bevctl.engine.dist import World
from bevctl.engine.parts import build_state
from bevctl.engine.precision import resolve_precision
from bevctl.engine.schedule import Schedule
from bevctl.engine.stand_in import Report
from bevctl.engine.step import TrainStep, total_loss
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.part_clock import now, seconds_between
from bevctl.measure.profiler import profiled

_SCHEDULE_ITERS = 10_000
"""Longer than any measurement."""


def build_step(config: Config, dtype: str, device: torch.device, report: Report = lambda _: None) -> TrainStep:
    """The step that training `config` in `dtype` (fp16, bf16 or fp32) runs; equal configs give equal initial weights.

    `report` gets a sentence about each part that cannot be compiled or recorded as the config asks for.

    Raises:
        BevctlError: the device cannot do the precision.
    """
    precision = resolve_precision(dtype, device)
    state, _ = build_state(config, precision, World(), device, iters_per_epoch=1)
    state.model.train()
    accelerate(state.model, config, World(), device, report)
    return TrainStep(state, state.model, Schedule(config.optim, _SCHEDULE_ITERS), precision, config.optim.clip)


def loss_of(step: TrainStep, batch: AnyBatch) -> Tensor:
    """() loss of a batch with the weights at hand."""
    with step.precision.autocast():
        return total_loss(step.state.model(batch.to(step.device)))


def step_seconds(step: TrainStep, batches: Sequence[AnyBatch], steps: int) -> list[float]:
    """Duration of each of `steps` steps, one after the other over `batches`, without a wait between them.

    The batches come in turn, as point clouds differ in size and some libraries prepare anew for each size; warm up
    with all of them first.
    """
    instants = [now(step.device)]
    for number in range(steps):
        step.run([batches[number % len(batches)]], number)
        instants.append(now(step.device))
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
    return [seconds_between(start, end) for start, end in itertools.pairwise(instants)]


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """What a GPU ran in a step."""

    seconds: float
    """Sum over all kernels and copies."""
    launches: float


def kernel_times(step: TrainStep, batches: Sequence[AnyBatch]) -> KernelTimes:
    """Mean over one step with each of `batches`, as the profiler sees it."""
    with profiled(ProfilerActivity.CUDA) as profiler:
        for number, batch in enumerate(batches):
            step.run([batch], number)
        torch.cuda.synchronize(step.device)
    # The optimizer's annotation is no kernel.
    events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA and "Optimizer." not in e.key]
    seconds = sum(event.self_device_time_total for event in events) / 1e6
    return KernelTimes(seconds / len(batches), sum(event.count for event in events) / len(batches))


def time_steps(config: Config, dtype: str, device: torch.device, steps: int) -> float:
    """Median seconds of `steps` training steps of `config` on its own data, each on a batch of its own.

    A first step warms up and is not counted; loading the data is not part of it.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, workers=0))
    first, *others = make_inputs(config, steps + 1, pin=False).batches
    step = build_step(config, dtype, device)
    step.run([first], 0)
    return statistics.median(step_seconds(step, others, steps))


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions of FP32 use TF32 or not for as long as the block runs."""
    backends = torch.backends
    before = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = tf32, tf32
    try:
        yield
    finally:
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before
