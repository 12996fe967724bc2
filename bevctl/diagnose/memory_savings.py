"""What each knob makes of a run's memory: predicted for a config of bevctl, else as measured on a similar model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bevctl.config.load import from_dict
from bevctl.diagnose.setting import Setting
from bevctl.errors import BevctlError

_SAMPLES = 4
"""Samples looked at for their size."""


@dataclass(frozen=True)
class Savings:
    """Peak memory with a knob turned over that before; None where it was not predicted."""

    half: float = 16.1 / 21.1
    """In FP16 instead of FP32; by default as measured on mmdet3d's BEVFusion at batch 4."""
    checkpointed: float = 10.5 / 16.1
    """With the image backbone recomputed; by default as measured there in FP16."""
    half_batch: float | None = None
    """With half as many samples."""
    predicted_gib: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What was predicted, by setting."""


def predicted_savings(document: Mapping[str, Any], setting: Setting) -> Savings:
    """For a run of bevctl, by its resolved config; the measured ones where nothing can be predicted."""
    from bevctl.measure.memory import Predictor
    from bevctl.measure.memory_inputs import sample_sizes

    batch, precision = setting.batch, setting.precision or "fp16"
    if batch is None:
        return Savings()
    try:
        config = from_dict(document)
        predictor = Predictor(config, sample_sizes(config, most=_SAMPLES).p99, setting.gpus or 1)
        present = config.model.checkpointing
        settings = {
            f"{precision}, batch {batch}, as it was": (precision, batch, present),
            f"fp16, batch {batch}": ("fp16", batch, present),
            f"{precision}, batch {batch}, camera recomputed": (precision, batch, tuple({*present, "camera"})),
            f"{precision}, batch {max(1, batch // 2)}": (precision, max(1, batch // 2), present),
        }
        needs = {name: predictor.need(*asked).allocated / 2**30 for name, asked in settings.items()}
    except BevctlError:
        return Savings()
    now, half, checkpointed, smaller = needs.values()
    return Savings(half / now, checkpointed / now, smaller / now, needs)
