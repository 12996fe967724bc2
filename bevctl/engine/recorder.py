"""What a step leaves behind: read one step late, so that the host never waits for the step it has just launched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from bevctl.engine.dist import World
from bevctl.runs.records import StepRecord

_GIB = 2**30


@dataclass(frozen=True)
class StepFacts:
    """What the host knows about a step when it has launched it."""

    epoch: int
    """1-based."""
    iteration: int
    """Attempted steps of the run, this one included."""
    lr: float
    data_time_s: float
    tokens: tuple[str, ...] = ()
    """Samples of this rank in the step."""
    stop: bool = False
    """This rank was asked to stop."""
    bad_samples: int = 0
    """Unreadable files this rank met."""


@dataclass(frozen=True)
class StepTensors:
    """Scalars of a step that are still on the device."""

    losses: Mapping[str, Tensor]
    total: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    """The scale the step was made with."""
    skipped: Tensor


@dataclass(frozen=True)
class StepOutcome:
    """A finished step, the same on every rank but for `tokens`."""

    record: StepRecord
    skipped: bool
    tokens: tuple[str, ...]
    stop: bool
    bad_samples: int


@dataclass
class _Pending:
    facts: StepFacts
    names: list[str]
    values: Tensor
    copied: torch.cuda.Event | None
    iter_time_s: float
    time: float = field(default_factory=time.time)


class Recorder:
    """Turns launched steps into outcomes. With several ranks it also averages the losses and agrees on stopping.

    Args:
        last: iteration the run ends with, for the ETA.
        skipped_steps: those of the run so far.
    """

    def __init__(
        self, world: World, device: torch.device, samples_per_step: int, last: int, skipped_steps: int
    ) -> None:
        self.skipped_steps = skipped_steps
        self._world = world
        self._device = device
        self._samples_per_step = samples_per_step
        self._last = last
        self._pending: _Pending | None = None
        self._mark = time.perf_counter()
        self._measured_s = 0.0
        self._measured = 0

    def resume_clock(self) -> None:
        """Leaves what happened since the last step (evaluation, checkpoint) out of the next iteration's time."""
        self._mark = time.perf_counter()

    def push(self, facts: StepFacts, tensors: StepTensors) -> StepOutcome | None:
        """Takes the step just launched; returns the one before."""
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        names = sorted(tensors.losses)
        values = self._pack([tensors.losses[name] for name in names], facts, tensors)
        values, copied = self._to_host(values)
        previous, self._pending = self._pending, _Pending(facts, names, values, copied, elapsed)
        return self._finish(previous) if previous else None

    def flush(self) -> StepOutcome | None:
        """The step that is still pending."""
        previous, self._pending = self._pending, None
        return self._finish(previous) if previous else None

    def _pack(self, losses: list[Tensor], facts: StepFacts, tensors: StepTensors) -> Tensor:
        measured = [tensors.total, tensors.grad_norm, tensors.loss_scale, tensors.skipped]
        flags = [torch.full((), float(flag), device=self._device) for flag in (facts.stop, facts.bad_samples)]
        vector = torch.stack([value.detach().float() for value in (*losses, *measured, *flags)])
        if self._world.size > 1:
            distributed.all_reduce(vector)
        return vector

    def _to_host(self, vector: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if vector.device.type != "cuda":
            return vector, None
        host = torch.empty(vector.shape, pin_memory=True)
        host.copy_(vector, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied

    def _finish(self, pending: _Pending) -> StepOutcome:
        if pending.copied is not None:
            pending.copied.synchronize()
        *losses, total, grad_norm, scale, skipped = (pending.values[:-2] / self._world.size).tolist()
        stop, bad_samples = pending.values[-2:].tolist()
        self.skipped_steps += int(skipped > 0)
        facts = pending.facts
        record = StepRecord(
            epoch=facts.epoch,
            iter=facts.iteration,
            time=pending.time,
            lr=facts.lr,
            loss=total,
            losses=dict(zip(pending.names, losses, strict=True)),
            grad_norm=grad_norm,
            loss_scale=scale,
            skipped_steps=self.skipped_steps,
            iter_time_s=pending.iter_time_s,
            data_time_s=facts.data_time_s,
            memory_gib=self._memory(),
            samples_per_s=self._samples_per_step / max(pending.iter_time_s, 1e-9),
            eta_s=self._eta(pending),
        )
        return StepOutcome(record, skipped > 0, facts.tokens, stop > 0, round(bad_samples))

    def _memory(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._device) / _GIB if self._device.type == "cuda" else None

    def _eta(self, pending: _Pending) -> float:
        self._measured_s += pending.iter_time_s
        self._measured += 1
        return self._measured_s / self._measured * (self._last - pending.facts.iteration)
