"""Keeping incidents: which steps that were not finite get a bundle, and writing it whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bevctl
from bevctl.batch import AnyBatch
from bevctl.console import strict_json
from bevctl.engine.checkpoint import write_checkpoint
from bevctl.engine.dist import World, gather, on_main
from bevctl.engine.incident import (
    CONFIG,
    DOCUMENT,
    FOLDER,
    SCHEMA,
    STATE,
    Incident,
    find_incidents,
    plain_batch,
    read_incident,
)
from bevctl.engine.nonfinite import KINDS, Nonfinite
from bevctl.engine.precision import Precision
from bevctl.engine.recorder import RingEntry, StepOutcome
from bevctl.engine.resume import TrainState, snapshot
from bevctl.errors import BevctlError, ExitCode
from bevctl.files import atomic_write_text, sync

_GB = 1e9


@dataclass(frozen=True)
class Witness:
    """What the ranks saw in a step that was not finite."""

    tokens: list[list[str]]
    """Samples by rank."""
    rank: int
    """First rank with a loss that is not finite; 0 where only gradients are not, which ranks share."""
    losses: dict[str, float]
    """Of that rank."""

    @staticmethod
    def of(world: World, outcome: StepOutcome) -> Witness:
        """Every rank must call it."""
        seen = gather(world, (list(outcome.facts.tokens), outcome.own_losses))
        bad = (rank for rank, (_, losses) in enumerate(seen) if not all(map(math.isfinite, losses.values())))
        rank = next(bad, 0)
        return Witness([tokens for tokens, _ in seen], rank, seen[rank][1])

    def sentence(self, outcome: StepOutcome, found: Nonfinite, scaled: bool) -> str:
        """The log line of the step: what it was, where, with which samples and, where there is one, loss scale."""
        scale = f"loss scale {outcome.record.loss_scale:.10g}; " if scaled else ""
        samples = ", ".join(self.tokens[self.rank]) or "unknown"
        several = f" of rank {self.rank}" if len(self.tokens) > 1 else ""
        return (
            f"Iteration {outcome.record.iter} skipped ({found.kind.replace('_', ' ')}): {found.where}; "
            f"{scale}samples{several} {samples}"
        )


@dataclass(frozen=True)
class IncidentKeeper:
    """Makes bundles of the steps of one run; every rank has one and calls the same."""

    shelf: IncidentShelf
    world: World
    state: TrainState
    precision: Precision
    meta: Mapping[str, Any]
    """Of checkpoints."""

    def wants(self, found: Nonfinite) -> bool:
        """Whether such a step gets a bundle: it is news, and there is a place."""
        return found.news and not found.benign and self.shelf.admits(found.kind)

    def keep(
        self, outcome: StepOutcome, found: Nonfinite, seen: Witness, ring: Sequence[RingEntry], message: str
    ) -> Path:
        """Writes the bundle of a step and returns its folder; weights, moments and statistics must be from before it.

        Raises:
            BevctlError: it is too large, or the disk refuses.
        """
        state = self._state_before(outcome, ring)
        return self.shelf.put(self._incident(outcome, found, seen, ring, message), state, outcome.facts.batches)

    def _state_before(self, outcome: StepOutcome, ring: Sequence[RingEntry]) -> dict[str, Any]:
        record = outcome.record
        skipped = (record.skipped_steps or 1) - 1
        state = snapshot(self.state, self.world, record.iter - 1, skipped, self.meta, outcome.facts.random.plain())
        if state["scaler"] is not None:
            scale = {"scale": record.loss_scale, "_growth_tracker": outcome.growth_tracker}
            state["scaler"] = {**state["scaler"], **scale}
        state["ring"] = [{"iteration": e.outcome.record.iter, "rng": e.outcome.facts.random.plain()} for e in ring]
        return state

    def _incident(
        self, outcome: StepOutcome, found: Nonfinite, seen: Witness, ring: Sequence[RingEntry], message: str
    ) -> Incident:
        record, device = outcome.record, self.state.scaler.value.device
        return Incident(
            iteration=record.iter,
            epoch=record.epoch,
            inner=outcome.facts.inner,
            kind=found.kind,
            phase=found.phase,
            message=message,
            bad_losses=list(found.losses),
            task=found.task,
            tokens=seen.tokens,
            rank=seen.rank,
            world=self.world.size,
            losses=seen.losses,
            loss_scale=record.loss_scale or 1.0,
            lr=record.lr or 0.0,
            grad_norm=math.nan if record.grad_norm is None else record.grad_norm,
            grad_norms=outcome.grad_norms,
            precision=self.precision.name,
            accumulate=self.state.setting.accumulate,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            versions={
                "bevctl": bevctl.__version__,
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda or "",
            },
            time=time.time() if record.time is None else record.time,
            ring=[_ring_record(entry) for entry in ring],
        )


def _ring_record(entry: RingEntry) -> dict[str, Any]:
    record = entry.outcome.record
    return {
        "iteration": record.iter,
        "epoch": record.epoch,
        "inner": entry.outcome.facts.inner,
        "tokens": list(entry.tokens),
        "loss": record.loss,
        "losses": record.losses,
        "grad_norm": record.grad_norm,
        "grad_norms": entry.outcome.grad_norms,
        "loss_scale": record.loss_scale,
        "lr": record.lr,
        "skipped": entry.outcome.skipped,
    }


@dataclass(frozen=True)
class IncidentShelf:
    """The bundles of one run: so many, and so many bytes in all. Every rank has one and calls the same."""

    work_dir: Path
    world: World
    limit: int
    """Bundles at most."""
    gigabytes: float
    """10^9 bytes of all bundles together at most."""
    config: str
    """Text of config.yaml."""

    def admits(self, kind: str) -> bool:
        """Whether a bundle of this kind has a place; a graver kind takes that of the newest of a less grave one."""
        return on_main(self.world, lambda: self._has_room() or (self.limit > 0 and bool(self._weaker(kind))))

    def _has_room(self) -> bool:
        return len(find_incidents(self.work_dir)) < self.limit

    def put(self, incident: Incident, state: Mapping[str, Any], batches: Sequence[AnyBatch]) -> Path:
        """Writes a bundle that `admits` has a place for; returns its folder.

        Args:
            state: content of a checkpoint before the step.
            batches: of this rank; left out where only they are too large.

        Raises:
            BevctlError: the state is larger than what is left of the size limit, or the disk refuses; nothing is left
                behind.
        """
        fields = [plain_batch(batch) for batch in batches]
        sizes = gather(self.world, _byte_size(fields))
        temporary, with_batches, weaker = on_main(
            self.world, lambda: self._prepare(incident.kind, _byte_size(state), sum(sizes))
        )
        try:
            if with_batches and None not in fields and temporary.is_dir():
                write_checkpoint(temporary / f"batch_{self.world.rank}.pth", {"batches": fields})
            failed = None
        except BevctlError as error:
            failed = error
        failures = [error for error in gather(self.world, failed) if error is not None]
        target = on_main(self.world, lambda: self._finish(temporary, incident, state, failures))
        if weaker is not None and self.world.is_main:
            shutil.rmtree(weaker, ignore_errors=True)
        return target

    def _prepare(self, kind: str, state_bytes: int, batch_bytes: int) -> tuple[Path, bool, Path | None]:
        """A folder to write into, whether the batches fit, and the bundle whose place this one takes."""
        weaker = None if self._has_room() else self._weaker(kind)[-1]
        others = (path for path in find_incidents(self.work_dir) if path != weaker)
        left = self.gigabytes * _GB - sum(_folder_bytes(path) for path in others)
        if state_bytes > left:
            raise BevctlError(
                f"A bundle takes {state_bytes / _GB:.2g} GB, and {max(left, 0.0) / _GB:.2g} GB are left of "
                f"train.incident_gb = {self.gigabytes:g}.",
                "Raise train.incident_gb, or delete bundles.",
            )
        folder = self.work_dir / FOLDER
        for abandoned in folder.glob(".*.tmp"):
            shutil.rmtree(abandoned, ignore_errors=True)
        temporary = folder / f".{secrets.token_hex(4)}.tmp"
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise _refused(temporary, error) from error
        return temporary, state_bytes + batch_bytes <= left, weaker

    def _weaker(self, kind: str) -> list[Path]:
        """Bundles of a less grave kind; the newest of the least grave last."""
        kept = [(_gravity_of(path), path) for path in find_incidents(self.work_dir)]
        weaker = [(gravity, path) for gravity, path in kept if gravity < KINDS.index(kind)]
        return [path for _, path in sorted(weaker, key=lambda pair: (-pair[0], int(pair[1].name)))]

    def _finish(
        self, temporary: Path, incident: Incident, state: Mapping[str, Any], failures: Iterable[BevctlError]
    ) -> Path:
        target = self.work_dir / FOLDER / str(incident.iteration)
        try:
            for failure in failures:
                raise failure
            write_checkpoint(temporary / STATE, state)
            atomic_write_text(temporary / CONFIG, self.config)
            document = {"schema": SCHEMA, **vars(incident)}
            document = {"class" if name == "kind" else name: value for name, value in document.items()}
            atomic_write_text(temporary / DOCUMENT, json.dumps(strict_json(document), indent=2) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            sync(target.parent)
        except OSError as error:
            raise _refused(target, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target


def _refused(path: Path, error: OSError) -> BevctlError:
    return BevctlError(f"Cannot write {path}: {error.strerror or error}.", "Free some space.", ExitCode.RUN_FAILED)


def _gravity_of(folder: Path) -> int:
    """Rank of a bundle's kind; the lowest for one that cannot be read."""
    try:
        return KINDS.index(read_incident(folder).kind)
    except (BevctlError, ValueError):
        return -1


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _byte_size(value: Any) -> int:
    """Bytes of the tensors inside nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(_byte_size(item) for item in items)
