"""The table of alarms, and running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bevctl.monitor.alarms import (
    ending,
    evaluation,
    expected,
    loss,
    nonfinite,
    precision,
    scale,
    schedule,
    speed,
    tasks,
)
from bevctl.monitor.alarms.ending import CAUSES, failures_of
from bevctl.monitor.view import Alarm, Trouble, View


@dataclass(frozen=True)
class Rule:
    """One alarm: what finds it, and what it means in a sentence or two."""

    find: Callable[[View], Iterator[Trouble]]
    meaning: str


ALARMS: dict[str, Rule] = {
    "NAN001": Rule(
        nonfinite.loss,
        "The loss, or a part of it, is NaN or infinite. Info in the first 100 iterations only, warn when it recovers, "
        "fail when the last records have it or a fifth of all do.",
    ),
    "NAN002": Rule(
        nonfinite.calibration,
        "Gradient norms that are not finite now and then, as a dynamic loss scale causes: always info.",
    ),
    "NAN003": Rule(
        nonfinite.gradients,
        "Gradients are not finite more often than growth of the loss scale explains: 8 in 2000 iterations, counted in "
        "records; fail when it is most records and the loss does not fall.",
    ),
    "NAN004": Rule(
        nonfinite.masked,
        "The loss is finite and the gradients of the last 5 records, of 60 iterations at least, are not: no step is"
        " taken.",
    ),
    "NAN005": Rule(
        failures_of(*CAUSES["NAN005"]),
        "The assigner met NaN or infinite costs, a late sign of NaN in the outputs of the model.",
    ),
    "SCALE001": Rule(scale.collapse, "The loss scale fell to less than a 64th of what it was in this stretch."),
    "SCALE002": Rule(scale.floor, "The loss scale came down to 1 or below and stays there for 20 records."),
    "SCALE003": Rule(
        scale.skips, "In the last quarter over 2 % of the steps are skipped, and twice as often as before."
    ),
    "LOSS001": Rule(
        loss.jump,
        "Three windows in a row are 8 robust standard deviations and 50 % above the 8 before them. Info when it "
        "recovered or the learning rate restarted, fail when the loss stays more than three times as high.",
    ),
    "LOSS002": Rule(loss.plateau, "A run shown from its start: no level of 30 windows is 3 % below the first."),
    "LOSS003": Rule(loss.oscillation, "The loss swings by over 15 %, four times more than in the first half."),
    "LOSS004": Rule(loss.rise, "The level of the loss has risen by 30 % since its lowest point, steadily."),
    "TASK001": Rule(
        tasks.dead, "A part of the loss has the very same value in the last 10 windows (or 50 iterations)."
    ),
    "TASK002": Rule(
        tasks.missing, "Losses of a head that the config or the run compared with (--against) has are not logged."
    ),
    "PREC001": Rule(
        precision.without_effect,
        "Half precision is on, but memory and time are within 7 % of the FP32 run compared with or above expect:, or "
        "less than half of the matrix products run in it.",
    ),
    "TIME001": Rule(speed.slowing, "Iterations take 25 % longer than in the first half, pauses left out."),
    "TIME002": Rule(speed.slow, "An iteration computes for over 6 s, the wait for data left out."),
    "TIME003": Rule(speed.timer, "The iteration time right after evaluations includes them: always info."),
    "DATA001": Rule(speed.waiting_for_data, "Over a quarter of the iteration time is spent waiting for data."),
    "DATA002": Rule(
        failures_of(*CAUSES["DATA002"]), "A data loading process was killed, crashed or ran out of /dev/shm."
    ),
    "MEM001": Rule(speed.memory_growth, "GPU memory grows in nearly every tenth of the records, 3 % in the last half."),
    "MEM002": Rule(failures_of(*CAUSES["MEM002"]), "The GPU's memory ran out."),
    "MEM003": Rule(
        failures_of(*CAUSES["MEM003"]), "A process was killed, most often because the host's memory ran out."
    ),
    "EVAL001": Rule(evaluation.zero, "The last evaluation scores 0.001 or less; warn when it is the first and early."),
    "EVAL002": Rule(evaluation.identical, "Evaluations in a row give the very same scores."),
    "LR001": Rule(
        schedule.after_resume,
        "The learning rate is three times as high after a resume as before (fail: ten times), or warms up again.",
    ),
    "EXP001": Rule(
        expected.outside,
        "The median of the last 20 records is outside the range of expect: or --expect. The first 50 iterations do not "
        "count unless the range names its iterations.",
    ),
    "EXP002": Rule(expected.unmeasured, "A metric with an expected range is not in the log: always info."),
    "DISK001": Rule(
        ending.disk_too_small, "The checkpoints of the epochs that are left need more space than the disk has."
    ),
    "DISK002": Rule(failures_of(*CAUSES["DISK002"]), "The disk, or the user's quota, ran full."),
    "CKPT001": Rule(
        ending.mismatch,
        "Weights of a checkpoint did not fit the model: fail for other shapes or a backbone without weights, else "
        "info.",
    ),
    "RUN001": Rule(
        ending.stalled,
        "No line for 10 usual intervals and a minute; after a checkpoint or an epoch, for three times the longest "
        "evaluation (an hour where none is known).",
    ),
    "RUN002": Rule(ending.other_failures, "A traceback or another failure in the log."),
    "RUN003": Rule(ending.ended, "The log stops before the end without a reason, or the run was stopped: always info."),
    "RUN004": Rule(failures_of(*CAUSES["RUN004"]), "Communication between processes failed."),
}


def alarms_of(view: View) -> list[Alarm]:
    """Every alarm of a run, the worst first."""
    found = [_alarm(id, trouble, view) for id, rule in ALARMS.items() for trouble in rule.find(view)]
    return sorted(found, key=lambda alarm: -alarm.severity.rank)


def _alarm(id: str, trouble: Trouble, view: View) -> Alarm:
    first = None if trouble.iter is None else _record(view, float(trouble.iter))
    return Alarm(id, trouble.severity, trouble.title, trouble.evidence, trouble.cause, trouble.fix, first_record=first)


def _record(view: View, iteration: float) -> dict[str, float | None]:
    """Epoch, iteration and Unix time of the first record at or after `iteration`."""
    rows = np.flatnonzero(view.history.iters >= iteration)
    if not len(rows):
        return {"epoch": None, "iter": iteration, "time": None}
    time = view.history.column("time")[rows[0]]
    return {
        "epoch": int(view.history.epochs[rows[0]]),
        "iter": int(view.history.iters[rows[0]]),
        "time": float(time) if np.isfinite(time) else None,
    }
