"""Incidents: what a run keeps of a step that was not finite, so that exactly that step can be run again.

A bundle is a folder `incident/<iteration>/` in the work_dir:

- `incident.json`: an `Incident`
- `config.yaml`: the resolved config of the run
- `state.pth`: a checkpoint of the moment before the step (weights, optimizer, scaler, random states of every rank),
  which `bevctl.engine.resume.restore` takes; its entry `ring` has the random states of the steps before on rank 0. Only
  the weight average, which takes no part in a step, is that of the moment after
- `batch_<rank>.pth`: the batches of the step, of each rank, where they are small enough; elsewhere epoch, inner and the
  seed of the config make them again from the data set

It appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bevctl
from bevctl.batch import AnyBatch, Batch, Calibration
from bevctl.engine.unpickle import read_pickle
from bevctl.errors import BevctlError
from bevctl.runs.readers.bevctl_jsonl import restored

SCHEMA = "bevctl.incident/1"
FOLDER = "incident"
DOCUMENT, CONFIG, STATE = "incident.json", "config.yaml", "state.pth"


@dataclass(frozen=True)
class Incident:
    """A step that was not finite, and the steps before it."""

    iteration: int
    """Attempted steps of the run, this one included, as in the log."""
    epoch: int
    """1-based."""
    inner: int
    """0-based index of the step in its epoch."""
    kind: str
    """What it was, see `bevctl.engine.nonfinite`; `class` in the JSON document."""
    phase: str
    """forward: a loss is not finite; backward: only gradients are not."""
    message: str
    bad_losses: list[str]
    """Losses that are not finite on some rank."""
    task: str | None
    """The one task they, or the gradients, belong to."""
    tokens: list[list[str]]
    """Samples of the step, by rank."""
    rank: int
    """First rank with a loss that is not finite; 0 where only gradients are not, which ranks share."""
    world: int
    losses: dict[str, float]
    """Of that rank."""
    loss_scale: float
    lr: float
    grad_norm: float
    grad_norms: dict[str, float]
    """By part of the model."""
    precision: str
    accumulate: int
    device: str
    deterministic: bool
    versions: dict[str, str]
    time: float
    """Unix time of the step, s."""
    ring: list[dict[str, Any]] = field(default_factory=list)
    """The last steps up to this one, oldest first: iteration, epoch, inner, tokens, losses, loss, grad_norm,
    grad_norms, loss_scale, lr, skipped."""
    version: str = bevctl.__version__


def find_incidents(work_dir: Path) -> list[Path]:
    """The bundles of a run, by iteration."""
    found = [path.parent for path in (work_dir / FOLDER).glob(f"*/{DOCUMENT}") if path.parent.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def read_incident(folder: Path) -> Incident:
    """The document of a bundle.

    Raises:
        BevctlError: it is missing, damaged or of another format.
    """
    path = folder / DOCUMENT
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BevctlError(f"Cannot read {path}: {error}.", "Give a folder below incident/ of a run.") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BevctlError(f"{path} is not an incident of format {SCHEMA}.", "Give a folder below incident/ of a run.")
    values = _restored({"kind" if name == "class" else name: value for name, value in document.items()})
    known = {item.name for item in dataclasses.fields(Incident)}
    try:
        return Incident(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise BevctlError(f"{path} lacks entries: {error}.", "The bundle was changed; use another.") from error


def _restored(value: Any) -> Any:
    """`value` with the numbers back that strict JSON cannot hold, at every depth."""
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in restored(value).items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def read_batches(folder: Path, rank: int = 0) -> list[Batch] | None:
    """The batches of a rank in the step, one for each accumulated; None where the bundle was made without.

    Raises:
        BevctlError: the file is damaged.
    """
    path = folder / f"batch_{rank}.pth"
    if not path.is_file():
        return None
    content = read_pickle(path)
    try:
        return [_batch(fields) for fields in content["batches"]]
    except (TypeError, KeyError) as error:
        raise BevctlError(f"{path} holds no batches: {error}.", "The bundle was changed; use another.") from error


def _batch(fields: Mapping[str, Any]) -> Batch:
    return Batch(**{**fields, "calibration": Calibration(**fields["calibration"])})


def plain_batch(batch: AnyBatch) -> dict[str, Any] | None:
    """What `read_batches` makes the batch of again, in types that the weights-only reader takes.

    None for a batch that only another project's code can read.
    """
    if not isinstance(batch, Batch):
        return None
    fields = dict(vars(batch))
    return {**fields, "calibration": dict(vars(batch.calibration))}
