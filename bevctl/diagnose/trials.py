"""Trying a remedy: the recorded steps are taken again with it, and their time and memory are measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bevctl.batch import AnyBatch
from bevctl.diagnose.bundle import Bundle, Moment, moment_earlier
from bevctl.diagnose.rehearsal import Result, changed, rehearse
from bevctl.diagnose.report import OUTCOMES, Remedy
from bevctl.errors import BevctlError

FOLLOWING = 4
"""Recorded steps after the incident's that a remedy must get through as well."""
MOST_STEPS_BACK = 200
"""A checkpoint farther back than this is too far to take the steps since then again."""
_GROWN = 3.0
"""A finite loss this many times what it was is still on its way to infinity."""


@dataclass(frozen=True)
class Idea:
    """A change worth a try."""

    set: Mapping[str, Any]
    why: str
    from_earlier: bool = False
    """It only helps if the steps before the incident's are taken with it too."""


@dataclass(frozen=True)
class Trial:
    """What became of a row of steps."""

    results: list[Result]
    peak_bytes: int | None

    @property
    def is_finite(self) -> bool:
        return bool(self.results) and all(result.is_finite for result in self.results)

    @property
    def settles(self) -> bool:
        """Whether every loss is finite, and in the end the gradients are, because the loss scale has come down."""
        if not self.results or not all(math.isfinite(result.loss) for result in self.results):
            return False
        first, last = self.results[0], self.results[-1]
        return last.is_finite and last.loss_scale < first.loss_scale

    @property
    def step_s(self) -> float:
        """Median time of a step; the first, which warms up, is left out where there are others."""
        return statistics.median(result.seconds for result in self.results[1:] or self.results)


class Trials:
    """Tries ideas on one incident.

    Args:
        limit_s: no further idea is tried after so many seconds.
        say: told what became of each.
    """

    def __init__(self, bundle: Bundle, limit_s: float, say: Callable[[str], None]) -> None:
        self._bundle = bundle
        self._say = say
        self._ends = time.monotonic() + limit_s
        before = bundle.before
        after = dataclasses.replace(before, iteration=before.iteration + 1)
        self.steps: list[Sequence[AnyBatch]] = [bundle.batches, *bundle.steps(after, FOLLOWING)]
        """The incident's step and those after it."""
        self.baseline = _run(before, {}, self.steps)
        """They without any change."""
        self._earlier: Moment | str | None = None

    def sentence(self) -> str:
        """On what the remedies were tried."""
        after = len(self.steps) - 1
        tried = f"the step and {f'the {after} recorded steps' if after else 'no step'} after it"
        if isinstance(self._earlier, Moment):
            tried += f"; those that change earlier steps, from iteration {self._earlier.iteration} on"
        return f"Remedies were tried on {tried}."

    def attempt(self, idea: Idea) -> Remedy:
        """The remedy with its outcome; without one where it cannot be tried, which `why` says then."""
        if time.monotonic() > self._ends:
            return Remedy(idea.set, f"{idea.why}; no time was left for it")
        try:
            return self._from_earlier(idea) if idea.from_earlier else self._at_once(idea)
        except BevctlError as error:
            return Remedy(idea.set, f"{idea.why}; it cannot be tried here: {error.message}")
        except torch.cuda.OutOfMemoryError:
            return Remedy(idea.set, f"{idea.why}; the memory of this GPU does not suffice")

    def attempt_until_cured(self, ideas: Iterable[Idea]) -> list[Remedy]:
        """What was tried, one after the other, up to the first cure or the first that cannot be tried."""
        remedies: list[Remedy] = []
        for idea in ideas:
            remedies.append(self.attempt(idea))
            self._say(f"  {remedies[-1].why}: {OUTCOMES[remedies[-1].verified]}")
            if remedies[-1].verified is not False:
                break
        return remedies

    def _at_once(self, idea: Idea) -> Remedy:
        trial = _run(self._bundle.before, idea.set, self._steps_with(idea))
        cured, why = judged(trial, self.baseline)
        idea = dataclasses.replace(idea, why=idea.why + why)
        if not any(key.startswith("precision.") for key in idea.set):
            return Remedy(idea.set, idea.why, cured)
        step_time = trial.step_s / self.baseline.step_s
        memory = None
        if trial.peak_bytes is not None and self.baseline.peak_bytes:
            memory = trial.peak_bytes / self.baseline.peak_bytes
        return Remedy(idea.set, idea.why, cured, step_time, memory)

    def _steps_with(self, idea: Idea) -> list[Sequence[AnyBatch]]:
        """The recorded steps; made anew where the idea changes the data."""
        if not any(key.startswith("data.") for key in idea.set):
            return self.steps
        before = dataclasses.replace(self._bundle.before, config=changed(self._bundle.before.config, idea.set))
        return list(self._bundle.with_config(before.config).steps(before, len(self.steps)))

    def _from_earlier(self, idea: Idea) -> Remedy:
        if self._earlier is None:
            self._earlier = self._find_earlier()
        if isinstance(self._earlier, str):
            return Remedy(idea.set, f"{idea.why}; {self._earlier}")
        remedy = Remedy(idea.set, idea.why, resume=_resume_name(self._earlier))
        # Batches are made anew each time: those of hundreds of steps would fill the memory.
        distance = self._bundle.before.iteration - self._earlier.iteration
        steps = self._bundle.steps(self._earlier, distance + len(self.steps))
        results = _run(self._earlier, idea.set, steps).results
        window = results[distance:]
        growth = _level(window) / _level(results[: len(window)])
        finite = all(result.is_finite for result in window)
        if finite and growth > _GROWN:
            why = f"{idea.why}; the loss still grows, {growth:.3g} times"
            return dataclasses.replace(remedy, why=why, verified=False)
        return dataclasses.replace(remedy, verified=finite)

    def _find_earlier(self) -> Moment | str:
        """A moment from which on the incident comes again; or why there is none."""
        if self._bundle.dataset is None:
            return "the data of the steps before it are not here"
        moment = moment_earlier(self._bundle, MOST_STEPS_BACK)
        if moment is None:
            return f"no checkpoint lies within {MOST_STEPS_BACK} steps before the incident"
        steps = self._bundle.steps(moment, self._bundle.before.iteration - moment.iteration + 1)
        if _run(moment, {}, steps).results[-1].is_finite:
            return f"from iteration {moment.iteration} on the incident does not come again"
        return moment


