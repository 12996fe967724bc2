"""What makes a run smaller, in the order in which it is worth trying, and what each step saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.diagnose.memory_savings import Savings
from bevctl.diagnose.report import Remedy, Table
from bevctl.diagnose.subject import Subject

MEASURED = (
    ("fp32", 1, 5.8, 6.8),
    ("fp32", 2, 11.0, 14.1),
    ("fp32", 4, 21.1, 25.1),
    ("fp16", 1, 4.6, 5.8),
    ("fp16", 2, 8.5, 11.8),
    ("fp16", 4, 16.1, 20.6),
    ("fp16, backbone recomputed", 4, 10.5, 16.2),
    ("fp16", 8, 31.5, 45.4),
)
"""BEVFusion detection (camera and LiDAR) of mmdet3d 1.4 on an H200: precision, batch, GiB allocated, GiB reserved."""


@dataclass(frozen=True)
class Need:
    """What a run's tensors take at their peak."""

    gib: float | None
    """None where nothing tells."""
    fixed_gib: float | None = None
    """Of it, what does not depend on the batch: weights, gradients, optimizer; None where it is not known."""

    def at_batch(self, batch: int, present: int) -> float | None:
        """Peak at another batch; without the fixed part it is a lower bound."""
        if self.gib is None:
            return None
        fixed = min(self.fixed_gib or 0.0, self.gib)
        return fixed + (self.gib - fixed) * batch / present


def remedies(subject: Subject, need: Need, savings: Savings) -> Iterator[Remedy]:
    """The knobs that are left to turn, the cheapest in accuracy and time first."""
    setting = subject.setting
    if setting.precision in ("fp32", None):
        dtype = "bf16" if setting.gpu_names and setting.may_use_bf16 else "fp16"
        yield subject.remedy(f"half precision{_saves(need, savings.half)}", precision__dtype=dtype)
    if setting.checkpointing is not True and _has_camera(subject):
        saved = _saves(need, savings.checkpointed)
        told = f"activations of the image backbone recomputed, which costs about a tenth of the time{saved}"
        yield subject.remedy(told, model__checkpointing=["camera"])
    yield from _smaller_batch(subject, need, savings)


def _smaller_batch(subject: Subject, need: Need, savings: Savings) -> Iterator[Remedy]:
    setting, batch = subject.setting, subject.setting.batch
    if batch is None:
        yield Remedy({}, "fewer samples a GPU and step, added up to the old batch (accumulation)")
    elif batch > 1:
        half, after = batch // 2, need.at_batch(batch // 2, batch)
        if savings.half_batch is not None and need.gib is not None:
            after = need.gib * savings.half_batch
        bound = "" if need.fixed_gib is not None or savings.half_batch is not None else "at least "
        size = f": {bound}{after:.1f} GiB instead of {need.gib:.1f}" if after is not None else ""
        steps = setting.accumulate * round(batch / half)
        norm = "; BatchNorm then sees one sample at a time: freeze it, share it between GPUs or use GroupNorm"
        why = f"{half} instead of {batch} samples a GPU, {steps} steps added up{size}{norm if half == 1 else ''}"
        yield subject.remedy(why, train__batch=half, train__accumulate=steps)
    else:
        yield Remedy({}, "the batch is 1 already: smaller images, fewer sweeps or voxels, a frozen image branch")


def _has_camera(subject: Subject) -> bool:
    """False only where the run's own config builds no camera branch."""
    model = (subject.view.config or {}).get("model") if subject.view is not None else None
    return not isinstance(model, dict) or model.get("camera", True) is not None


def _saves(need: Need, share: float) -> str:
    return f": saves about {need.gib * (1 - share):.1f} of {need.gib:.1f} GiB" if need.gib is not None else ""


def comparison(savings: Savings) -> Table:
    """What the run's own settings are predicted to need; else what a model of this kind was measured to need."""
    if savings.predicted_gib:
        title = "Predicted for this config, GiB in tensors (see bevctl memory)"
        return Table("predicted", title, ("setting", "allocated"), list(savings.predicted_gib.items()))
    title = "For comparison: BEVFusion detection of mmdet3d 1.4, measured on an H200, GiB"
    return Table("measured", title, ("precision", "batch", "allocated", "reserved"), MEASURED)
