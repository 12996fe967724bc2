"""NaN and infinity in losses and gradients: what is calibration of the loss scale, and what is failure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.facts import fixed_scale
from bevctl.monitor.history import History, Mask
from bevctl.monitor.view import Trouble, View

GROWTH_INTERVAL = 2000
"""Good steps after which a dynamic loss scale grows, and so may overflow once."""
PROBES = 8
"""How many times more often than by growth alone a healthy run may overflow; windows that hold one are counted."""
RECORDS_IN_A_ROW, ITERATIONS_IN_A_ROW = 5, 60
"""Non-finite records in a row, of so many iterations at least, that no search for a scale explains."""
DEVIATIONS = 5.0
"""Standard deviations of a count that chance does not reach."""
RECENT = 40
LEAST_BAD = 5
"""Records that may be not finite by chance whatever their share."""
BAD_SHARE = 0.2
"""Share of records with a non-finite loss that is failure even where the last one is finite."""


def loss(view: View) -> Iterator[Trouble]:
    """A loss that is NaN or infinite: persistent, in many records, now and then, or only at the start."""
    history = view.history
    names = [name for name in ("loss", *history.losses) if history.nonfinite(name).any()]
    if not names:
        return
    bad = np.logical_or.reduce([history.nonfinite(name) for name in names])
    settled = bad[~view.settling]
    trailing = _trailing(bad)
    enough = 2 if history.interval >= 10 else 5
    share = float(settled.mean()) if len(settled) else 0.0
    first = history.iters[int(np.argmax(bad))]
    if trailing >= enough or (trailing == len(bad) and len(settled)):
        first = history.iters[len(bad) - trailing]
        severity, title = Severity.FAIL, f"The loss is not finite since {view.where(first)}"
    elif share > BAD_SHARE:
        severity, title = Severity.FAIL, f"The loss is not finite in {share:.0%} of the records"
    elif settled.any() or trailing:
        severity = Severity.WARN
        title = f"The loss was not finite in {int(bad.sum())} of {len(bad)} records" + _recovered(trailing)
    else:
        severity, title = Severity.INFO, "The loss was not finite in the first iterations only"
    evidence = (*_which(view, names, first), *_before(view, first), *_kept(view))
    cause = _loss_cause(_bad_parts(history, first), severity)
    yield Trouble(severity, title, evidence, cause, _loss_fix(severity), first)


def _trailing(bad: Mask) -> int:
    """Marked records in a row at the end."""
    return int(np.argmin(bad[::-1])) if not bad.all() else len(bad)


def _recovered(trailing: int) -> str:
    return "; the last one is" if trailing else ", and recovered each time"


def _which(view: View, names: list[str], first: float) -> Iterator[Evidence]:
    """The losses that are not finite in the record at `first`, and those that went first over all."""
    history = view.history
    row = int(np.flatnonzero(history.iters == first)[0])
    parts = [name for name in history.losses if history.logged[name][row]]
    bad = _bad_parts(history, first)
    if parts:
        kind = f"{len(bad)} of {len(parts)} loss parts not finite" + (f": {_some(bad)}" if bad else "")
        fine = [name for name in parts if name not in bad]
        yield Evidence(view.where(first), kind + (f"; finite: {_some(fine)}" if bad and fine else ""))
    else:
        yield Evidence(view.where(first), "the loss is not finite; the log has no parts of it")
    starts = {name: history.iters[int(np.argmax(history.nonfinite(name)))] for name in names if name != "loss"}
    early = [name for name, start in starts.items() if start == min(starts.values())]
    if len(set(starts.values())) > 1:
        yield Evidence(view.where(min(starts.values())), f"the first to be not finite: {_some(early)}")


def _bad_parts(history: History, iteration: float) -> list[str]:
    """Parts of the loss that are not finite in one record."""
    row = int(np.flatnonzero(history.iters == iteration)[0])
    return [name for name in history.losses if history.nonfinite(name)[row]]


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _before(view: View, first: float) -> Iterator[Evidence]:
    """The last finite record before, and the last checkpoint."""
    history = view.history
    earlier, values = history.rows(history.iters < first).finite("loss")
    if len(earlier):
        norm = history.rows(history.iters == earlier[-1]).column("grad_norm")[-1]
        shown = f", grad norm {norm:.4g}" if np.isfinite(norm) else ""
        yield Evidence(view.where(earlier[-1]), f"last record with a finite loss: {values[-1]:.4g}{shown}")
    saved = [event for event in view.events("checkpoint") if event.iter is not None and event.iter < first]
    if saved:
        yield Evidence(
            saved[-1].where or view.where(saved[-1].iter or 0), f"last checkpoint before: {saved[-1].message}"
        )


def _kept(view: View) -> Iterator[Evidence]:
    """The first bundle that a run of bevctl kept of such a step since it last started."""
    start = view.starts[-1] if view.starts else 0.0
    for event in view.events("nonfinite"):
        if event.data.get("incident") and (event.iter or 0) > start:
            yield Evidence(event.where or view.where(event.iter or 0), event.message)
            return


def _loss_cause(bad: list[str], severity: Severity) -> str:
    if severity is Severity.INFO:
        return "Large values before the loss scale is found."
    if bad and all("heatmap" in name for name in bad):
        return (
            "A heatmap loss takes the logarithm of 1 - p, which is 0 in half precision once p rounds to 1; "
            "or its input is NaN already."
        )
    if severity is Severity.WARN:
        return (
            "Single iterations overflow: the scaler skips their steps in half precision; in FP32 they reach the "
            "weights."
        )
    return "The outputs of the model, or the loss itself, overflow or divide by zero."


def _loss_fix(severity: Severity) -> str | None:
    if severity is Severity.INFO:
        return None
    if severity is Severity.WARN:
        return "Keep the loss in FP32, and look at the samples of those iterations."
    return (
        "Stop: a retry runs into the same. Resume from the last checkpoint before it with the loss (heads) in FP32 "
        "and a lower learning rate, or in BF16 or FP32."
    )


@dataclass(frozen=True)
class Overflows:
    """Records whose gradient norm is not finite while the loss is."""

    bad: Mask
    recent: float
    """Share of them among the recent settled records; 0 for a few, whatever their share."""
    early: float
    """Share of them in the first half of the settled records."""
    late: float
    by_growth: float
    """Share that growth of the loss scale makes."""
    allowed: float
    """Share that it may still explain."""
    half: int
    """Settled records in a half."""
    in_a_row: int
    """How many stand at the end."""
    too_many_in_a_row: int

    @property
    def no_step_taken(self) -> bool:
        return self.in_a_row >= self.too_many_in_a_row

    @property
    def is_frequent(self) -> bool:
        return self.recent > self.allowed or self.is_rising

    @property
    def is_rising(self) -> bool:
        """Whether the second half has more of them than chance makes of the first half's share, or of growth alone."""
        expected = self.half * max(self.early, self.by_growth)
        return self.half * self.late > expected + DEVIATIONS * math.sqrt(expected) + 1


