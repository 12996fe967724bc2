"""What a step leaves behind: read one step late, so that the host never waits for the step it has just launched."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from bevctl.batch import AnyBatch
from bevctl.engine.dist import World
from bevctl.engine.graph_memory import graph_bytes
from bevctl.engine.resume import RandomCapture
from bevctl.engine.step import StepTensors
from bevctl.runs.records import StepRecord

RING = 32
"""Steps that are remembered."""
_GIB = 2**30


@dataclass(frozen=True)
class StepFacts:
    """What the host knows about a step when it has launched it."""

    epoch: int
    """1-based."""
    iteration: int
    """Attempted steps of the run, this one included."""
    inner: int
    """0-based index of the step in its epoch."""
    lr: float
    data_time_s: float
    random: RandomCapture
    """State of every generator of this process before the step."""
    batches: Sequence[AnyBatch] = ()
    """Of this rank, as they came from the loader; kept until the step's outcome is known."""
    stop: bool = False
    """This rank was asked to stop."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Samples of this rank in the step. With the seed and the epoch they determine the augmentation."""
        return tuple(token for batch in self.batches for token in batch.tokens)

    @property
    def bad_samples(self) -> int:
        """Unreadable files this rank met."""
        return sum(len(batch.problems) for batch in self.batches)


@dataclass(frozen=True)
class StepOutcome:
    """A finished step, the same on every rank but for `facts` and `own_losses`."""

    record: StepRecord
    facts: StepFacts
    skipped: bool
    grad_norms: dict[str, float]
    """By part of the model."""
    growth_tracker: int
    own_losses: dict[str, float]
    """Of this rank; the record has the mean over ranks."""
    stop: bool
    bad_samples: int


@dataclass(frozen=True)
class RingEntry:
    """A step as the ring keeps it, without its batches."""

    outcome: StepOutcome
    tokens: tuple[str, ...]


@dataclass
class _Pending:
    facts: StepFacts
    names: list[str]
    parts: list[str]
    values: Tensor
    """(1 or 2, n): summed over ranks and, with several of them, this rank's own."""
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
        self.ring: deque[RingEntry] = deque(maxlen=RING)
        """The last steps, oldest first."""
        self._world = world
        self._device = device
        self._samples_per_step = samples_per_step
        self._last = last
        self._pending: _Pending | None = None
        self._mark = time.perf_counter()
        self._measured_s = 0.0
        self._measured = 0
        self._recorded = 0
        """Bytes of recorded parts that the allocator does not count."""

    def resume_clock(self) -> None:
        """Leaves what happened since the last step (evaluation, checkpoint) out of the next iteration's time."""
        self._mark = time.perf_counter()

    def push(self, facts: StepFacts, tensors: StepTensors) -> None:
        """Takes the step just launched; `settle` must have given the one before."""
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        names, parts = sorted(tensors.losses), list(tensors.grad_norms)
        values, copied = self._to_host(self._pack(names, parts, facts, tensors))
        self._pending = _Pending(facts, names, parts, values, copied, elapsed)

    def settle(self) -> StepOutcome | None:
        """The step that is still pending, once the device is done with it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        outcome = self._finish(pending)
        without_batches = dataclasses.replace(outcome, facts=dataclasses.replace(pending.facts, batches=()))
        self.ring.append(RingEntry(without_batches, pending.facts.tokens))
        return outcome

    def _pack(self, names: list[str], parts: list[str], facts: StepFacts, tensors: StepTensors) -> Tensor:
        """(1, n) scalars; (2, n + 2) with several ranks: with flags, their sum, and this rank's own."""
        scalars = [tensors.total, tensors.grad_norm, tensors.loss_scale, tensors.skipped, tensors.growth_tracker]
        measured = [*(tensors.losses[name] for name in names), *(tensors.grad_norms[part] for part in parts), *scalars]
        if self._world.size == 1:
            return torch.stack(measured)[None]
        flags = [torch.full((), float(flag), device=self._device) for flag in (facts.stop, facts.bad_samples)]
        own = torch.stack(measured + flags)
        summed = own.clone()
        distributed.all_reduce(summed)
        return torch.stack((summed, own))

    def _to_host(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if values.device.type != "cuda":
            return values, None
        host = torch.empty(values.shape, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied

    def _finish(self, pending: _Pending) -> StepOutcome:
        if pending.copied is not None:
            pending.copied.synchronize()
        facts, losses = pending.facts, len(pending.names)
        summed, own = pending.values[0], pending.values[-1]
        stop, bad_samples = float(facts.stop), float(facts.bad_samples)
        if self._world.size > 1:
            stop, bad_samples = summed[-2:].tolist()
            summed = summed[:-2] / self._world.size
        *measured, total, grad_norm, scale, skipped, growth_tracker = summed.tolist()
        self.skipped_steps += int(skipped > 0)
        record = StepRecord(
            epoch=facts.epoch,
            iter=facts.iteration,
            time=pending.time,
            lr=facts.lr,
            loss=total,
            losses=dict(zip(pending.names, measured, strict=False)),
            grad_norm=grad_norm,
            loss_scale=scale,
            skipped_steps=self.skipped_steps,
            iter_time_s=pending.iter_time_s,
            data_time_s=facts.data_time_s,
            memory_gib=self._memory(),
            samples_per_s=self._samples_per_step / max(pending.iter_time_s, 1e-9),
            eta_s=self._eta(pending),
        )
        return StepOutcome(
            record,
            facts,
            skipped=skipped > 0,
            grad_norms=dict(zip(pending.parts, measured[losses:], strict=True)),
            growth_tracker=round(growth_tracker),
            own_losses=dict(zip(pending.names, own[:losses].tolist(), strict=True)),
            stop=stop > 0,
            bad_samples=round(bad_samples),
        )

    def _memory(self) -> float | None:
        """The most that was allocated so far, recorded parts included."""
        if self._device.type != "cuda":
            return None
        # Parts are recorded in the first steps: it is enough to look after the 1st, 2nd, 4th, 8th, ...
        if self._measured & (self._measured - 1) == 0:
            self._recorded = graph_bytes(self._device)
        return (torch.cuda.max_memory_allocated(self._device) + self._recorded) / _GIB

    def _eta(self, pending: _Pending) -> float:
        self._measured_s += pending.iter_time_s
        self._measured += 1
        return self._measured_s / self._measured * (self._last - pending.facts.iteration)
