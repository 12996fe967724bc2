"""Scores of evaluations: nothing found at all, or the same numbers each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from bevctl.finding import Evidence, Severity
from bevctl.monitor.view import Trouble, View
from bevctl.runs.records import ValidationRecord

SCORES = ("mAP", "NDS", "mIoU")
NOTHING = 1e-3
"""A score up to this is that of no detections at all."""
EARLY = 0.15
"""Share of a run in which a score of zero may be for want of training."""
LEAST_SCORES = 3
"""Scores that must agree before evaluations count as identical by chance no longer."""


def zero(view: View) -> Iterator[Trouble]:
    """The last evaluation found nothing."""
    if not view.log.validations:
        return
    last = view.log.validations[-1]
    scores = {name: last.metrics[name] for name in SCORES if name in last.metrics}
    nothing = {name: score for name, score in scores.items() if not score > NOTHING}
    if not nothing or any(name in scores and name not in nothing for name in ("mAP", "NDS")):
        return
    share = view.progress.share
    early = len(view.log.validations) == 1 and (share is None or share < EARLY)
    yield Trouble(
        Severity.WARN if early else Severity.FAIL,
        f"Evaluation is at zero: {', '.join(f'{name} {score:.4g}' for name, score in nothing.items())}",
        (Evidence(_at(last), ", ".join(f"{name} {score:.4g}" for name, score in scores.items())),),
        "No prediction matches a ground-truth box: NaN in the outputs or weights, another box convention or class "
        "order than the data's, a score threshold too high, or too little training yet.",
        "Draw predictions over the ground truth (bevctl eval --show DIR); check weights and outputs for NaN.",
        last.iter,
    )


def identical(view: View) -> Iterator[Trouble]:
    """Evaluations in a row give the very same scores."""
    validations = view.log.validations
    same = 1
    while same < len(validations) and _equal(validations[-same - 1].metrics, validations[-1].metrics):
        same += 1
    if same < 2 or (same < 3 and len(_finite(validations[-1].metrics)) < LEAST_SCORES):
        return
    yield Trouble(
        Severity.WARN,
        f"The last {same} evaluations give identical scores",
        (
            Evidence(_at(validations[-same]), _some(validations[-same].metrics)),
            Evidence(_at(validations[-1]), _some(validations[-1].metrics)),
        ),
        "What is evaluated does not change: that part of the model is frozen, or each evaluation loads the same "
        "weights.",
        "Check requires_grad of that part, and which checkpoint the evaluation reads.",
        validations[-same].iter,
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name: value for name, value in metrics.items() if math.isfinite(value) and name not in ("time", "data_time")
    }


def _equal(some: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return bool(_finite(some)) and _finite(some) == _finite(others) and any(_finite(some).values())


def _some(metrics: Mapping[str, float]) -> str:
    known = [name for name in SCORES if name in metrics] or list(_finite(metrics))[:3]
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in known)


def _at(validation: ValidationRecord) -> str:
    return f"evaluation of epoch {validation.epoch}" + (f", iteration {validation.iter}" if validation.iter else "")