def overflows(view: View) -> Overflows | None:
    """What the gradient norms say; None where all are finite."""
    history = view.history
    bad = history.nonfinite("grad_norm") & ~history.nonfinite("loss")
    if not bad.any():
        return None
    settled = bad[~view.settling]
    interval = history.interval
    half = len(settled) // 2
    recent = settled[-RECENT:]
    return Overflows(
        bad,
        recent=float(recent.mean()) if len(recent) >= 10 and recent.sum() >= LEAST_BAD else 0.0,
        early=float(settled[:half].mean()) if half else 0.0,
        late=float(settled[half:].mean()) if half else 0.0,
        by_growth=min(interval / GROWTH_INTERVAL, 1.0),
        allowed=float(np.clip(PROBES * interval / GROWTH_INTERVAL, 0.05, BAD_SHARE)),
        half=half,
        in_a_row=_trailing(bad),
        too_many_in_a_row=max(RECORDS_IN_A_ROW, math.ceil(ITERATIONS_IN_A_ROW / interval)),
    )


def calibration(view: View) -> Iterator[Trouble]:
    """Non-finite gradient norms that are the loss scale being found."""
    found = overflows(view)
    if found is None or found.no_step_taken or found.is_frequent:
        return
    iters = view.history.iters[found.bad]
    at_start = int(found.bad[view.settling].sum())
    what = (
        f"{len(iters)} of {len(found.bad)} records ({len(iters) / len(found.bad):.1%}), {at_start} right after a start"
    )
    yield Trouble(
        Severity.INFO,
        f"The gradient norm was not finite in {len(iters)} records, as loss scaling does",
        (Evidence("grad_norm", what),),
        "A dynamic loss scale starts high and grows every 2000 good steps; a step that overflows is skipped. A record "
        "that is a mean shows NaN for one such step.",
        None,
        iters[0],
    )


