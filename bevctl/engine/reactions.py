"""What a run does about a step that was not finite, beside skipping it; see `bevctl.engine.guard`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bevctl.data.loader import Reshuffle
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.engine.dist import World, gather
from bevctl.engine.nonfinite import SMALLEST_SCALE
from bevctl.engine.precision import keep_fp32
from bevctl.engine.recorder import StepFacts, StepOutcome
from bevctl.engine.resume import random_state_kept, restore, set_random_state
from bevctl.engine.step import TrainStep
from bevctl.errors import BevctlError, ExitCode


class Chronicle(Protocol):
    """Where the reactions are told, and which checkpoints there are."""

    def event(self, kind: str, message: str, **data: Any) -> None: ...

    def checkpoint_before(self, iteration: int) -> Path | None: ...


@dataclass(frozen=True)
class Reactions:
    """Changes the objects of a running training; every rank calls the same.

    Weights, statistics and optimizer must be as before the step that was not finite. Gradients are spoilt.
    """

    step: TrainStep
    world: World
    journal: Chronicle

    def lower_scale(self, outcome: StepOutcome) -> None:
        """The loss scale, if there is one, stays below the one that overflowed."""
        state = self.step.state
        ceiling = max((outcome.record.loss_scale or 1.0) * state.scaler.backoff_factor, SMALLEST_SCALE)
        if state.half and state.scaler.lower(ceiling):
            self.journal.event("lower_scale", f"The loss scale stays at {ceiling:.10g} or below from here on")

    def keep_fp32(self, outcome: StepOutcome) -> None:
        """The module that overflowed computes in FP32 from here on."""
        state = self.step.state
        name = _overflowing_module(self.step, outcome.facts, self.world)
        if name is None:
            self.journal.event("fp32_module", "No module was found that FP32 would help", module=None)
            return
        keep_fp32(state.model, [name], self.step.device.type)
        state.fp32_modules.append(name)
        self.journal.event("fp32_module", f"{name} computes in FP32 from here on", module=name)

    def rewind(self, onset: int, number: int, accumulate: int) -> int:
        """Back to the last checkpoint from before the step `onset`, with the rest of its epoch in another order.

        Args:
            number: of the rewind, from 1; each gives another order.

        Returns:
            Attempted steps up to where the run is now.

        Raises:
            BevctlError: there is no such checkpoint (exit code 5).
        """
        path = self.journal.checkpoint_before(onset)
        if path is None:
            raise BevctlError(
                f"Steps are not finite since iteration {onset}, the budget is used up, and there is no checkpoint from "
                "before to go back to.",
                "Set train.checkpoint_interval, or find the cause with `bevctl diagnose nan --replay`.",
                ExitCode.NONFINITE,
            )
        state = self.step.state
        iteration = restore(state, read_checkpoint(path), self.world).iteration
        epoch, inner = divmod(iteration, state.setting.iters_per_epoch)
        state.reshuffles.append(Reshuffle(epoch, inner * accumulate, number))
        message = f"Back to {path} (iteration {iteration}) with another data order, rewind {number}"
        self.journal.event("rewind", message, checkpoint=str(path), iteration=iteration)
        return iteration


def _overflowing_module(step: TrainStep, facts: StepFacts, world: World) -> str | None:
    """The module whose range of numbers was too small in a step: the innermost one that is not in FP32 yet.

    None where something else is the cause. Each rank takes the gradients of its own batches again, watched, and all
    return what the first of them found.
    """
    from bevctl.numerics.trace import Trace  # only a run that meets such a step needs it

    alone = TrainStep(step.state, step.state.model, step.schedule, step.precision)
    with random_state_kept(), Trace(step.state.model) as trace:
        set_random_state(facts.random.plain())
        alone.gradients(list(facts.batches))
    alone.discard()
    found = trace.first_bad()
    scopes = found.scopes if found is not None and found.verdict.is_range else ()
    candidates = gather(world, [name for name in scopes if name not in step.state.fp32_modules])
    return next((names[0] for names in candidates if names), None)
