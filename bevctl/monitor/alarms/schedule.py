"""The learning rate after a resume."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.view import Trouble, View

UP, FAR_UP, DOWN = 3.0, 10.0, 1 / 3
"""Factors over the learning rate before the resume; the schedule itself may well divide it, never multiply it so."""
BACK = 2.0
"""Factor by which it climbs again when a warm-up has restarted."""


def after_resume(view: View) -> Iterator[Trouble]:
    """The learning rate does not go on where it was."""
    iters, lr = view.history.finite("lr")
    for segment in view.log.segments:
        before, after = lr[iters < segment.first_iter][-3:], lr[iters >= segment.first_iter]
        if segment.reason != "resume" or not len(before) or not len(after) or np.median(before) <= 0:
            continue
        old, new, later = (
            float(np.median(before)),
            float(np.median(after[:3])),
            float(after[: max(len(after) // 2, 3)].max()),
        )
        warms_up = new < DOWN * old and later > BACK * new
        if new <= UP * old and not warms_up:
            continue
        yield Trouble(
            Severity.FAIL if new > FAR_UP * old else Severity.WARN,
            f"The learning rate went from {old:.3g} to {new:.3g} at a resume"
            + (" and warms up again" if warms_up else ""),
            (
                Evidence(
                    view.where(segment.first_iter), f"{new / old:.3g} of what it was before; highest since {later:.3g}"
                ),
            ),
            "The schedule was computed anew: another length (epochs, iterations) or batch, an optimizer state that was "
            "not loaded, or a warm-up that starts over.",
            "Resume with the same epochs, batch and learning rate, and with the optimizer's state.",
            segment.first_iter,
        )
