"""Which module of the model first made a step of the running training non-finite."""

from __future__ import annotations

from bevctl.engine.dist import World, gather
from bevctl.engine.recorder import StepFacts
from bevctl.engine.resume import set_random_state
from bevctl.engine.step import TrainStep


def overflowing_module(step: TrainStep, facts: StepFacts, world: World) -> str | None:
    """Takes the gradients of a step again, watched, and names the module whose range of numbers was too small.

    That is the innermost one that is not in FP32 yet. None where something else is the cause. Each rank looks at its
    own batches, and all return what the first of them found. Weights, statistics and optimizer must be as before the
    step; gradients and random states are spoilt.
    """
    from bevctl.numerics.trace import Trace  # only a run that meets such a step needs it

    alone = TrainStep(step.state, step.state.model, step.schedule, step.precision)
    set_random_state(facts.random)
    with Trace(step.state.model) as trace:
        alone.gradients(list(facts.batches))
    alone.discard()
    found = trace.first_bad()
    scopes = found.scopes if found is not None and found.verdict.is_range else ()
    candidates = gather(world, [name for name in scopes if name not in step.state.fp32_modules])
    return next((names[0] for names in candidates if names), None)
