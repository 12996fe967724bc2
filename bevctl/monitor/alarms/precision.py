"""Half precision that is asked for and not in effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.facts import fp16_of, half_of
from bevctl.monitor.history import History
from bevctl.monitor.view import Trouble, View

SAME = 0.93
"""Ratio to an FP32 run above which memory and time are FP32's."""
LEAST_RECORDS = 3
LEAST_MATMULS = 0.5
"""Share of matrix products that run in half precision when it is in effect."""


def without_effect(view: View) -> Iterator[Trouble]:
    """FP16 is on, yet memory and speed are those of FP32, or the matrix products are not in FP16."""
    if not fp16_of(view.log):
        return
    yield from _by_matmuls(view)
    yield from _by_other_run(view)
    yield from _by_expectation(view)


def _by_matmuls(view: View) -> Iterator[Trouble]:
    """The run's own count of what its matrix products ran in."""
    for event in view.events("precision")[-1:]:
        share = event.data.get("share")
        if isinstance(share, int | float) and share < LEAST_MATMULS:
            evidence = [Evidence(event.where or "events", f"{share:.0%} of the matrix products ran in half precision")]
            yield _trouble("Half precision is on, but most matrix products run in FP32", evidence, event.iter)


Ratio = tuple[float, float, float]
"""Ours over theirs, ours, theirs."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its FP32 twin."""

    memory: Ratio | None
    """GiB; None where a log does not tell it."""
    time: Ratio
    """Seconds an iteration, without waiting for data."""

    @property
    def is_smaller(self) -> bool:
        """Whether it is known to take less memory."""
        return self.memory is not None and self.memory[0] < SAME

    def evidence(self) -> list[Evidence]:
        memory, time = self.memory, self.time
        told = f"{time[1]:.3g} without waiting for data here, {time[2]:.3g} in the FP32 run ({time[0]:.0%})"
        found = [Evidence("iter_time_s", told)]
        if memory is not None:
            found.insert(0, Evidence("memory_gib", f"{memory[1]:.3g} here, {memory[2]:.3g} there ({memory[0]:.0%})"))
        return found


def compare(view: View) -> Comparison | None:
    """The run beside the one that it is compared with; None where that is not in FP32, or too little is known."""
    if view.against is None or half_of(view.against):
        return None
    ours, theirs = view.warm, view.other
    time = _ratio(_computing(ours), _computing(theirs), "iter_time_s")
    return Comparison(_ratio(ours, theirs, "memory_gib"), time) if time is not None else None


def _by_other_run(view: View) -> Iterator[Trouble]:
    if set(view.other.losses) - set(view.history.losses):
        return  # a run that lacks a head does not compare
    compared = compare(view)
    if compared is not None and compared.memory is not None and min(compared.memory[0], compared.time[0]) >= SAME:
        title = "FP16 is on, but memory and speed are those of FP32"
        yield _trouble(title, compared.evidence(), view.history.iters[0])


def _computing(history: History) -> History:
    """The history with the wait for data taken out of the iteration time."""
    data = np.nan_to_num(history.column("data_time_s"))
    values = {**history.values, "iter_time_s": history.column("iter_time_s") - data}
    return replace(history, values=values)


def _ratio(ours: History, theirs: History, name: str) -> Ratio | None:
    here, there = ours.finite(name)[1], theirs.finite(name)[1]
    if min(len(here), len(there)) < LEAST_RECORDS or np.median(there) <= 0:
        return None
    return float(np.median(here) / np.median(there)), float(np.median(here)), float(np.median(there))


def _by_expectation(view: View) -> Iterator[Trouble]:
    """Both memory and time are above what was expected of FP16."""
    evidence = []
    for name in ("memory_gib", "iter_time_s"):
        span = view.expect.get(name)
        values = view.warm.finite(name)[1][-20:]
        if span is None or len(values) < LEAST_RECORDS or np.median(values) <= span.high:
            return
        evidence.append(Evidence(name, f"{np.median(values):.3g}, expected {span}"))
    yield _trouble("FP16 is on, but memory and time are above what is expected of it", evidence, view.history.iters[0])


def _trouble(title: str, evidence: list[Evidence], first: float | None) -> Trouble:
    return Trouble(
        Severity.FAIL,
        title,
        tuple(evidence),
        "Autocast does not reach the model: it is off in the code that runs, the modules are kept in FP32, or inputs "
        "are cast back; custom operators without half precision also fall back. An FP32 run that uses TF32 is nearly "
        "as fast as FP16, but not as small.",
        "Check that the forward pass runs inside autocast and which modules are kept in FP32 (precision.fp32_modules).",
        first,
    )
