"""What a run tells and keeps while it trains: records, console lines, checkpoints, evaluation, the best epoch."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bevctl.console import Console, Progress, strict_json
from bevctl.engine.checkpoint_writer import CheckpointWriter
from bevctl.engine.dist import World, on_main
from bevctl.engine.incident_keeper import IncidentKeeper, Witness
from bevctl.engine.nonfinite import Nonfinite
from bevctl.engine.precision import MatmulCounter, Precision, precision_sentence
from bevctl.engine.recorder import RingEntry, StepOutcome
from bevctl.engine.resume import TrainState, snapshot
from bevctl.engine.shelf import Shelf
from bevctl.engine.tensorboard import EventFiles
from bevctl.errors import BevctlError
from bevctl.files import atomic_write_text
from bevctl.runs.records import EventRecord
from bevctl.runs.writer import RunWriter

Evaluate = Callable[[], tuple[dict[str, float], dict[str, Any]]]
"""Metrics by name, and the document to keep; every rank calls it."""


@dataclass(frozen=True)
class Cadence:
    """When something is kept beside every epoch's checkpoint."""

    eval_interval: int
    best: str
    """Metric of the best checkpoint; empty: NDS, else mIoU."""
    max_iters: int | None


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that is on the disk."""

    path: Path
    iteration: int
    epoch: int
    seconds: float


@dataclass
class RunJournal:
    """The journal of one process; only rank 0 has a `writer` and speaks of what all ranks share."""

    console: Console
    world: World
    writer: RunWriter | None
    shelf: Shelf
    state: TrainState
    precision: Precision
    iters_per_epoch: int
    cadence: Cadence
    meta: Mapping[str, Any]
    evaluate: Evaluate
    keeper: IncidentKeeper
    event_files: EventFiles | None = None
    last_checkpoint: Path | None = None
    _bar: tuple[contextlib.ExitStack, Progress] | None = field(default=None, init=False)
    _checkpoints: CheckpointWriter[_Saved] = field(default_factory=CheckpointWriter, init=False)

    def event(self, kind: str, message: str, **data: Any) -> None:
        """Notes something that happened once, in the files and on the console."""
        if self.writer is not None:
            self.writer.event(EventRecord(kind, message, time.time(), data=data))
            self.console.info(message)

    def step(self, outcome: StepOutcome) -> None:
        if self.writer is None:
            return
        if self._checkpoints.has_written:
            self._tell_saved()
        record = outcome.record if self.state.half else replace(outcome.record, loss_scale=None)
        inner = (record.iter - 1) % self.iters_per_epoch + 1
        line = self.writer.step(record, inner, self.iters_per_epoch)
        if line is not None:
            self.console.info(line.replace("\t", "  "))
            if self.event_files is not None:
                self.event_files.step(record)
        self._advance_bar(record.epoch, inner)

    def wants_incident(self, found: Nonfinite) -> bool:
        """Whether such a step gets a bundle; every rank must ask."""
        return self.keeper.wants(found)

    def nonfinite(self, outcome: StepOutcome, found: Nonfinite, ring: Sequence[RingEntry] | None) -> None:
        """Tells of a step that was not finite: an event, and a line that is a warning unless it is benign.

        With `ring` a bundle of the step is kept too; everything must be as before the step then. Every rank must call.
        """
        seen = Witness.of(self.world, outcome)
        message = seen.sentence(outcome, found, self.state.half)
        incident = None
        if ring is not None:
            try:
                incident = self.keeper.keep(outcome, found, seen, ring, message)
            except BevctlError as error:
                self.warning("incident_failed", f"An incident could not be kept: {error.message}")
        if self.writer is None:
            return
        if incident is not None:
            message += f". Kept in {incident} for `bevctl diagnose nan --replay`"
        data = {
            "class": found.kind,
            "phase": found.phase,
            "losses": list(found.losses),
            "task": found.task,
            "parts": list(found.parts),
            "tokens": seen.tokens[seen.rank],
            "loss_scale": outcome.record.loss_scale if self.state.half else None,
            "incident": None if incident is None else str(incident.relative_to(self.writer.work_dir)),
        }
        record = outcome.record
        self.writer.event(EventRecord("nonfinite", message, time.time(), record.iter, record.epoch, data))
        (self.console.detail if found.benign else self.console.warn)(message)

    def warning(self, kind: str, message: str) -> None:
        """Notes something that a user should look at."""
        if self.writer is not None:
            self.writer.event(EventRecord(kind, message, time.time()))
            self.console.warn(message)

    def _advance_bar(self, epoch: int, inner: int) -> None:
        """One bar an epoch, on a terminal; elsewhere the text lines show how far the run is."""
        if not self.console.is_terminal:
            return
        if self._bar is None:
            stack = contextlib.ExitStack()
            left = self.iters_per_epoch - inner + 1
            self._bar = stack, stack.enter_context(self.console.progress(left, f"epoch {epoch}"))
        self._bar[1].advance()
        if inner == self.iters_per_epoch:
            self.close_bar()

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar[0].close()
            self._bar = None

    def measured(self, counter: MatmulCounter) -> None:
        scale = self.state.scaler.value.item()
        share = counter.share(self.precision.dtype)
        self.event("precision", precision_sentence(self.precision, counter, scale), share=share, loss_scale=scale)

    def problems(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self.console.warn(sentence)
            if self.writer is not None:
                self.writer.event(EventRecord("bad_sample", sentence, time.time()))

    def save(self, iteration: int, skipped_steps: int) -> None:
        """Keeps epoch_N.pth at the end of an epoch, else iter_N.pth; at the end of --max-iters both.

        A thread writes it while training goes on. Every rank must call this, and `finish_saving` in the end.

        Raises:
            BevctlError: the checkpoint before could not be written (exit code 4).
        """
        self.finish_saving()
        content = snapshot(self.state, self.world, iteration, skipped_steps, self.meta)
        if self.world.is_main:
            self._checkpoints.start(content, lambda copy: self._write(copy, iteration))

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, and tells of it; every rank must call it.

        Raises:
            BevctlError: it could not be written (exit code 4).
        """
        on_main(self.world, self._tell_saved)

    def abandon_saving(self) -> None:
        """`finish_saving` of one rank alone for a run that has failed: a failure to write is a warning then."""
        try:
            self._tell_saved()
        except BevctlError as error:
            self.warning("checkpoint_failed", error.message)

    def _write(self, content: Mapping[str, Any], iteration: int) -> _Saved:
        epoch, inner = divmod(iteration, self.iters_per_epoch)
        by_iteration = f"iter_{iteration}.pth"
        name = by_iteration if inner or not epoch else f"epoch_{epoch}.pth"
        started = time.monotonic()
        path = self.shelf.put(name, content)
        if iteration == self.cadence.max_iters and name != by_iteration:
            self.shelf.duplicate(name, by_iteration)
        return _Saved(path, iteration, epoch, time.monotonic() - started)

    def _tell_saved(self) -> None:
        saved = self._checkpoints.wait()
        if saved is None:
            return
        self.last_checkpoint = saved.path
        if self.writer is not None:
            self.writer.update(checkpoints=self.shelf.written, iter=saved.iteration, epoch=saved.epoch)
        message = f"Saved {saved.path} in {saved.seconds:.1f} s"
        self.event("checkpoint", message, iteration=saved.iteration, epoch=saved.epoch)

    def checkpoint_before(self, iteration: int) -> Path | None:
        """The newest checkpoint of this run from before an attempted step (1-based); every rank must call it."""
        self.finish_saving()
        return on_main(self.world, lambda: self._newest_before(iteration))

    def _newest_before(self, iteration: int) -> Path | None:
        for name in reversed(self.shelf.written):
            kind, number = name.removesuffix(".pth").split("_")
            done = int(number) * (self.iters_per_epoch if kind == "epoch" else 1)
            if done < iteration:
                return self.shelf.work_dir / name
        return None

    def epoch_done(self, epoch: int) -> None:
        """Evaluates when it is due, and marks the best checkpoint."""
        if not self.cadence.eval_interval or epoch % self.cadence.eval_interval:
            return
        metrics, document = self.evaluate()
        on_main(self.world, lambda: self._keep_evaluation(epoch, metrics, document))

    def _keep_evaluation(self, epoch: int, metrics: dict[str, float], document: dict[str, Any]) -> None:
        if self.writer is None:
            return
        path = self.writer.work_dir / "eval" / f"epoch_{epoch}.json"
        atomic_write_text(path, json.dumps(strict_json({**document, "epoch": epoch}), indent=2) + "\n")
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.event(
            "evaluation", f"Epoch {epoch} evaluated: {shown or 'nothing to score'}", metrics=metrics, epoch=epoch
        )
        if self.event_files is not None:
            self.event_files.evaluation(metrics, epoch * self.iters_per_epoch)
        self._mark_best(epoch, metrics)

    def _mark_best(self, epoch: int, metrics: Mapping[str, float]) -> None:
        assert self.writer is not None
        self._tell_saved()
        name = self.cadence.best or ("NDS" if "NDS" in metrics else "mIoU")
        if name not in metrics:
            if self.cadence.best:
                self.console.warn(f"train.best is {name}, which this evaluation does not give: {', '.join(metrics)}")
            return
        best = self.writer.document.get("best")
        if best and best["metric"] == name and best["value"] >= metrics[name]:
            return
        self.shelf.duplicate(f"epoch_{epoch}.pth", "best.pth")
        self.writer.update(best={"metric": name, "value": metrics[name], "epoch": epoch})
        self.event("best", f"Best {name} so far, {metrics[name]:.4f}, kept as best.pth", epoch=epoch)
