"""What a run would do: its length, its learning rate, the memory that is certain, and when it would end."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bevctl.engine.parts import Parts
from bevctl.runs.writer import read_run

_ADAMW_COPIES = 4
"""FP32 tensors a parameter: weight, gradient and AdamW's two averages."""


@dataclass(frozen=True)
class Preview:
    """The numbers of a dry run."""

    iters_per_epoch: int
    total_iters: int
    stop_at: int
    global_batch: int
    parameters: int
    state_bytes: int
    """Weights, gradients and optimizer state; activations come on top."""
    iter_time_s: float | None
    """Median of the iterations timed before in the same work_dir and setting; None where there are none."""

    @property
    def duration_s(self) -> float | None:
        return None if self.iter_time_s is None else self.iter_time_s * self.stop_at

    def sentences(self, memory: str = "activations come on top") -> list[str]:
        """What the user reads; `memory` goes on where the memory that is certain was told."""
        lines = [
            f"Steps: {self.stop_at} of {self.total_iters} ({self.iters_per_epoch} an epoch, "
            f"{self.global_batch} samples each)",
            f"Memory: {self.state_bytes / 2**30:.2f} GiB a GPU for {self.parameters:,} weights, their gradients and "
            f"AdamW's state; {memory}",
        ]
        if self.duration_s is None:
            return [*lines, "Finish: not known, no iteration of this setting has been timed in its work_dir yet"]
        finish = datetime.datetime.now() + datetime.timedelta(seconds=self.duration_s)
        return [*lines, f"Finish: {finish:%Y-%m-%d %H:%M} if started now ({self.iter_time_s:.2f} s a step)"]


def preview(parts: Parts, work_dir: Path, max_iters: int | None) -> Preview:
    """The dry run of finished parts; nothing is written."""
    setting, total = parts.state.setting, parts.schedule.total
    trainable = [p for p in parts.state.model.parameters() if p.requires_grad]
    return Preview(
        iters_per_epoch=setting.iters_per_epoch,
        total_iters=total,
        stop_at=total if max_iters is None else min(max_iters, total),
        global_batch=setting.batch * setting.world * setting.accumulate,
        parameters=sum(p.numel() for p in trainable),
        state_bytes=_ADAMW_COPIES * sum(p.numel() * p.element_size() for p in trainable),
        iter_time_s=_timed_before(parts, work_dir),
    )


def _timed_before(parts: Parts, work_dir: Path) -> float | None:
    segments = read_run(work_dir)["segments"]
    setting = parts.state.setting
    if not segments or any(segments[-1].get(k) != getattr(setting, k) for k in ("precision", "batch", "world")):
        return None
    try:
        lines = (work_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()[-200:]
        times = [json.loads(line)["iter_time_s"] for line in lines]
    except (OSError, ValueError, KeyError):
        return None
    return median(times) if times else None
