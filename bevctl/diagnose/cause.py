"""From a replayed and traced step to its cause, and to what is worth a try against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bevctl.diagnose.bundle import Bundle
from bevctl.diagnose.checkpoint_scan import BEYOND_FP16, Scan
from bevctl.diagnose.evidence import evidence_of, named_samples, suspects_of, where_of
from bevctl.diagnose.ideas import Ladder, fixed_scales, for_divergence, for_range, for_samples
from bevctl.diagnose.rehearsal import Result
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.finding import Evidence, Severity
from bevctl.numerics.record import Culprit

RANGE, CODE, DATA, STATE, TRANSIENT = "NAN201", "NAN202", "NAN203", "NAN204", "NAN205"
LOSS_SCALE, DIVERGENCE, HIDDEN, KERNEL = "NAN206", "NAN207", "NAN208", "NAN209"
_GROWN = 10.0
"""A loss this many times its lowest in the recorded steps runs away."""
_USUAL = 1e8
"""Magnitudes above this come from weights that were moved much too far, not from data or rounding."""
_ADVICE = {
    "log": "keep its input above a small number, or use log_softmax or logsigmoid",
    "div": "add a small number to what is divided by, or leave such elements out",
    "reciprocal": "add a small number to what is divided by, or leave such elements out",
    "sqrt": "add a small number under the root: its slope is infinite at 0",
    "norm": "add a small number under the root: its slope is infinite at 0",
    "pow": "keep its base above a small number",
    "softmax": "a row of it holds nothing but minus infinity: leave such rows out",
    "exp": "subtract the largest exponent first",
}
"""Part of an operation's name → what cures it in the code."""


@dataclass(frozen=True)
class Scene:
    """What is known when the step has been run again under instruments."""

    bundle: Bundle
    precision: str
    """fp16, bf16 or fp32."""
    culprit: Culprit | None
    state: Scan
    """Of the state before the step."""
    replayed: Result
    """The step without instruments."""
    kernels_only: bool = False
    """It is not finite with bevctl's own kernels, and finite with torch's operations."""

    @property
    def tokens(self) -> list[list[str]]:
        """Samples of the step, batch by batch."""
        return [batch.tokens for batch in self.bundle.batches]


@dataclass(frozen=True)
class Cause:
    """What went wrong, and what is worth a try."""

    finding: DiagnoseFinding
    ladders: Sequence[Ladder] = ()


def cause_of(scene: Scene) -> Cause | None:
    """The cause of a step that is not finite in the replay either; None where nothing names one."""
    culprit = scene.culprit
    if _spoiled(scene):
        return _of_state(scene)
    if culprit is None:
        return _of_kernels() if scene.kernels_only else _of_norm(scene)
    if culprit.kind == "data" or culprit.verdict.kind == "data" or culprit.faults:
        return _of_data(scene, culprit)
    runaway = _runaway(scene, culprit)
    if runaway:
        return _of_divergence(scene, culprit, runaway)
    if culprit.verdict.is_range and scene.precision != "fp32":
        return _of_range(scene, culprit)
    return _of_code(scene, culprit)


def hidden_finding(culprit: Culprit) -> DiagnoseFinding | None:
    """That something made a non-finite number look finite; None where nothing did."""
    hiding = culprit.masked_by
    if hiding is None:
        return None
    return DiagnoseFinding(
        HIDDEN,
        Severity.WARN,
        0.95,
        f"{hiding.op} hides numbers that are not finite",
        (Evidence(where_of(hiding.place), hiding.note),),
        "The loss stays finite while what it is made of is not, so that only gradients show it, or nothing does.",
        (Remedy({}, "take it out, at least until the cause is cured: a skipped step is better than a wrong one"),),
    )


def _runaway(scene: Scene, culprit: Culprit) -> str:
    """What shows that the training ran away before numbers left their range; empty where nothing does."""
    growth = growth_of(scene.bundle.incident.ring)
    if growth > _GROWN:
        return f"the loss grew {growth:.3g} times in the steps before"
    usual = _USUAL * (scene.bundle.incident.loss_scale if culprit.record.phase == "backward" else 1.0)
    largest = max((extent.largest for extent in culprit.record.inputs), default=0.0)
    if scene.bundle.incident.iteration > 1 and largest > usual:
        return f"numbers as large as {largest:.3g} reach {culprit.module or 'the model itself'}"
    return ""


def growth_of(ring: Sequence[dict[str, object]]) -> float:
    """The last finite loss of the recorded steps over the lowest before it."""
    losses = [loss for step in ring if isinstance(loss := step.get("loss"), float) and math.isfinite(loss) and loss > 0]
    return losses[-1] / min(losses) if losses else 1.0


def _spoiled(scene: Scene) -> list[DiagnoseFinding]:
    """What of the state cannot be real; weights too large for FP16 can, and show in an operation."""
    return [f for f in scene.state.findings if f.severity is Severity.FAIL and f.id != BEYOND_FP16]


def _of_state(scene: Scene) -> Cause:
    found = _spoiled(scene)
    evidence = [part for finding in found for part in finding.evidence]
    reasons = " ".join(dict.fromkeys(finding.cause for finding in found if finding.cause))
    return Cause(
        DiagnoseFinding(
            STATE,
            Severity.FAIL,
            0.95,
            "The state was spoiled before this step: " + "; ".join(_without_path(finding.title) for finding in found),
            tuple(evidence),
            f"The step only inherits it; no setting repairs it. {reasons}",
        )
    )


