"""The training loop."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bevctl.batch import AnyBatch
from bevctl.engine.dist import World
from bevctl.engine.guard import FP32_MODULE, LOWER_SCALE, SKIP, FutilityWatch, NonfiniteGuard
from bevctl.engine.nonfinite import Classifier, Nonfinite
from bevctl.engine.precision import MatmulCounter
from bevctl.engine.reactions import Reactions
from bevctl.engine.recorder import Recorder, RingEntry, StepFacts, StepOutcome
from bevctl.engine.resume import RandomCapture, set_random_state
from bevctl.engine.signals import Interrupted, StopRequest
from bevctl.engine.step import TrainStep
from bevctl.errors import BevctlError, ExitCode
from bevctl.runs.heartbeat import Heartbeat
from bevctl.runs.records import Doing


@dataclass(frozen=True)
class Plan:
    """The numbers of the loop; an iteration is an attempted optimizer step."""

    iters_per_epoch: int
    stop_at: int
    """Iteration after which this invocation ends."""
    accumulate: int = 1
    checkpoint_interval: int | None = None
    max_bad_samples: int = 0


class Journal(Protocol):
    """What the loop tells, and asks to keep; see `bevctl.engine.journal`."""

    def step(self, outcome: StepOutcome) -> None: ...

    def wants_incident(self, found: Nonfinite) -> bool: ...

    def nonfinite(self, outcome: StepOutcome, found: Nonfinite, ring: Sequence[RingEntry] | None) -> None: ...

    def event(self, kind: str, message: str, **data: Any) -> None: ...

    def warning(self, kind: str, message: str) -> None: ...

    def measured(self, counter: MatmulCounter) -> None: ...

    def problems(self, sentences: list[str]) -> None: ...

    def save(self, iteration: int, skipped_steps: int) -> None: ...

    def checkpoint_before(self, iteration: int) -> Path | None: ...

    def epoch_done(self, epoch: int) -> None: ...


class _Rewound(Exception):
    """The run went back to a checkpoint."""


@dataclass
class Trainer:
    """Runs attempted optimizer steps from `iteration` to `plan.stop_at`.

    The outcome of a step is read when the gradients of the next one are launched and its update is not: the device
    stays busy, and after a step that was not finite the weights are still those from before it.
    """

    step: TrainStep
    plan: Plan
    world: World
    loader_for: Callable[[int, int], Iterable[AnyBatch]]
    """(epoch index, first batch) -> this rank's batches of the rest of the epoch."""
    recorder: Recorder
    classifier: Classifier
    guard: NonfiniteGuard
    journal: Journal
    """Records, checkpoints, evaluation."""
    heartbeat: Heartbeat
    """Tells what this rank is at, for when it gets no further."""
    stop: StopRequest
    iteration: int = 0

    def __post_init__(self) -> None:
        self.state = self.step.state
        self.step.watch = self._maybe_counting
        self.reactions = Reactions(self.step, self.world, self.journal)
        self.futility = FutilityWatch()
        self._bad_samples = 0
        self._problems: list[str] = []
        self._measured = False
        self._disturbed = False
        """Gradients that were launched are gone, or are not those of the present settings."""
        self._saved_at = self.iteration or None  # a resumed run has its checkpoint; a new one has none yet

    def fit(self) -> ExitCode:
        """Trains to the end of the plan.

        Returns OK, or PREEMPTED after a signal, with a checkpoint written either way.

        Raises:
            BevctlError: too many unreadable samples or a full disk (exit code 4), non-finite numbers for good (5).
        """
        try:
            while self.iteration < self.plan.stop_at:
                with contextlib.suppress(_Rewound):
                    self._train_epoch()
        except Interrupted:
            self._settle(react=False)
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
            self._train_step(*self._next(groups))
            if self._inside_checkpoint_due():
                self._obey(self._settle())
                self._save()
                self.recorder.resume_clock()
        self._obey(self._settle())
        if self.iteration == (epoch + 1) * self.plan.iters_per_epoch:
            self._save()
            self.heartbeat.turn_to(Doing.EVALUATES, self.iteration)
            self.journal.epoch_done(epoch + 1)

    def _inside_checkpoint_due(self) -> bool:
        inner = self.iteration % self.plan.iters_per_epoch
        interval = self.plan.checkpoint_interval
        return interval is not None and inner > 0 and inner % interval == 0

    def _groups(self, epoch: int, inner: int) -> Iterator[Sequence[AnyBatch]]:
        """Lists of `accumulate` batches, one list an optimizer step."""
        batches = iter(self.loader_for(epoch, inner * self.plan.accumulate))
        while True:
            group = list(itertools.islice(batches, self.plan.accumulate))
            if len(group) < self.plan.accumulate:
                return
            yield group

    def _next(self, groups: Iterator[Sequence[AnyBatch]]) -> tuple[Sequence[AnyBatch], float]:
        self.heartbeat.turn_to(Doing.DATA, self.iteration + 1)
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

    def _train_step(self, batches: Sequence[AnyBatch], data_time_s: float) -> None:
        """One attempted optimizer step; in it the outcome of the step before becomes known."""
        before = RandomCapture.now()
        self.heartbeat.turn_to(Doing.GRADIENTS, self.iteration + 1)
        losses = self.step.gradients(batches)
        self._disturbed = False
        previous = self._settle()
        if self._disturbed:
            set_random_state(before.plain())
            self.heartbeat.turn_to(Doing.GRADIENTS, self.iteration + 1)
            losses = self.step.gradients(batches)
        self.heartbeat.turn_to(Doing.UPDATE, self.iteration + 1)
        tensors = self.step.update(losses, self.iteration)
        epoch, inner = divmod(self.iteration, self.plan.iters_per_epoch)
        self.iteration += 1
        facts = StepFacts(
            epoch=epoch + 1,
            iteration=self.iteration,
            inner=inner,
            lr=self.step.lr,
            data_time_s=data_time_s,
            random=before,
            batches=batches,
            stop=self.stop.requested,
        )
        self.recorder.push(facts, tensors)
        self._tell_problems(batches)
        self._obey(previous)
        if self.world.size == 1 and self.stop.requested:
            raise Interrupted(self.stop.name)

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

    def _tell_problems(self, batches: Sequence[AnyBatch]) -> None:
        problems = [sentence for batch in batches for sentence in batch.problems]
        self._problems += problems
        self.journal.problems(problems)

    def _settle(self, react: bool = True) -> StepOutcome | None:
        """The outcome of the step that was launched last, and what follows from it; every rank does the same.

        Raises:
            BevctlError: non-finite numbers for good (exit code 5).
            _Rewound: the run goes on from a checkpoint.
        """
        self.heartbeat.turn_to(Doing.DEVICE, self.iteration)
        outcome = self.recorder.settle()
        if outcome is None:
            return None
        self.journal.step(outcome)
        found = self.classifier.observe(outcome)
        warning = self.futility.observe(outcome, found)
        if warning:
            self.journal.warning("zero_loss", warning)
        if found is not None:
            self._keep(outcome, found)
        action = self.guard.decide(outcome, found) if react else SKIP
        if action != SKIP:
            self._react(action, outcome)
        return outcome

    def _keep(self, outcome: StepOutcome, found: Nonfinite) -> None:
        """Tells of a step that was not finite, and keeps what it takes to run it again."""
        wanted = self.journal.wants_incident(found)
        if wanted:
            self._back_to_before()
        self.journal.nonfinite(outcome, found, list(self.recorder.ring) if wanted else None)

    def _back_to_before(self) -> None:
        """Everything but the loss scale and random states as it was before the step that changed nothing."""
        self.step.discard()
        self._disturbed = True

    def _react(self, action: str, outcome: StepOutcome) -> None:
        self._back_to_before()
        if action == LOWER_SCALE:
            self.reactions.lower_scale(outcome)
        elif action == FP32_MODULE:
            self.reactions.keep_fp32(outcome)
        else:
            rewound = self.reactions.rewind(self.guard.onset, self.guard.rewinds, self.plan.accumulate)
            self.iteration = self._saved_at = rewound
            raise _Rewound

    def _obey(self, outcome: StepOutcome | None) -> None:
        """Acts on bad samples and signals; every rank sees the same and decides the same."""
        if outcome is None:
            return
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
            self.heartbeat.turn_to(Doing.SAVES, self.iteration)
            self.journal.save(self.iteration, self.recorder.skipped_steps)
            self._saved_at = self.iteration
