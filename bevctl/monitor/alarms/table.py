"""The table of alarms, and running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bevctl.monitor.alarms import (
    ending,
    evaluation,
    expected,
    layers,
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

Rule = Callable[[View], Iterator[Trouble]]

ALARMS: dict[str, Rule] = {
    "NAN001": nonfinite.loss,
    "NAN002": nonfinite.calibration,
    "NAN003": nonfinite.gradients,
    "NAN004": nonfinite.masked,
    "NAN005": failures_of(*CAUSES["NAN005"]),
    "NAN006": layers.alike,
    "SCALE001": scale.collapse,
    "SCALE002": scale.floor,
    "SCALE003": scale.skips,
    "LOSS001": loss.jump,
    "LOSS002": loss.plateau,
    "LOSS003": loss.oscillation,
    "LOSS004": loss.rise,
    "TASK001": tasks.dead,
    "TASK002": tasks.missing,
    "PREC001": precision.without_effect,
    "TIME001": speed.slowing,
    "TIME002": speed.slow,
    "TIME003": speed.timer,
    "LOAD001": speed.waiting_for_data,
    "LOAD002": failures_of(*CAUSES["LOAD002"]),
    "MEM001": speed.memory_growth,
    "MEM002": failures_of(*CAUSES["MEM002"]),
    "MEM003": failures_of(*CAUSES["MEM003"]),
    "EVAL001": evaluation.zero,
    "EVAL002": evaluation.identical,
    "LR001": schedule.after_resume,
    "EXP001": expected.outside,
    "EXP002": expected.unmeasured,
    "DISK001": ending.disk_too_small,
    "DISK002": failures_of(*CAUSES["DISK002"]),
    "CKPT001": ending.mismatch,
    "RUN001": ending.stalled,
    "RUN002": ending.other_failures,
    "RUN003": ending.ended,
    "RUN004": failures_of(*CAUSES["RUN004"]),
    "RUN005": ending.died,
}
"""What finds each alarm; `bevctl explain ID` says how it is decided."""


def alarms_of(view: View) -> list[Alarm]:
    """Every alarm of a run, the worst first."""
    found = [_alarm(id, trouble, view) for id, rule in ALARMS.items() for trouble in rule(view)]
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
