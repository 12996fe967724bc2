"""One training run from its config to its exit code: hands its parts to the Trainer and keeps run.json."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import bevctl
from bevctl.config.load import to_dict, to_yaml
from bevctl.config.schema import Config
from bevctl.console import Console
from bevctl.data.split import open_split
from bevctl.engine.acceleration import accelerate
from bevctl.engine.checkpoint import FORMAT, Checkpoint, load_state, read_checkpoint
from bevctl.engine.class_order import check_class_order
from bevctl.engine.data_parallel import data_parallel
from bevctl.engine.determinism import algorithms
from bevctl.engine.dist import World, broadcast_buffers, on_main, process_group, select_device
from bevctl.engine.ending import fit, note_end
from bevctl.engine.guard import NonfiniteGuard, Policy
from bevctl.engine.incident_keeper import IncidentKeeper, IncidentShelf
from bevctl.engine.journal import Cadence, RunJournal
from bevctl.engine.nonfinite import Classifier
from bevctl.engine.parts import Parts, build_parts, device_name
from bevctl.engine.recorder import Recorder
from bevctl.engine.resume import Resumed, random_state_kept, restore
from bevctl.engine.shelf import Shelf
from bevctl.engine.signals import StopRequest
from bevctl.engine.step import TrainStep
from bevctl.engine.tensorboard import EventFiles, summary_writer
from bevctl.engine.trainer import Plan, Trainer
from bevctl.engine.workdir import find_checkpoint, read_resume, work_dir_of
from bevctl.errors import ExitCode
from bevctl.evaluate.job import evaluate_split
from bevctl.files import atomic_write_text
from bevctl.runs.heartbeat import Heartbeat
from bevctl.runs.work_dir import check_unused, claimed
from bevctl.runs.writer import RunWriter, read_run

MIN_RESUMED, MIN_LOADED = 0.9, 0.5
"""Least share of a model's entries that a resumed file has, and of a file's entries that a new run takes."""


@dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its config."""

    resume: str | None = None
    """Checkpoint to continue from, by path or name, or "auto"."""
    min_loaded: float | None = None
    """Share of entries, of the model when resuming and of the file when only weights are taken, that must fit."""
    max_iters: int | None = None
    """Iteration to stop at; the schedule does not know of it."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    code: ExitCode
    work_dir: Path
    iteration: int
    checkpoint: Path | None


Settle = Callable[[Config, World, torch.device], Config]
"""Gives a config its final numbers on a device, the same on every rank."""


def train(
    config: Config, options: RunOptions, world: World, console: Console, settle: Settle | None = None
) -> RunResult:
    """Trains as `config` says; every rank calls it.

    Args:
        settle: called when the ranks are connected and the run may start.

    Raises:
        BevctlError: see `Trainer.fit`; also anything wrong with data, checkpoint, device or work_dir.
    """
    device = select_device(config.device, world)
    work_dir = work_dir_of(config)
    with StopRequest() as stop, process_group(world, device), algorithms(config.train.deterministic):
        on_main(world, lambda: _check_start(config, work_dir, options))
        checkpoint = read_resume(options.resume, work_dir, console.info if world.is_main else console.detail)
        parts = build_parts(settle(config, world, device) if settle is not None else config, world, device)
        resumed = _start_state(parts, checkpoint, options.min_loaded)
        with contextlib.ExitStack() as held:
            on_main(world, lambda: held.enter_context(claimed(work_dir)))
            return _train(parts, options, work_dir, resumed, console, stop)


def _check_start(config: Config, work_dir: Path, options: RunOptions) -> None:
    check_unused(work_dir, options.resume)
    if config.train.tensorboard:
        summary_writer()


def _start_state(parts: Parts, checkpoint: Checkpoint | None, min_loaded: float | None) -> Resumed:
    """Continues `checkpoint`; or starts afresh, from the image backbone's weights and then those of model.load_from."""
    if checkpoint is not None:
        check_class_order(checkpoint, parts.config)
        least, every_part = (MIN_RESUMED, True) if min_loaded is None else (min_loaded, False)
        return restore(parts.state, checkpoint, parts.world, least, every_part)
    camera = parts.config.model.camera
    sources = [Path(camera.pretrained)] if camera is not None and camera.pretrained else []
    sources += [find_checkpoint(name, work_dir_of(parts.config)) for name in parts.config.model.load_from]
    notes = []
    for source in sources:
        weights = read_checkpoint(source)
        check_class_order(weights, parts.config)
        report = load_state(parts.state.model, weights)
        report.require(share_of_file=MIN_LOADED if min_loaded is None else min_loaded)
        notes += [f"Weights from {source}, training starts at iteration 0", *report.sentences()]
    if sources and parts.state.average is not None:
        parts.state.average.load_state_dict(parts.state.model.state_dict())
    return Resumed(notes=notes)


