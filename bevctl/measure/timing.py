"""How long a training step takes here. The one place where steps are timed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import Config
from bevctl.engine.optim import build_optimizer
from bevctl.engine.precision import Precision, keep_fp32, resolve_precision
from bevctl.engine.scaler import LossScaler
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.part_clock import now, seconds_between
from bevctl.models.build import build_model


@dataclasses.dataclass
class TrainingStep:
    """What one step of training does to one batch: to the device, forward, backward, clip, optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    precision: Precision
    clip: float
    device: torch.device

    def __call__(self, batch: Batch) -> Tensor:
        """The total loss, still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        total = self.loss(batch.to(self.device, non_blocking=True))
        self.scaler.scale(total).backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.scaler.unscale(parameters)
        self.scaler.reject_if_nonfinite(nn.utils.clip_grad_norm_(parameters, self.clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total.detach()

    def loss(self, batch: Batch) -> Tensor:
        """() sum of the losses of a batch on the device."""
        with self.precision.autocast():
            losses = self.model(batch)
        return torch.stack([value.float() for name, value in losses.items() if name.startswith("loss/")]).sum()


def build_step(config: Config, dtype: str, device: torch.device) -> TrainingStep:
    """The step of `config` in `dtype` (fp16, bf16 or fp32); equal configs give equal initial weights.

    Raises:
        BevctlError: the device cannot do the precision.
    """
    precision = resolve_precision(dtype, device)
    torch.manual_seed(config.seed)
    model = build_model(config)
    keep_fp32(model, config.precision.fp32_modules, device.type)
    model.to(device).train()
    return TrainingStep(
        model=model,
        optimizer=build_optimizer(model, config.optim, config.optim.lr),
        scaler=LossScaler(config.precision, precision.is_half, device),
        precision=precision,
        clip=config.optim.clip or float("inf"),
        device=device,
    )


def step_seconds(step: TrainingStep, batches: Sequence[Batch], steps: int) -> list[float]:
    """Duration of each of `steps` steps, one after the other over `batches`, without a wait between them.

    The batches come in turn, as point clouds differ in size and some libraries prepare anew for each size; warm up
    with all of them first.
    """
    instants = [now(step.device)]
    for number in range(steps):
        step(batches[number % len(batches)])
        instants.append(now(step.device))
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
    return [seconds_between(start, end) for start, end in itertools.pairwise(instants)]


def time_steps(config: Config, dtype: str, device: torch.device, steps: int) -> float:
    """Median seconds of `steps` training steps of `config` on its own data, each on a batch of its own.

    A first step warms up and is not counted; loading the data is not part of it.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, workers=0))
    first, *others = make_inputs(config, steps + 1, pin=False).batches
    step = build_step(config, dtype, device)
    step(first)
    return statistics.median(step_seconds(step, others, steps))


@contextlib.contextmanager
def fastest_algorithms(tf32: bool) -> Iterator[None]:
    """cuDNN tries its algorithms, as in training, and FP32 products use TF32 or not, for as long as the block runs."""
    backends = torch.backends
    before = backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = True, tf32, tf32
    try:
        yield
    finally:
        backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before
