"""Losses that are not there: a part that is constant or zero, a family that the config or another run has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import Column, History
from bevctl.monitor.view import Trouble, View

SAME_WINDOWS, SAME_ITERATIONS = 10, 50
"""Records in a row with the very same value that make a loss dead: of windows, and of single iterations."""
ROUNDED = 0.01
"""Logs print four decimals, so that a smaller loss may look constant without being so."""
_LAYER = re.compile(r"(?:^|_)d\d+$|_?layer_-?\d+$")


def task_of(name: str) -> str:
    """The task a part of the loss belongs to: `loss/<task>/…`, else what stands before its last dot, else itself.

    Numbers of decoder layers are no tasks: `d3.loss_bbox` belongs to `loss_bbox`.
    """
    parts = name.split("/")
    if parts[0] == "loss" and len(parts) > 2:
        return parts[1]
    head, _, rest = name.rpartition(".")
    return _LAYER.sub("", head) or rest


def by_task(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of each task, in their order."""
    tasks: dict[str, list[str]] = {}
    for name in names:
        tasks.setdefault(task_of(name), []).append(name)
    return tasks


def dead(view: View) -> Iterator[Trouble]:
    """Parts of the loss that no longer change, or are zero."""
    history = view.history
    enough = SAME_WINDOWS if history.interval >= 10 else SAME_ITERATIONS
    still = {name: length for name in history.losses if (length := _still(history.finite(name)[1])) >= enough}
    still = {name: n for name, n in still.items() if not 0 < abs(history.finite(name)[1][-1]) < ROUNDED}
    if not still:
        return
    values = {name: history.finite(name)[1] for name in still}
    zero = [name for name in still if values[name][-1] == 0]
    tasks = [task for task, names in by_task(history.losses).items() if set(names) <= set(still)]
    since = min(history.finite(name)[0][-length] for name, length in still.items())
    kind = "zero" if len(zero) == len(still) else "constant"
    yield Trouble(
        Severity.FAIL if len(still) == len(history.losses) else Severity.WARN,
        f"{len(still)} of {len(history.losses)} loss parts are exactly {kind}: {_shown(tasks or list(still))}",
        tuple(_evidence(values, still)),
        "The task gets no targets or no gradient: a frozen or disconnected head, an empty ground truth, a weight of "
        "zero.",
        "If the part is not frozen on purpose, look at its targets and its weight; evaluate the task alone.",
        since,
    )


def _evidence(values: dict[str, Column], still: dict[str, int]) -> Iterator[Evidence]:
    """One line for all parts that have the same value for as long."""
    alike: dict[str, list[str]] = {}
    for name, length in still.items():
        what = f"{values[name][-1]:g} in the last {length} records" + _from_the_start(length, values[name])
        alike.setdefault(what, []).append(name)
    for what, names in list(alike.items())[:8]:
        yield Evidence(_shown(names), what)


def _still(values: Column) -> int:
    """How many values at the end equal the last one."""
    if not len(values):
        return 0
    same = values == values[-1]
    return len(same) if same.all() else int(np.argmin(same[::-1]))


def _from_the_start(length: int, values: Column) -> str:
    return ", as in all" if length == len(values) else f"; {values[-length - 1]:.4g} before"


def _shown(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def missing(view: View) -> Iterator[Trouble]:
    """Losses that the config, or the run compared with, has and this run lacks."""
    if not len(view.history) or not view.history.losses:
        return
    yield from _missing_of_config(view)
    yield from _missing_of_other(view)


def _missing_of_config(view: View) -> Iterator[Trouble]:
    model = (view.config or {}).get("model")
    tasks = by_task(view.history.losses)
    for task in ("object", "map"):
        if isinstance(model, dict) and model.get(task) is not None and task not in tasks:
            where, what = f"config: model.{task}", f"a {task} head is configured; losses logged: {_shown(list(tasks))}"
            yield _lost(f"The {task} head's losses are missing", [Evidence(where, what)], Severity.FAIL)


def _missing_of_other(view: View) -> Iterator[Trouble]:
    ours, theirs = set(view.history.losses), view.other.losses
    absent = [name for name in theirs if name not in ours]
    if not absent or not ours & set(theirs):
        return  # the same, or another project's names, which do not compare
    own_tasks = by_task(ours)
    tasks = [task for task in by_task(absent) if task not in own_tasks]
    evidence = [Evidence(str(view.against.path) if view.against else "other run", f"logs {_shown(absent, 8)}")]
    evidence += list(_totals(view.history, view.other))
    if tasks:
        yield _lost(f"The losses of {_shown(tasks)} are missing", evidence, Severity.FAIL)
    else:
        yield _lost(f"{len(absent)} loss parts of the other run are missing", evidence, Severity.WARN)


def _lost(title: str, evidence: list[Evidence], severity: Severity) -> Trouble:
    return Trouble(
        severity,
        title,
        tuple(evidence),
        "The head was not built, or its loss is not part of the sum. Memory and time that it saves are no gain of "
        "FP16.",
        "Compare the model's heads in the two configs; a checkpoint with unexpected keys of that head is another sign.",
    )


def _totals(history: History, other: History) -> Iterator[Evidence]:
    for name in ("loss", "memory_gib"):
        ours, theirs = (h.finite(name)[1][-20:] for h in (history, other))
        if len(ours) and len(theirs):
            yield Evidence(name, f"{np.median(ours):.4g} here, {np.median(theirs):.4g} there")
