"""A loss that jumps, rises, swings or diverges while it is still a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bevctl.diagnose.learning_rate import TOO_HIGH, linear_rate, unscaled
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis, Remedy, Status, status_of
from bevctl.diagnose.subject import Subject, from_alarm, read_subject
from bevctl.engine.checkpoint_report import floating_tensors, inspect_checkpoint
from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms.loss import AFTER, BEFORE, swings
from bevctl.monitor.alarms.nonfinite import GROWTH_INTERVAL
from bevctl.monitor.view import Alarm, View

SYMPTOMS = {
    "LOSS001": 0.5,
    "LOSS003": 0.5,
    "LOSS004": 0.5,
    "LR001": 0.8,
    "SCALE001": 0.5,
    "SCALE002": 0.6,
    "SCALE003": 0.5,
    "NAN001": 0.4,
    "NAN003": 0.5,
    "NAN004": 0.5,
}
"""Alarms that tell of instability → how sure the cause is that they give."""
OF_NUMBERS = ("NAN001", "NAN004")
"""Those that `diagnose nan` knows more about."""
THRASH, WEIGHTS, SWINGS = "SCALE101", "LOSS101", "LOSS102"
ALWAYS = 0.2
"""Mean relative distance of the loss from its level throughout a run; 0.01 to 0.06 in healthy ones."""
DROPS = 6
"""Fewer drops of the loss scale are no thrashing."""
TOO_OFTEN = 4.0
"""Drops per growth interval; growth by itself makes at most one."""
GROWN, LAYER_GROWN = 3.0, 10.0
"""Factors by which all weights together, and those of one tensor, grow in a run that diverges."""
LOWER = 0.75
"""Factor of the lower learning rate to try: 2e-5 becomes 1.5e-5."""


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """What makes the loss unstable, by log, config and checkpoints.

    Raises:
        BevctlError: what the request names cannot be read.
    """
    subject = read_subject(request)
    symptoms = [from_alarm(alarm, SYMPTOMS[alarm.id], _remedies(subject, alarm)) for alarm in subject.alarms(*SYMPTOMS)]
    symptoms += [*_swings(subject), *_thrash(subject), *_weights(subject.checkpoints, request)]
    in_trouble = status_of(symptoms) is Status.FOUND
    cause = unscaled(subject.setting, in_trouble)
    findings = [*symptoms, *([cause] if cause is not None else [])]
    found = status_of(findings)
    if found is Status.CLEAR and not _long_enough(subject.view):
        enough = f"The log has too few windows with a loss to judge its course ({BEFORE + AFTER} are needed)."
        return Diagnosis(Status.INCONCLUSIVE, findings, [*subject.looked_at, enough])
    return Diagnosis(found, findings, subject.looked_at)


def _long_enough(view: View | None) -> bool:
    return view is not None and len(view.history.windows("loss")[1]) >= BEFORE + AFTER


def _remedies(subject: Subject, alarm: Alarm) -> Sequence[Remedy]:
    """What to try for an alarm, the gentlest first."""
    if alarm.severity is Severity.INFO:
        return ()
    if alarm.id in OF_NUMBERS:
        return (Remedy({}, "`bevctl diagnose nan` on the same run: it has numbers that are not finite"),)
    if alarm.id == "LR001":
        return ()
    first = alarm.first_record["iter"] if alarm.first_record else None
    return _smaller_steps(subject, alarm.id, first)


def _smaller_steps(subject: Subject, id: str, first: float | None) -> Sequence[Remedy]:
    """What makes steps smaller; `first` is the iteration that shows the trouble first."""
    setting = subject.setting
    if isinstance(setting.loss_scale, int | float) and id == "NAN003":
        return (subject.remedy("a dynamic loss scale", precision__loss_scale="dynamic"),)
    remedies = []
    linear = linear_rate(setting)
    if linear is not None and setting.lr is not None and setting.lr < TOO_HIGH * linear:
        told = "the learning rate fits the batch: look at data and geometry too (augmentation matrices, calibration)"
        remedies.append(Remedy({}, told))
    if setting.lr is not None:
        lower = float(f"{LOWER * setting.lr:.3g}")
        remedies.append(subject.remedy(f"a lower learning rate, {lower:g}", optim__lr=lower, optim__lr_scaling="none"))
    if setting.warmup and first is not None and first <= 3 * setting.warmup:
        longer = 2 * setting.warmup
        remedies.append(subject.remedy(f"a longer warm-up, {longer} iterations", optim__warmup=longer))
    remedies += _tighter_clip(subject)
    if id.startswith("SCALE") and setting.half:
        remedies.append(subject.remedy("a fixed loss scale of 512 (or 128)", precision__loss_scale=512.0))
    return remedies


def _tighter_clip(subject: Subject) -> Iterator[Remedy]:
    """Clipping at the usual gradient norm, where the limit lies far above it or there is none."""
    norms = subject.view.history.finite("grad_norm")[1] if subject.view is not None else np.empty(0)
    if len(norms) < BEFORE:
        return
    usual, limit = float(f"{np.median(norms):.2g}"), subject.setting.clip
    if usual > 0 and (limit is None or limit > 1.5 * usual):
        now = f"it is {limit:g}" if limit is not None else "there is no limit known"
        yield subject.remedy(f"gradients clipped at their usual norm, {usual:g} ({now})", optim__clip=usual)


def _swings(subject: Subject) -> Iterator[DiagnoseFinding]:
    """A loss that has swung from the start: the alarm only knows swings that grow."""
    sizes = swings(subject.view) if subject.view is not None and not subject.alarms("LOSS003") else np.empty(0)
    if len(sizes) and float(sizes.mean()) >= ALWAYS:
        yield DiagnoseFinding(
            SWINGS,
            Severity.WARN,
            0.4,
            f"The loss swings by {sizes.mean():.0%} all the time",
            (Evidence("loss", f"mean distance of {len(sizes)} windows from the level around them; 1 to 6 % is usual"),),
            "Steps are too large for the batch from the start, or batches differ widely (a batch of 1, rare classes).",
            tuple(_smaller_steps(subject, SWINGS, None)),
        )


def _thrash(subject: Subject) -> Iterator[DiagnoseFinding]:
    """A loss scale that keeps going down and up again."""
    view = subject.view
    if view is None:
        return
    iters, scale = view.settled("loss_scale")
    changes = np.diff(scale)
    drops, rises = int((changes < 0).sum()), int((changes > 0).sum())
    if drops < DROPS or rises < DROPS / 2:
        return
    rate = drops / max((iters[-1] - iters[0]) / GROWTH_INTERVAL, 1e-9)
    if rate <= TOO_OFTEN:
        return
    first = float(iters[1:][changes < 0][0])
    yield DiagnoseFinding(
        THRASH,
        Severity.WARN,
        0.6,
        f"The loss scale goes down and up again: {drops} drops, {rises} rises",
        (
            Evidence(view.where(first), f"first drop; since then {rate:.3g} per {GROWTH_INTERVAL} iterations"),
            Evidence("loss_scale", f"between {scale.min():g} and {scale.max():g}"),
        ),
        "It grows back faster than the gradients allow, and each drop costs a step; or gradients vary widely.",
        (
            subject.remedy("a fixed loss scale at the lowest value seen", precision__loss_scale=float(scale.min())),
            subject.remedy("growth after 4 times as many good steps", precision__growth_interval=4 * GROWTH_INTERVAL),
        ),
    )


def _weights(checkpoints: Sequence[Path], request: DiagnoseRequest) -> Iterator[DiagnoseFinding]:
    """Weights that grew between the first and the last checkpoint."""
    if len(checkpoints) < 2:
        return
    first, last = checkpoints[0], checkpoints[-1]
    request.say(f"Comparing the weights of {first} and {last}")
    before, after = _norms(first), _norms(last)
    shared = [key for key in before if key in after]
    total = _total(after, shared) / max(_total(before, shared), 1e-12)
    ratios = {key: after[key] / before[key] for key in shared if before[key] > 1e-2}
    grown = sorted((key for key in ratios if ratios[key] > LAYER_GROWN), key=lambda key: -ratios[key])
    if not shared or (total < GROWN and not grown):
        return
    yield DiagnoseFinding(
        WEIGHTS,
        Severity.WARN if total >= GROWN else Severity.INFO,
        0.6,
        f"The weights grew to {total:.3g} times their norm",
        (
            Evidence(
                f"{first.name} to {last.name}", f"norm {_total(before, shared):.4g} to {_total(after, shared):.4g}"
            ),
            *(Evidence(key, f"norm {before[key]:.4g} to {after[key]:.4g}") for key in grown[:6]),
        ),
        "Steps are too large, or weight decay is off: activations grow with the weights until FP16 overflows.",
    )


def _norms(path: Path) -> dict[str, float]:
    """L2 norm of each weight; statistics left out. Empty where the file cannot be read."""
    checkpoint = inspect_checkpoint(path).checkpoint
    if checkpoint is None:
        return {}
    weights = checkpoint.state_dict.keys()
    return {
        key: float(tensor.double().norm())
        for key, tensor in floating_tensors(checkpoint)
        if key in weights and not key.endswith(("running_mean", "running_var")) and not tensor.is_complex()
    }


def _total(norms: dict[str, float], keys: Sequence[str]) -> float:
    return float(np.sqrt(sum(norms[key] ** 2 for key in keys)))
