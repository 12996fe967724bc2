"""When, where and how numbers stopped being finite, as a log's records show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bevctl.diagnose.setting import Setting
from bevctl.finding import Evidence
from bevctl.monitor.alarms.tasks import by_task
from bevctl.monitor.history import Mask
from bevctl.monitor.view import SETTLING_ITERS, View

_MOST_TASKS = 6


@dataclass(frozen=True)
class Onset:
    """Where numbers stop being finite in a way that start-up does not explain, else where they first do."""

    iter: float
    losses: tuple[str, ...]
    """Parts of the loss that are not finite there; empty where only gradients are not."""
    finite: tuple[str, ...]
    """Parts that still are."""
    phase: str
    pattern: str
    lr: str
    scale: str
    before: int
    """Records with a gradient norm that is not finite, before it."""

    @property
    def of_one_family(self) -> bool:
        """Some losses are not finite while others are."""
        return bool(self.losses) and bool(self.finite)

    def evidence(self, view: View) -> Iterator[Evidence]:
        """What the record and its surroundings say, beside what the alarms tell."""
        where = view.where(self.iter)
        yield Evidence(where, f"{self.phase}; {self.pattern}")
        yield Evidence(where, "; ".join(part for part in (self.lr, self.scale) if part) or "learning rate not logged")
        if self.before:
            yield Evidence(where, f"gradient norm not finite in {_records(self.before)} before it")


def onset_of(view: View, setting: Setting) -> Onset | None:
    """None where every loss and gradient norm is finite."""
    history = view.history
    names = [name for name in ("loss", *history.losses, "grad_norm") if history.nonfinite(name).any()]
    if not names:
        return None
    in_losses = [history.nonfinite(name) for name in names if name != "grad_norm"]
    bad = np.logical_or.reduce(in_losses or [history.nonfinite("grad_norm")])
    row = _first_row(bad, bad & ~view.settling)
    parts = [name for name in history.losses if history.logged[name][row]]
    broken = tuple(name for name in parts if history.nonfinite(name)[row])
    return Onset(
        iter=float(history.iters[row]),
        losses=broken,
        finite=tuple(name for name in parts if name not in broken),
        phase=_phase(view, setting, float(history.iters[row])),
        pattern=_pattern(bad),
        lr=_lr(view, row),
        scale=_scale(view, setting, row),
        before=int(history.nonfinite("grad_norm")[:row].sum()),
    )


def _first_row(bad: Mask, late: Mask) -> int:
    """Where the bad records begin that reach past the start-up; the first bad one where none does."""
    row = int(np.argmax(late if late.any() else bad))
    while row and bad[row - 1]:
        row -= 1
    return row


def _phase(view: View, setting: Setting, iteration: float) -> str:
    near = [start for start in view.starts if start < iteration <= start + max(SETTLING_ITERS, view.history.interval)]
    if near:
        searching = ", while the loss scale is being found" if setting.half else ""
        return f"in the first iterations after a start or a resume{searching}"
    if setting.warmup and view.is_fresh and iteration <= setting.warmup:
        return f"during the warm-up of {setting.warmup} iterations"
    return f"late, after {_records(int((view.history.iters < iteration).sum()))}"


def _pattern(bad: Mask) -> str:
    count = int(bad.sum())
    runs = int((np.diff(np.concatenate([[0], bad.astype(np.int8)])) == 1).sum())
    if runs == 1 and bad[-1]:
        return f"it never recovers ({_records(count)} to the end)"
    if runs == 1:
        return f"{_records(count)} in a row, then finite again"
    recovers = "" if bad[-1] else ", and finite again each time"
    return f"{count} of {len(bad)} records in {runs} separate places{recovers}"


def _records(count: int) -> str:
    return f"{count} record" if count == 1 else f"{count} records"


def _lr(view: View, row: int) -> str:
    lr = view.history.column("lr")
    if not np.isfinite(lr[row]):
        return ""
    return f"learning rate {lr[row]:.3g}, {lr[row] / max(np.nanmax(lr), 1e-30):.0%} of the highest in the log"


def _scale(view: View, setting: Setting, row: int) -> str:
    scale = view.history.column("loss_scale")[row]
    if np.isfinite(scale):
        return f"loss scale {scale:g}"
    if isinstance(setting.loss_scale, int | float):
        return f"loss scale fixed at {setting.loss_scale:g}"
    return "loss scale dynamic, its value not logged" if setting.half else ""


def order_of_tasks(view: View) -> Evidence | None:
    """Which task's losses went first, where several tasks did one after the other, or one alone did."""
    history = view.history
    tasks = by_task(history.losses)
    if not 1 < len(tasks) <= _MOST_TASKS:
        return None
    firsts = {}
    for task, names in tasks.items():
        bad = np.logical_or.reduce([history.nonfinite(name) for name in names]) & ~view.settling
        if bad.any():
            firsts[task] = float(history.iters[int(np.argmax(bad))])
    if not firsts or (len(firsts) == len(tasks) and len(set(firsts.values())) == 1):
        return None
    ordered = sorted(firsts, key=lambda task: firsts[task])
    never = [task for task in tasks if task not in firsts]
    what = ", then ".join(f"{task} at iteration {firsts[task]:.0f}" for task in ordered)
    return Evidence("tasks", f"not finite first: {what}" + (f"; always finite: {', '.join(never)}" if never else ""))
