"""Metrics outside the range that `expect:` or `--expect` gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bevctl.config.span import Span
from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import Column
from bevctl.monitor.view import Trouble, View

RECENT = 20
"""Records whose median is compared with the range."""


def outside(view: View) -> Iterator[Trouble]:
    """The recent median of a metric is outside its range."""
    for name, span in view.expect.items():
        iters, values, where = _measured(view, name, span)
        if not len(values):
            continue
        now = float(np.median(values[-RECENT:]))
        if span.low <= now <= span.high:
            continue
        wrong = (values < span.low) | (values > span.high)
        evidence = (
            Evidence(where, f"median {now:.4g} of the last {min(len(values), RECENT)}, expected {span}"),
            Evidence(where, f"outside in {wrong.sum()} of {len(values)} records"),
        )
        yield Trouble(
            Severity.FAIL,
            f"{name} is {now:.4g}, expected {span}",
            evidence,
            "The run is not as planned: other data, batch, precision, hardware or neighbours, or the plan is wrong.",
            "Find out which; correct the run, or the range in expect:.",
            float(iters[int(np.argmax(wrong))]) if len(iters) else None,
        )


def unmeasured(view: View) -> Iterator[Trouble]:
    """A metric with a range that the log does not have."""
    absent = [name for name, span in view.expect.items() if not len(_measured(view, name, span)[1])]
    if absent and len(view.history) and view.history.iters[-1] > min(view.expect[name].first for name in absent):
        yield Trouble(
            Severity.INFO,
            f"Not measured, so not judged: {', '.join(absent)}",
            tuple(
                Evidence(f"expect.{name}", "no value in the log for the iterations it applies to") for name in absent
            ),
            "The log does not write it, or its name is another one; gpu_util and device_memory_gib are read from the "
            "GPUs of this machine while the run is on.",
            None,
        )


def _measured(view: View, name: str, span: Span) -> tuple[Column, Column, str]:
    """Iterations, values and source of a metric in the iterations that its range applies to."""
    history = view.history
    iters, values = history.rows((history.iters >= span.first) & (history.iters <= span.last)).finite(name)
    if len(values):
        return iters, values, name
    scores = [(v.iter, v.metrics[name]) for v in view.log.validations if np.isfinite(v.metrics.get(name, np.nan))]
    if scores:
        return (
            np.array([float(i or 0) for i, _ in scores]),
            np.array([score for _, score in scores]),
            f"validation {name}",
        )
    live = [value for gpu in view.gpus if (value := _live(gpu, name)) is not None]
    return np.empty(0), np.array(live, dtype=np.float64), "GPUs now"


def _live(gpu: object, name: str) -> float | None:
    field = {"gpu_util": "utilization", "device_memory_gib": "memory_used_gib"}.get(name)
    value = getattr(gpu, field) if field else None
    return None if value is None else float(value)
