"""Running a recorded incident again: is it the same, which operation breaks first, why, and what cures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bevctl.diagnose.bundle import Bundle, find_bundle, moment_of, open_bundle, sound_incident
from bevctl.diagnose.cause import STATE, TRANSIENT, Cause, Scene, cause_of, hidden_finding
from bevctl.diagnose.checkpoint_scan import scan_checkpoints
from bevctl.diagnose.hardware import hardware_evidence
from bevctl.diagnose.headroom import headroom
from bevctl.diagnose.likeness import likeness
from bevctl.diagnose.rehearsal import Result, rehearse
from bevctl.diagnose.report import (
    DiagnoseFinding,
    DiagnoseRequest,
    Diagnosis,
    Remedy,
    Status,
    Table,
    status_of,
)
from bevctl.diagnose.trials import Trials, gets_through
from bevctl.engine.checkpoint import newest_checkpoints, read_checkpoint
from bevctl.engine.determinism import algorithms
from bevctl.engine.incident import STATE as STATE_FILE
from bevctl.finding import Evidence, Severity
from bevctl.numerics.ranges import ModuleRange, RangeCounter
from bevctl.numerics.record import Culprit
from bevctl.numerics.trace import Trace
from bevctl.ops.backend import forced

REPEATS = 3
"""Replays of a step before it is called one that does not come again."""
TRIALS_S = 300.0
"""No remedy is started after so many seconds of trying."""


def diagnose_replay(request: DiagnoseRequest) -> Diagnosis:
    """Replays an incident of the run.

    Raises:
        BevctlError: there is none, its bundle is damaged, or the device cannot run it.
    """
    assert request.run is not None
    folder, others = find_bundle(request.run)
    incident = sound_incident(folder)
    with algorithms(incident.deterministic):
        for rank in sorted(range(incident.world), key=lambda rank: rank != incident.rank):
            bundle = open_bundle(folder, request.device, rank)
            looked_at = [_what(bundle, len(others)), *bundle.notes]
            request.say(f"Running iteration {incident.iteration}{_of_rank(bundle)} again on {bundle.before.device}")
            replays = list(_replays(bundle))
            if not replays[-1].is_finite:
                looked_at.append(_likeness(bundle, replays[0]))
                return _explained(bundle, replays[-1], looked_at, request.say)
    return _transient(bundle, replays, looked_at)


def _of_rank(bundle: Bundle) -> str:
    size = bundle.incident.world
    return f" of rank {bundle.rank} of {size}, without the gradients of the others," if size > 1 else ""


def _likeness(bundle: Bundle, replayed: Result) -> str:
    if bundle.rank != bundle.incident.rank:
        return f"It is rank {bundle.rank} whose step is not finite; ranks share gradients, so that the log cannot tell."
    return likeness(bundle.incident, replayed).sentence()


def _what(bundle: Bundle, count: int) -> str:
    incident = bundle.incident
    others = f"; the first of {count} incidents since the run was last continued" if count > 1 else ""
    return f"{bundle.folder}: {incident.message}{others}"


def _replays(bundle: Bundle) -> Iterator[Result]:
    """The step, until it is not finite; at most REPEATS times."""
    for _ in range(REPEATS):
        result = rehearse(bundle.before).run(bundle.batches)
        yield result
        if not result.is_finite:
            return


def _explained(bundle: Bundle, replayed: Result, looked_at: list[str], say: Callable[[str], None]) -> Diagnosis:
    say("Looking for the first operation that was not finite")
    traced = trace_step(bundle)
    state = scan_checkpoints([bundle.folder / STATE_FILE], traced.precision == "fp16", say)
    kernels_only = traced.culprit is None and _is_finite_in_torch(bundle)
    cause = cause_of(Scene(bundle, traced.precision, traced.culprit, state, replayed, kernels_only))
    if cause is None:
        looked_at.append("No single operation explains it: the replay under instruments was finite throughout.")
        return Diagnosis(Status.INCONCLUSIVE, (), looked_at, (), _facts(bundle))
    say("Trying remedies")
    finding, told = _with_remedies(bundle, cause, say)
    looked_at += told
    hidden = hidden_finding(traced.culprit) if traced.culprit is not None else None
    findings = [finding, *([hidden] if hidden else [])]
    tables = _next_to_break(bundle, traced, finding) if traced.precision == "fp16" else []
    return Diagnosis(status_of(findings), findings, looked_at, tables, _facts(bundle))


@dataclass(frozen=True)
class Traced:
    """A step's forward and backward passes, watched."""

    precision: str
    culprit: Culprit | None
    ranges: list[ModuleRange]


def trace_step(bundle: Bundle, changes: Mapping[str, Any] | None = None) -> Traced:
    """Runs the incident's step under instruments, with config values changed.

    A second time where the first leaves open whether half precision lost a number long before a backward pass broke.
    """
    traced = _trace(bundle, changes, ())
    if traced.culprit is not None and traced.culprit.lineage:
        traced = _trace(bundle, changes, traced.culprit.lineage)
    return traced