def _train(
    parts: Parts, options: RunOptions, work_dir: Path, resumed: Resumed, console: Console, stop: StopRequest
) -> RunResult:
    config, world = parts.config, parts.world
    iters_per_epoch = parts.state.setting.iters_per_epoch
    total = parts.schedule.total
    plan = Plan(
        iters_per_epoch=iters_per_epoch,
        stop_at=total if options.max_iters is None else min(options.max_iters, total),
        accumulate=config.train.accumulate,
        checkpoint_interval=config.train.checkpoint_interval,
        max_bad_samples=config.data.max_bad_samples,
    )
    started = on_main(world, time.time)
    with (
        _open_journal(parts, options, work_dir, resumed, started, console, stop) as journal,
        Heartbeat(work_dir, world.rank, started, functools.partial(journal.warning, "heartbeat")) as heartbeat,
    ):
        for kind, notes in (("start", parts.notes), ("resume", resumed.notes)):
            for note in notes:
                journal.event(kind, note)
        accelerate(parts.state.model, config, world, parts.device, functools.partial(journal.event, "compile"))
        if options.resume is not None and resumed.iteration >= plan.stop_at:
            done = f"Nothing left to train: iteration {resumed.iteration} of {plan.stop_at} is done"
            note_end(journal, done, "finished", resumed.iteration)
            return RunResult(ExitCode.OK, work_dir, resumed.iteration, None)
        network = data_parallel(parts.state.model, world, parts.device, config.train)
        trainer = Trainer(
            step=TrainStep(parts.state, network, parts.schedule, parts.precision, clip=config.optim.clip, world=world),
            plan=plan,
            world=world,
            loader_for=parts.loader,
            recorder=Recorder(world, parts.device, _global_batch(parts), plan.stop_at, resumed.skipped_steps),
            classifier=Classifier.of(parts.state, fresh=not resumed.exact),
            guard=NonfiniteGuard(Policy.of(config.train), parts.state.scaler.dynamic),
            journal=journal,
            heartbeat=heartbeat,
            stop=stop,
            iteration=resumed.iteration,
        )
        code = fit(trainer, journal)
        return RunResult(code, work_dir, trainer.iteration, journal.last_checkpoint)


@contextlib.contextmanager
def _open_journal(
    parts: Parts,
    options: RunOptions,
    work_dir: Path,
    resumed: Resumed,
    started: float,
    console: Console,
    stop: StopRequest,
) -> Iterator[RunJournal]:
    config = parts.config
    meta = {
        "format": FORMAT,
        "version": bevctl.__version__,
        "config": to_dict(config),
        "time": time.time(),
        **parts.dataset.checkpoint_meta,
    }
    with (
        _open_writer(parts, options, work_dir, resumed, started) as writer,
        _open_event_files(parts, work_dir, resumed) as event_files,
    ):
        yield RunJournal(
            console=console,
            world=parts.world,
            writer=writer,
            shelf=Shelf(work_dir, config.train.keep, list(read_run(work_dir)["checkpoints"])),
            state=parts.state,
            precision=parts.precision,
            iters_per_epoch=parts.state.setting.iters_per_epoch,
            cadence=Cadence(config.train.eval_interval, config.train.best, options.max_iters),
            last_checkpoint=resumed.source,
            meta=meta,
            evaluate=lambda: _evaluate(parts, console, stop),
            keeper=_keeper(parts, work_dir, meta),
            event_files=event_files,
        )


def _keeper(parts: Parts, work_dir: Path, meta: Mapping[str, Any]) -> IncidentKeeper:
    train = parts.config.train
    shelf = IncidentShelf(work_dir, parts.world, train.incidents, train.incident_gb, to_yaml(parts.config))
    return IncidentKeeper(shelf, parts.world, parts.state, parts.precision, meta)


def _global_batch(parts: Parts) -> int:
    setting = parts.state.setting
    return setting.batch * setting.world * setting.accumulate


@contextlib.contextmanager
def _open_writer(
    parts: Parts, options: RunOptions, work_dir: Path, resumed: Resumed, started: float
) -> Iterator[RunWriter | None]:
    """The writer of rank 0, with this start noted as a segment; None on other ranks."""
    if not parts.world.is_main:
        yield None
        return
    writer = RunWriter(work_dir, parts.config.train.log_interval)
    try:
        atomic_write_text(work_dir / "config.yaml", to_yaml(parts.config))
        writer.update(
            name=parts.config.name,
            status="running",
            pid=os.getpid(),
            host=socket.gethostname(),
            iters_per_epoch=parts.state.setting.iters_per_epoch,
            total_iters=parts.schedule.total,
            segments=[*writer.document["segments"], _segment(parts, options, resumed, started)],
        )
        yield writer
    finally:
        writer.close()


@contextlib.contextmanager
def _open_event_files(parts: Parts, work_dir: Path, resumed: Resumed) -> Iterator[EventFiles | None]:
    """TensorBoard's files of rank 0 where the config asks for them, else None."""
    if not parts.world.is_main or not parts.config.train.tensorboard:
        yield None
        return
    with contextlib.closing(EventFiles(work_dir, resumed.iteration)) as event_files:
        yield event_files


def _load_from(config: Config) -> str | None:
    return ", ".join(config.model.load_from) or None


def _segment(parts: Parts, options: RunOptions, resumed: Resumed, started: float) -> dict[str, Any]:
    return {
        "started": started,
        "iter": resumed.iteration,
        "resume": options.resume,
        "load_from": _load_from(parts.config) if options.resume is None else None,
        "exact": resumed.exact,
        **asdict(parts.state.setting),
        "loss_scale": parts.config.precision.loss_scale if parts.precision.is_half else None,
        "lr": parts.state.optimizer.param_groups[0]["peak_lr"],
        "device": device_name(parts.device),
        "versions": {
            "bevctl": bevctl.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


def _evaluate(parts: Parts, console: Console, stop: StopRequest) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores the (averaged) weights on the evaluation split; every rank takes its share.

    Raises:
        Interrupted: a signal came; on every rank, or on none.
    """
    broadcast_buffers(parts.world, parts.state.model)
    dataset = open_split(parts.config, "val")
    averaged = parts.state.average.applied() if parts.state.average else contextlib.nullcontext()
    with averaged, random_state_kept():
        evaluation = evaluate_split(
            parts.state.model,
            dataset,
            parts.device,
            parts.precision,
            parts.world,
            console,
            interruptible=stop.interruptible,
        )
    return evaluation.metrics(), evaluation.document()
