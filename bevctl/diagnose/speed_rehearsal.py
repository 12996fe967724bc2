"""The config's own training step under a profiler, in half precision and in FP32, and remedies tried on it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bevctl.batch import AnyBatch
from bevctl.config.load import from_dict, load, to_dict
from bevctl.config.schema import Config
from bevctl.diagnose import speed_causes, speed_ceiling, speed_trials
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Remedy, Table
from bevctl.diagnose.subject import Subject
from bevctl.diagnose.throttling import held_back
from bevctl.engine.determinism import algorithms
from bevctl.engine.dist import World, select_device
from bevctl.engine.parts import training_loader
from bevctl.engine.precision import resolve_precision
from bevctl.engine.step import TrainStep
from bevctl.errors import BevctlError
from bevctl.measure.bench import gains_of_half
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.step_profile import StepProfile, Workload, profile_step
from bevctl.measure.timing import build_step, loss_of
from bevctl.models.build import parts_of

TRIALS_S = 120.0
"""No further remedy is tried after so many seconds."""


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What the profile and the trials came to."""

    findings: list[DiagnoseFinding]
    tables: list[Table]
    looked_at: list[str]
    gain: str
    """What half precision gives, in one sentence."""


def rehearse_speed(request: DiagnoseRequest, subject: Subject, steps: int) -> Rehearsed:
    """Profiles `steps` steps of the run's config.

    Raises:
        BevctlError: there is no config of bevctl, its data cannot be read, or the device cannot do the precision.
    """
    config = _config(request, subject)
    device = select_device(request.device)
    asked = resolve_precision(config.precision.dtype, device).name
    half = asked if asked != "fp32" else "fp16" if device.type == "cuda" else "bf16"
    batches = make_inputs(config, 1, pin=device.type == "cuda").batches
    profiles = {}
    for name in dict.fromkeys((asked, half, "fp32")):
        request.say(f"Profiling {steps} steps in {name.upper()}")
        profiles[name] = _profile(config, name, device, batches, steps, request.say)
    throttled = list(held_back(to_dict(config))) if device.type == "cuda" else []
    found = speed_causes.causes(profiles[asked], profiles["fp32"])
    limit = speed_ceiling.ceiling(profiles[half], profiles["fp32"], *gains_of_half(half, device))
    request.say("Trying remedies")
    before, tried = speed_trials.try_remedies(config, asked, device, steps, TRIALS_S, request.say)
    profile = profiles[asked]
    if (profile.data_wait or 0.0) > speed_causes.WORTH * profile.iteration:
        tried.append(speed_trials.try_workers(config, _endless, profile.seconds, profile.iteration))
    helpful = tuple(sorted((t.remedy() for t in tried if t.remedy().verified), key=lambda r: r.step_time or 1.0))
    told = speed_ceiling.verdict(found, limit)
    findings = [*(cause.finding() for cause in found), *throttled]
    findings.insert(0, dataclasses.replace(told, fix=_also(profile, helpful)))
    where = "batches of its data set" if _has_data(config) else "samples made in memory"
    said = f"{config.name}: {steps} steps in {', '.join(n.upper() for n in profiles)} on {device.type}, {where}"
    tables = [*speed_ceiling.tables(profile), speed_trials.table(before, tried)]
    return Rehearsed(findings, tables, [said], told.title)


def _also(profile: StepProfile, helpful: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """What the trials gave, and what data at hand would give."""
    if not profile.data_wait:
        return helpful
    ratio = profile.seconds / profile.iteration
    return (
        *helpful,
        Remedy({}, "batches at hand when they are needed (cached data)", ratio < speed_trials.HELPS, ratio),
    )


def _config(request: DiagnoseRequest, subject: Subject) -> Config:
    if request.config is not None:
        return load(request.config).config
    if subject.view is not None and subject.view.config is not None:
        return from_dict(subject.view.config)
    raise BevctlError("--profile needs a config of bevctl to run.", "Add --config NAME, or name a run of bevctl.")


def _has_data(config: Config) -> bool:
    return (Path(config.data.root) / config.data.info_train).is_file()


def _profile(
    config: Config,
    precision: str,
    device: torch.device,
    batches: Sequence[AnyBatch],
    steps: int,
    say: Callable[[str], None],
) -> StepProfile:
    try:
        with algorithms(config.train.deterministic):
            step = build_step(config, precision, device, say)
            return profile_step(_workload(config, step, precision, batches), steps)
    finally:
        gc.collect()  # a recorded part and its module refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _workload(config: Config, step: TrainStep, precision: str, batches: Sequence[AnyBatch]) -> Workload:
    numbers = itertools.count()

    def run() -> object:
        number = next(numbers)
        return step.run([batches[number % len(batches)]], number)

    model = step.state.model
    loader = _endless(config) if _has_data(config) else None
    return Workload(
        model=model,
        parts=parts_of(model),
        device=step.device,
        step=run,
        forward=lambda: loss_of(step, batches[0]),
        precision=precision,
        batch=config.train.batch,
        load=loader.__next__ if loader is not None else None,
    )


def _endless(config: Config) -> Iterator[Any]:
    """Batches of the run's own loader, epoch after epoch."""
    from bevctl.data.split import open_split

    dataset = open_split(config, "train")
    for epoch in itertools.count():
        yield from training_loader(config, dataset, World(), epoch, 0, pin=False)