def _trace(bundle: Bundle, changes: Mapping[str, Any] | None, keep: Sequence[int]) -> Traced:
    rehearsal, counter = rehearse(bundle.before, changes), RangeCounter()
    with Trace(rehearsal.state.model, counter, keep) as trace:
        rehearsal.step.gradients(bundle.batches)
    return Traced(rehearsal.precision.name, trace.first_bad(), counter.ranges())


def _is_finite_in_torch(bundle: Bundle) -> bool:
    with forced("torch"):
        return rehearse(bundle.before).run(bundle.batches).is_finite


def _next_to_break(bundle: Bundle, traced: Traced, finding: DiagnoseFinding) -> list[Table]:
    """What comes closest to FP16's limit: with the first cure that stays in FP16, else before the break."""
    cures = (remedy.set for remedy in finding.fix if remedy.verified and "precision.dtype" not in remedy.set)
    cure = next((settings for settings in cures if any(key.startswith("precision.") for key in settings)), None)
    if cure is None:
        return [headroom(traced.ranges, "Largest finite FP16 results of the step (limit 65504)")]
    ranges = trace_step(bundle, cure).ranges
    return [headroom(ranges, "Next to break, with the first remedy: largest FP16 results (limit 65504)")]


def _way_back(bundle: Bundle, say: Callable[[str], None]) -> Remedy:
    """The last clean checkpoint, and whether the run gets on from it."""
    before = bundle.before
    half = before.setting.precision == "fp16"
    clean = scan_checkpoints(newest_checkpoints(bundle.work_dir)[::-1], half, say).last_clean
    if clean is None:
        return Remedy({}, f"no clean checkpoint is left in {bundle.work_dir}: start anew")
    moment = moment_of(before.config, read_checkpoint(clean), before.world, before.device)
    command = f"bevctl train --work-dir {bundle.work_dir} --resume {clean.name}"
    return Remedy({}, f"go back to the last clean checkpoint: {command}", gets_through(bundle, moment))


def _with_remedies(bundle: Bundle, cause: Cause, say: Callable[[str], None]) -> tuple[DiagnoseFinding, list[str]]:
    """The cause's finding with what was tried, cures first; and on what it was tried."""
    tried, told = _tried(bundle, cause, say)
    order = {True: 0, None: 1, False: 2}
    tried = sorted(tried, key=lambda remedy: order[remedy.verified])
    return dataclasses.replace(cause.finding, fix=(*tried, *cause.finding.fix)), told


def _tried(bundle: Bundle, cause: Cause, say: Callable[[str], None]) -> tuple[list[Remedy], list[str]]:
    if cause.finding.id == STATE:
        return [_way_back(bundle, say)], []
    trials = Trials(bundle, TRIALS_S, say)
    remedies = [remedy for ladder in cause.ladders for remedy in trials.attempt_until_cured(ladder)]
    return remedies, [trials.sentence()] if remedies else []


def _transient(bundle: Bundle, replays: Sequence[Result], looked_at: list[str]) -> Diagnosis:
    """The recorded step was not finite, and its replays are."""
    incident, here = bundle.incident, _device_name(bundle)
    hardware, accused = hardware_evidence(bundle.before.config)
    ranks = f" for each of {incident.world} ranks" if incident.world > 1 else ""
    evidence = [
        Evidence("recorded", incident.message),
        Evidence("replayed", f"{len(replays)} times{ranks}, finite each time; last loss {replays[-1].loss:.6g}"),
    ]
    if not bundle.recorded_batches:
        evidence.append(Evidence("data", "read again for the replay, not kept in the bundle"))
    if incident.device != here:
        evidence.append(Evidence("device", f"recorded on {incident.device}, replayed on {here}"))
    sure = incident.device == here and bundle.recorded_batches
    finding = DiagnoseFinding(
        TRANSIENT,
        Severity.WARN,
        0.95 if accused else 0.8 if sure else 0.5,
        f"Iteration {incident.iteration} is finite when it is run again: it was a transient fault",
        (*evidence, *hardware),
        "The same state and the same data give finite numbers, so neither they nor the code are to blame: a fault of "
        "the hardware (memory, GPU, disk), or of what is not reproducible on it.",
        (
            Remedy({}, "continue with --resume auto: the step was skipped, the weights are clean"),
            Remedy({}, "if it comes again on this machine, have its memory and GPUs tested"),
        ),
    )
    return Diagnosis(Status.FOUND, [finding], looked_at, (), _facts(bundle))


def _device_name(bundle: Bundle) -> str:
    device = bundle.before.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _facts(bundle: Bundle) -> dict[str, object]:
    return {"incident": bundle.folder, "iteration": bundle.incident.iteration, "class": bundle.incident.kind}