def judged(trial: Trial, baseline: Trial) -> tuple[bool, str]:
    """Whether what was changed cures, and what there is to add.

    Where the loss itself was not finite, the loss scale has no part in it: one that was still on its way down, as at
    every start, hides no cure.
    """
    broke_in_forward = bool(baseline.results) and not math.isfinite(baseline.results[0].loss)
    if not trial.is_finite and broke_in_forward and trial.settles:
        return True, f"; the loss scale then comes down to {trial.results[-1].loss_scale:.10g}, as at every start"
    return trial.is_finite, ""


def _resume_name(moment: Moment) -> str:
    """What `train --resume` takes to go on from a moment of its work_dir; empty for the start."""
    return moment.checkpoint.path.name if moment.checkpoint is not None else ""


def gets_through(bundle: Bundle, moment: Moment) -> bool | None:
    """Whether the first steps after a moment of the run are finite; None where their data are not here."""
    steps = list(bundle.steps(moment, 1 + FOLLOWING))
    return _run(moment, {}, steps).is_finite if steps else None


def _run(moment: Moment, changes: Mapping[str, Any], steps: Iterable[Sequence[AnyBatch]]) -> Trial:
    """Takes steps from a moment on, with config values changed."""
    rehearsal = rehearse(moment, changes)
    on_gpu = moment.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(moment.device)
    results = [rehearsal.run(batches) for batches in steps]
    return Trial(results, torch.cuda.max_memory_allocated(moment.device) if on_gpu else None)


def _level(results: Iterable[Result]) -> float:
    """Median loss of the finite steps; infinite without one, so that nothing counts as grown from it."""
    losses = [result.loss for result in results if math.isfinite(result.loss)]
    return statistics.median(losses) if losses else math.inf
