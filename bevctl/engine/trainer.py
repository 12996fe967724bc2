"""The training loop."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.engine.dist import World
from bevctl.engine.guard import NonfiniteGuard
from bevctl.engine.optim import apply_schedule
from bevctl.engine.precision import MatmulCounter, Precision
from bevctl.engine.recorder import Recorder, StepFacts, StepOutcome, StepTensors
from bevctl.engine.resume import TrainState
from bevctl.engine.scaler import StatisticsGuard
from bevctl.engine.schedule import Schedule
from bevctl.engine.signals import Interrupted, StopRequest
from bevctl.errors import BevctlError, ExitCode


@dataclass(frozen=True)
class Plan:
    """The numbers of the loop; an iteration is an attempted optimizer step."""

    iters_per_epoch: int
    stop_at: int
    """Iteration after which this invocation ends."""
    accumulate: int = 1
    clip: float | None = None
    checkpoint_interval: int | None = None
    max_bad_samples: int = 0


class Journal(Protocol):
    """What the loop tells, and asks to keep; see `bevctl.engine.journal`."""

    def step(self, outcome: StepOutcome) -> None: ...

    def measured(self, counter: MatmulCounter) -> None: ...

    def problems(self, sentences: list[str]) -> None: ...

    def save(self, iteration: int, skipped_steps: int) -> None: ...

    def epoch_done(self, epoch: int) -> None: ...


@dataclass
class Trainer:
    """Runs attempted optimizer steps from `iteration` to `plan.stop_at`."""

    state: TrainState
    """Model, optimizer, scaler and average."""
    network: nn.Module
    """The model, or DDP around it."""
    schedule: Schedule
    precision: Precision
    plan: Plan
    world: World
    device: torch.device
    loader_for: Callable[[int, int], Iterable[Batch]]
    """(epoch index, first batch) -> this rank's batches of the rest of the epoch."""
    recorder: Recorder
    journal: Journal
    """Records, checkpoints, evaluation."""
    stop: StopRequest
    iteration: int = 0

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.state.optimizer.param_groups for p in group["params"]]
        self.statistics = StatisticsGuard(self.state.model)
        self.guard = NonfiniteGuard(self.state.scaler.dynamic)
        self._bad_samples = 0
        self._problems: list[str] = []
        self._measured = False
        self._saved_at = self.iteration or None  # a resumed run has its checkpoint; a new one has none yet

    def fit(self) -> ExitCode:
        """Trains to the end of the plan.

        Returns OK, or PREEMPTED after a signal, with a checkpoint written either way.

        Raises:
            BevctlError: too many unreadable samples or a full disk (exit code 4), non-finite numbers for good (5).
        """
        try:
            while self.iteration < self.plan.stop_at:
                self._train_epoch()
        except Interrupted:
            self._finish_pending(obey=False)
            self._save()
            return ExitCode.PREEMPTED
        self._save()
        return ExitCode.OK

    def _train_epoch(self) -> None:
        """The rest of the epoch that `iteration` lies in, as far as the plan goes."""
        epoch, inner = divmod(self.iteration, self.plan.iters_per_epoch)
        end = min((epoch + 1) * self.plan.iters_per_epoch, self.plan.stop_at)
        self._bad_samples, self._problems = 0, []
        self.state.model.train()
        groups = self._groups(epoch, inner)
        self.recorder.resume_clock()
        while self.iteration < end:
            batches, data_time_s = self._next(groups)
            tensors, lr = self._step(batches)
            self.iteration += 1
            self._record(epoch, batches, tensors, lr, data_time_s)
            if self._inside_checkpoint_due():
                self._finish_pending()
                self._save()
                self.recorder.resume_clock()
        self._finish_pending()
        if self.iteration == (epoch + 1) * self.plan.iters_per_epoch:
            self._save()
            with self.stop.interruptible():
                self.journal.epoch_done(epoch + 1)

    def _inside_checkpoint_due(self) -> bool:
        inner = self.iteration % self.plan.iters_per_epoch
        interval = self.plan.checkpoint_interval
        return interval is not None and inner > 0 and inner % interval == 0

    def _groups(self, epoch: int, inner: int) -> Iterator[list[Batch]]:
        """Lists of `accumulate` batches, one list an optimizer step."""
        batches = iter(self.loader_for(epoch, inner * self.plan.accumulate))
        while True:
            group = list(itertools.islice(batches, self.plan.accumulate))
            if len(group) < self.plan.accumulate:
                return
            yield group

    def _next(self, groups: Iterator[list[Batch]]) -> tuple[list[Batch], float]:
        started = time.perf_counter()
        # Alone, a signal may end the wait for slow data; several ranks stop together, after a step.
        waiting = self.stop.interruptible() if self.world.size == 1 else contextlib.nullcontext()
        with waiting:
            group = next(groups, None)
        if group is None:
            raise BevctlError(
                f"The data ended after {self.iteration} iterations, inside an epoch.",
                "The data set changed while the run was going on, or its loader is broken.",
                ExitCode.RUN_FAILED,
            )
        if any(batch.size == 0 for batch in group):
            problems = [sentence for batch in group for sentence in batch.problems]
            raise BevctlError(
                f"Not one sample of a batch could be read: {' '.join(problems[:3])}",
                "Check data.root and the disk it lies on.",
                ExitCode.RUN_FAILED,
            )
        return group, time.perf_counter() - started

    def _step(self, batches: list[Batch]) -> tuple[StepTensors, float]:
        """One attempted optimizer step; nothing in it waits for the device."""
        scaler, optimizer = self.state.scaler, self.state.optimizer
        optimizer.zero_grad(set_to_none=True)
        self.statistics.remember()
        losses = self._backward(batches)
        scaler.unscale(self.parameters)
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.plan.clip or math.inf)
        scaler.reject_if_nonfinite(grad_norm)
        lr = apply_schedule(optimizer, self.schedule, self.iteration)
        scaler.step(optimizer)
        self.statistics.restore_where(scaler.found_inf)
        tensors = StepTensors(losses, _total(losses), grad_norm, scaler.value.clone(), scaler.found_inf.clone())
        scaler.update()
        if self.state.average is not None:
            self.state.average.update(self.iteration)
        return tensors, lr

    def _backward(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Accumulates the gradients of the mean loss of `batches`; returns the mean of each loss."""
        sums: dict[str, Tensor] = {}
        for position, batch in enumerate(batches, start=1):
            with self._gradients_stay_here(position < len(batches)):
                losses = self._forward(batch.to(self.device, non_blocking=True))
                self.state.scaler.scale(_total(losses) / len(batches)).backward()
            for name, value in losses.items():
                sums[name] = sums.get(name, 0) + value.detach().float() / len(batches)
        return sums

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        with self._maybe_counting(), self.precision.autocast():
            losses: dict[str, Tensor] = self.network(batch)
        return losses

    @contextlib.contextmanager
    def _maybe_counting(self) -> Iterator[None]:
        """In the first forward pass, notes in which number format the work is really done."""
        if self._measured:
            yield
            return
        self._measured = True
        with MatmulCounter() as counter:
            yield
        self.journal.measured(counter)

    def _gradients_stay_here(self, inner: bool) -> contextlib.AbstractContextManager[None]:
        """Keeps DDP from exchanging gradients before the last batch of a step."""
        if inner and isinstance(self.network, nn.parallel.DistributedDataParallel):
            return self.network.no_sync()
        return contextlib.nullcontext()

    def _record(self, epoch: int, batches: list[Batch], tensors: StepTensors, lr: float, data_time_s: float) -> None:
        problems = [sentence for batch in batches for sentence in batch.problems]
        self._problems += problems
        self.journal.problems(problems)
        facts = StepFacts(
            epoch=epoch + 1,
            iteration=self.iteration,
            lr=lr,
            data_time_s=data_time_s,
            tokens=tuple(token for batch in batches for token in batch.tokens),
            stop=self.stop.requested,
            bad_samples=len(problems),
        )
        self._obey(self.recorder.push(facts, tensors))
        if self.world.size == 1 and self.stop.requested:
            raise Interrupted(self.stop.name)

    def _finish_pending(self, obey: bool = True) -> None:
        outcome = self.recorder.flush()
        if obey:
            self._obey(outcome)
        elif outcome is not None:
            self.journal.step(outcome)

    def _obey(self, outcome: StepOutcome | None) -> None:
        """Acts on a finished step; every rank sees the same and decides the same."""
        if outcome is None:
            return
        self.journal.step(outcome)
        self.guard.check(outcome)
        self._bad_samples += outcome.bad_samples
        if self._bad_samples > self.plan.max_bad_samples:
            raise BevctlError(
                f"{self._bad_samples} unreadable samples in epoch {outcome.record.epoch}, more than "
                f"data.max_bad_samples = {self.plan.max_bad_samples}: {' '.join(self._problems[:3])}",
                "Repair or remove those files, or raise data.max_bad_samples.",
                ExitCode.RUN_FAILED,
            )
        if outcome.stop:
            raise Interrupted(self.stop.name)

    def _save(self) -> None:
        if self._saved_at != self.iteration:
            self.journal.save(self.iteration, self.recorder.skipped_steps)
            self._saved_at = self.iteration


def _total(losses: dict[str, Tensor]) -> Tensor:
    """The loss to minimise: entries that start with "loss/"; "stats/" entries are for the log."""
    return torch.stack([value.float() for name, value in losses.items() if name.startswith("loss/")]).sum()