def gradients(view: View) -> Iterator[Trouble]:
    """Steps overflow more often than growth of the loss scale explains."""
    found = overflows(view)
    if found is None or found.no_step_taken or not found.is_frequent:
        return
    flat = not _falls(view.history)
    iters = view.history.iters[found.bad]
    severity = Severity.FAIL if flat and found.recent > 0.5 else Severity.WARN
    static = _static_scale(view)
    yield Trouble(
        severity,
        f"Gradients are not finite in {max(found.recent, found.late):.0%} of the recent records"
        + (", and the loss does not fall" if severity is Severity.FAIL else ""),
        (
            Evidence(
                "grad_norm", f"share not finite: {found.early:.1%} in the first half, {found.late:.1%} in the second"
            ),
            Evidence("grad_norm", f"a dynamic loss scale explains up to {found.allowed:.0%} at this log interval"),
            *_kept(view),
            *([Evidence("header", static)] if static else []),
        ),
        "The loss scale is fixed, so that an overflow repeats until the gradients shrink."
        if static
        else "Gradients grow: the learning rate is too high for the batch, or a part of the model is unstable in FP16.",
        "Use a dynamic loss scale." if static else "Lower the learning rate, or resume in BF16 or FP32.",
        iters[0],
    )


def masked(view: View) -> Iterator[Trouble]:
    """The loss is finite and the gradients never are: no step changes the weights."""
    found = overflows(view)
    if found is None or not found.no_step_taken:
        return
    history = view.history
    first = history.iters[len(found.bad) - found.in_a_row]
    evidence = [
        Evidence(view.where(first), f"{found.in_a_row} records in a row up to the last one, loss finite in each")
    ]
    same = _identical_layers(history)
    if same:
        evidence.append(Evidence(view.where(history.iters[-1]), same))
    evidence += _kept(view)
    yield Trouble(
        Severity.FAIL,
        f"No step was taken since {view.where(first)}: gradients are never finite",
        tuple(evidence),
        "Either a NaN that the loss hides (a mask, nan_to_num) comes back in the backward pass, or the loss scale "
        "cannot go down.",
        "Find the operation that is not finite in the backward pass and run it in FP32; make a fixed loss scale "
        "dynamic.",
        first,
    )


def _identical_layers(history: History) -> str:
    """Decoder layers that log the very same loss: a sign that a constant stands in for NaN."""
    last = {name: history.values[name][-1] for name in history.losses}
    parts = [(name.rpartition("_")[2], value) for name, value in last.items() if np.isfinite(value) and value]
    most = Counter(parts).most_common(1)
    return f"{most[0][1]} loss parts have the same value {most[0][0][1]:.6g}" if most and most[0][1] >= 3 else ""


def _falls(history: History) -> bool:
    """Whether the loss is lower in the last quarter than in the first."""
    _, values = history.windows("loss")
    quarter = len(values) // 4
    return quarter > 0 and bool(np.median(values[-quarter:]) < 0.97 * np.median(values[:quarter]))


def _static_scale(view: View) -> str:
    scale = fixed_scale(view.log)
    return "" if scale is None else f"the loss scale is fixed at {scale:g}"
