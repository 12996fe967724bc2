"""What a run says of its precision and its PyTorch, wherever its kind of log says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bevctl.monitor.history import History
from bevctl.runs.records import RunLog


@dataclass(frozen=True)
class PrecisionFacts:
    """Half precision and its loss scale; None for what the log does not tell."""

    fp16: bool | None
    dtype: str | None
    """fp16, bf16 or fp32; of another project's log fp16 or nothing."""
    loss_scale: float | None
    skipped_steps: int | None
    scale_drops: int | None
    """How often the logged scale went down."""


def last_segment(log: RunLog) -> Mapping[str, Any]:
    """The last start or resume in run.json of a run that bevctl trained or launched; empty for another log."""
    segments = (log.header.get("launched") or log.header.get("meta") or {}).get("segments")
    last = segments[-1] if isinstance(segments, list) and segments else {}
    return last if isinstance(last, Mapping) else {}


def fp16_of(log: RunLog) -> bool | None:
    """Whether the run trains in FP16."""
    own = last_segment(log).get("precision")
    if isinstance(own, str):
        return own == "fp16"
    if (log.header.get("meta") or {}).get("fp16"):
        return True
    told = (log.header.get("precision") or {}).get("fp16")
    if told is None and "loss_scale" in log.metrics:
        return True
    return told if isinstance(told, bool) else None


def half_of(log: RunLog) -> bool | None:
    """Whether the run trains in half precision, FP16 or BF16."""
    return True if last_segment(log).get("precision") == "bf16" else fp16_of(log)


def fixed_scale(log: RunLog) -> float | None:
    """The loss scale, where it is fixed."""
    own = last_segment(log).get("loss_scale")
    scale = own if own is not None else (log.header.get("precision") or {}).get("loss_scale")
    return float(scale) if isinstance(scale, int | float) and not isinstance(scale, bool) else None


def against_fragments(log: RunLog) -> str:
    """What makes PyTorch's allocator use memory that lies in pieces, for the run's version; ours has it on already."""
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if log.format == "bevctl":
        return (
            f"{setting}, which a run of bevctl has by itself unless that variable was set when it started: unset it, "
            "or add expandable_segments:True to it"
        )
    version = re.match(r"(\d+)\.(\d+)", str((log.header.get("env") or {}).get("PyTorch", "")))
    if version is not None and (int(version[1]), int(version[2])) < (2, 1):
        return f"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 in the environment (PyTorch {version[0]})"
    return f"{setting} in the environment (PyTorch 2.1 and newer)"


def precision_facts(log: RunLog, history: History) -> PrecisionFacts:
    """Precision, scale and skips as far as the log has them."""
    _, scale = history.finite("loss_scale")
    _, skipped = history.finite("skipped_steps")
    told = [event for event in log.events if event.kind == "skipped_step"]
    counted = int(skipped[-1]) if len(skipped) else sum(event.data.get("count", 1) for event in told)
    fp16 = fp16_of(log)
    own = last_segment(log).get("precision")
    return PrecisionFacts(
        fp16,
        dtype=own if isinstance(own, str) else "fp16" if fp16 else None,
        loss_scale=float(scale[-1]) if len(scale) else None if fp16 is False else _told_scale(log),
        skipped_steps=counted if len(skipped) or told else None,
        scale_drops=int((np.diff(scale) < 0).sum()) if len(scale) else None,
    )


def _told_scale(log: RunLog) -> float | None:
    """The scale of the last message about it, of the checkpoint that a run went on from, or of its config."""
    told = [event.data["loss_scale"] for event in log.events if isinstance(event.data.get("loss_scale"), int | float)]
    if told:
        return float(told[-1])
    kept = (log.header.get("meta") or {}).get("fp16")
    scaler = kept.get("loss_scaler") if isinstance(kept, Mapping) else None
    scale = scaler.get("scale") if isinstance(scaler, Mapping) else None
    return float(scale) if isinstance(scale, int | float) else fixed_scale(log)
