"""What a run leaves behind, as data: a StepRecord an iteration, a Beat a rank, EventRecords, and a RunLog of all.

All are read and written without torch. Field names are the metric names that logs, `expect:` and JSON share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bevctl.runs.statistics import Metric


@dataclass(slots=True)
class StepRecord:
    """One training iteration (an attempted optimizer step) or, from a foreign log, the mean over a window of them."""

    epoch: int
    """1-based epoch the iteration belongs to."""
    iter: int
    """Attempted optimizer steps since the start of the run, this one included (1-based)."""
    time: float | None = None
    """Unix time at the end of the iteration, s."""
    mode: str = "train"
    lr: float | None = None
    loss: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    """`loss/<task>/<name>` and `stats/<task>/<name>`; a foreign log's parts of the loss under their own names."""
    grad_norm: float | None = None
    """L2 norm before clipping, loss scale removed."""
    loss_scale: float | None = None
    skipped_steps: int | None = None
    """Steps skipped so far in this run because a gradient was not finite."""
    iter_time_s: float | None = None
    data_time_s: float | None = None
    memory_gib: float | None = None
    """Peak allocated GPU memory."""
    samples_per_s: float | None = None
    eta_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What else a foreign log says, under its own names; `device_memory_gib` and `gpu_util` where it tells them."""


@dataclass
class EventRecord:
    """Something that happened once: start, resume, rewind, checkpoint, evaluation, bad sample, signal, end.

    A step that was skipped is `nonfinite` (data: class, phase, losses, task, parts, tokens, loss_scale, incident), and
    `skipped_step` in logs of others; what followed is `lower_scale`, `fp32_module` or `rewind`.

    Logs of others also give `failure` (see `bevctl.runs.readers.events`), `checkpoint_mismatch`, `warning` and
    `clock_change`.
    """

    kind: str
    message: str
    time: float | None
    """Unix time, s; None where a log does not say."""
    iter: int | None = None
    epoch: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    """File and line it was read from; empty for a record just made."""


@dataclass
class ValidationRecord:
    """Scores of one evaluation: names as in the log, and mAP, NDS and mIoU (0..1) under those names."""

    epoch: int
    iter: int | None
    """Attempted optimizer steps before it."""
    time: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Segment:
    """A stretch of a log without interruption: from a start or a resume to the next."""

    reason: str
    """`start` or `resume`."""
    first_iter: int
    last_iter: int
    first_time: float | None
    last_time: float | None


class Doing(str, Enum):
    """What a rank is at."""

    STARTS = "starts"
    DATA = "waits for data"
    GRADIENTS = "computes gradients"
    DEVICE = "waits for the device"
    """For the outcome of a step that it has launched: on a GPU, collectives wait here for the other ranks."""
    UPDATE = "updates the weights"
    SAVES = "saves a checkpoint"
    EVALUATES = "evaluates"
    LEFT = "left the training"

    def __str__(self) -> str:
        return self.value

    @property
    def plural(self) -> str:
        """What several ranks do."""
        verb, *rest = self.value.split(" ")
        return " ".join([verb.removesuffix("s"), *rest])


@dataclass(frozen=True)
class Beat:
    """A rank's last word: what it is at."""

    rank: int
    host: str
    pid: int
    started: float
    """Unix time of the start that it belongs to, the same on every rank and in the last segment of run.json."""
    turn: int
    """How often it has turned to something else since the start. The ranks of a run take the same turns: whoever has
    taken fewer is behind."""
    iteration: int
    """The one at hand (1-based); the last one that is done where it saves or evaluates."""
    doing: Doing
    time: float
    """Unix time, by this host's clock, since which it does so."""

    @property
    def place(self) -> str:
        """Where in the training that is."""
        if self.doing is Doing.STARTS:
            return ""
        return f"{'after' if self.doing in (Doing.SAVES, Doing.EVALUATES) else 'in'} iteration {self.iteration}"


@dataclass
class RunLog:
    """A run, or a window of it, as read from its files."""

    path: Path
    files: list[Path]
    format: str
    """A key of `bevctl.runs.readers.READERS`."""
    header: dict[str, Any] = field(default_factory=dict)
    """What the log says of itself, as far as it does: `config` (text), `env` (dict), `meta` (dict: of a checkpoint a
    run was resumed from, or run.json), `name`, `host`, `work_dir`, `precision` (see `readers.header.precision_of`),
    `launched` (dict: run.json of a run that another project's program trained for bevctl)."""
    steps: list[StepRecord] = field(default_factory=list)
    """In the order of their iterations, each once: after a resume the later wins. Of more than
    `bevctl.runs.store.KEEP` records every n-th."""
    validations: list[ValidationRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    """The last word of each rank, by rank, where the run keeps them (see `bevctl.runs.heartbeat`)."""
    records: int = 0
    """Training records in the window, `steps` thinned or not."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """By name, over all training records in the window; the parts of the loss included."""
    unknown_lines: int = 0
    """Lines of the window that no reader understands."""
    iters_per_epoch: int | None = None
    max_epochs: int | None = None
    max_iters: int | None = None
    interval: int | None = None
    """Iterations a record stands for: the median distance of two."""
    time_estimated: bool = False
    """The log has no clock times: they are counted back from the file's mtime by its own iteration times."""
    last_time: float | None = None
    """Latest clock time in the log, of a record or of any other line, Unix s."""
    modified: float | None = None
    """mtime of the newest file, Unix s."""
    last_line: str = ""
    """Last line that is not blank, for the reader's eyes."""
    notes: list[str] = field(default_factory=list)
    """What to say on stderr: an estimated clock, a damaged file, a torn last line."""