def _without_path(title: str) -> str:
    return title.rpartition(".pth: ")[2].rstrip(".")


def _of_data(scene: Scene, culprit: Culprit) -> Cause:
    suspected = suspects_of(culprit, scene.tokens)
    faults = [
        Evidence(", ".join(named_samples(fault.samples, scene.tokens)) or "data", fault.what)
        for fault in culprit.faults
    ]
    samples = sum(map(len, scene.tokens))
    named = len(suspected) < samples or samples == 1
    return Cause(
        DiagnoseFinding(
            DATA,
            Severity.FAIL,
            0.95 if faults else 0.8,
            f"The data of {'sample ' + ', '.join(suspected) if named else 'this step'} cannot be learned from",
            (*faults, *evidence_of(culprit, scene.tokens)),
            "What went into the model was already not finite, or cannot be real; every model would fail on it.",
        ),
        for_samples(scene.bundle.before.config, suspected),
    )


def _of_kernels() -> Cause:
    way_out = Remedy({}, "run with BEVCTL_KERNELS=torch in the environment, and report the bundle as a defect", True)
    return Cause(
        DiagnoseFinding(
            KERNEL,
            Severity.FAIL,
            0.9,
            "Only bevctl's own kernels give numbers that are not finite",
            (Evidence("replayed with torch's operations", "finite"), Evidence("with the kernels", "not finite")),
            "State and data are sound, and so are the operations as torch computes them.",
            (way_out,),
        )
    )


def _of_norm(scene: Scene) -> Cause | None:
    """Every gradient is finite, and their norm is not: they are too large for its sum of squares."""
    if not math.isfinite(scene.replayed.loss) or math.isfinite(scene.replayed.grad_norm):
        return None
    return _of_divergence(scene, None, "each gradient is finite, but the norm of all is not")


def _of_divergence(scene: Scene, culprit: Culprit | None, sign: str) -> Cause:
    incident, config = scene.bundle.incident, scene.bundle.before.config
    ring = [(step["iteration"], step["loss"]) for step in incident.ring[-6:]]
    course = ", ".join(f"{iteration}: {loss:.4g}" for iteration, loss in ring)
    ladders = for_divergence(config, incident.iteration)
    if scene.precision != "fp32" and culprit is not None:
        ladders += for_range(config, scene.precision, culprit.scopes)
    return Cause(
        DiagnoseFinding(
            DIVERGENCE,
            Severity.FAIL,
            0.9,
            f"The training ran away: {sign}",
            (
                Evidence("loss by iteration", course),
                Evidence("learning rate", f"{incident.lr:.4g}"),
                *(evidence_of(culprit, scene.tokens) if culprit is not None else ()),
            ),
            "The weights moved too far in each step until numbers left their range; where it showed first is not the "
            "cause.",
        ),
        ladders,
    )


def _of_range(scene: Scene, culprit: Culprit) -> Cause:
    incident, config = scene.bundle.incident, scene.bundle.before.config
    ladders = for_range(config, scene.precision, culprit.scopes)
    after = for_divergence(config, incident.iteration)
    half, name = scene.precision.upper(), culprit.module or "the model itself"
    if culprit.record.phase == "backward" and incident.loss_scale > 1:
        finding = DiagnoseFinding(
            LOSS_SCALE,
            Severity.FAIL,
            0.9,
            f"Gradients of {name} do not fit {half} at a loss scale of {incident.loss_scale:g}",
            evidence_of(culprit, scene.tokens),
            "The forward pass is finite; its gradients, times the loss scale, leave the range of the format.",
        )
        return Cause(finding, [fixed_scales(incident.loss_scale), *ladders, *after])
    finding = DiagnoseFinding(
        RANGE,
        Severity.FAIL,
        0.95,
        f"{half} {culprit.verdict.kind} in {name}: {culprit.record.op}",
        evidence_of(culprit, scene.tokens),
        f"The numbers are sound, but not all of them fit {half}: the same operation is finite in FP32.",
    )
    samples = for_samples(config, suspects_of(culprit, scene.tokens))
    return Cause(finding, [*ladders, fixed_scales(incident.loss_scale), *samples, *after])


def _of_code(scene: Scene, culprit: Culprit) -> Cause:
    config = scene.bundle.before.config
    # The autograd node names the operation of the forward pass, which is the one in the code.
    names = (culprit.record.node.lower(), culprit.record.op.lower())
    advice = next((text for name in names for part, text in _ADVICE.items() if part in name), None)
    outcome = "leaves the range of FP32" if culprit.verdict.is_range else "is not finite in any number format"
    own = f"change the code at {where_of(culprit.record.place)}: {advice or 'keep its inputs where it is defined'}"
    return Cause(
        DiagnoseFinding(
            CODE,
            Severity.FAIL,
            0.9 if culprit.verdict.kind == "code" else 0.6,
            f"{culprit.record.op} in {culprit.module or 'the model itself'} {outcome}",
            evidence_of(culprit, scene.tokens),
            "Its inputs are finite, and it is not defined for them, or grows beyond every range: a defect of the code, "
            "or a case that was forgotten.",
            (Remedy({}, own),),
        ),
        for_samples(config, suspects_of(culprit, scene.tokens)),
    )
