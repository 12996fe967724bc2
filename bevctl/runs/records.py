"""What a run leaves behind, as data: one StepRecord an iteration, one EventRecord for anything else.

Both are read and written without torch. Field names are the metric names that logs, `expect:` and JSON share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
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
    """`loss/<task>/<name>` and `stats/<task>/<name>`."""
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


@dataclass
class EventRecord:
    """Something that happened once: start, resume, checkpoint, evaluation, skipped step, bad sample, signal, end."""

    kind: str
    message: str
    time: float
    iter: int | None = None
    epoch: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
