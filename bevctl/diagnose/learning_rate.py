"""Whether a run's learning rate fits its batch: by the linear rule, from the batch that the rate was made for."""

from __future__ import annotations

from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.diagnose.setting import Setting
from bevctl.finding import Evidence, Severity

UNSCALED = "LR002"
TOO_HIGH = 1.5
"""Factor over the linear rule from which a learning rate is called made for another batch."""


def linear_rate(setting: Setting) -> float | None:
    """The learning rate that the linear rule gives for the run's batch; None where batch or reference is not known."""
    if setting.reference is None or setting.global_batch is None:
        return None
    _, batch, rate = setting.reference
    return rate * setting.global_batch / batch


def unscaled(setting: Setting, in_trouble: bool) -> DiagnoseFinding | None:
    """The finding for a learning rate that was made for a larger batch; information only where nothing is wrong.

    Args:
        in_trouble: gradients or losses show that steps are too large.
    """
    linear = linear_rate(setting)
    if linear is None or setting.lr is None or setting.reference is None or setting.lr < TOO_HIGH * linear:
        return None
    who, batch, rate = setting.reference
    factor = setting.lr / linear
    return DiagnoseFinding(
        UNSCALED,
        Severity.WARN if in_trouble else Severity.INFO,
        min(0.35 + 0.1 * factor, 0.7) if in_trouble else 0.3,
        f"The learning rate {setting.lr:.3g} was made for a batch of {batch}; this run has {setting.global_batch}",
        (
            Evidence(setting.where or "log", f"{_batch(setting)}, learning rate {setting.lr:.3g}"),
            Evidence(who, f"{rate:.3g} for a batch of {batch}; linear for {setting.global_batch}: {linear:.3g}"),
        ),
        f"Each step is {factor:.3g} times as large as the linear rule allows. A rate that is too small costs accuracy, "
        "so go no lower than the rule without need.",
        _remedies(setting, linear, batch),
    )


def _batch(setting: Setting) -> str:
    parts = [f"{setting.batch} samples a GPU", f"{setting.gpus} GPUs"]
    return " x ".join(parts + ([f"{setting.accumulate} batches a step"] if setting.accumulate > 1 else []))


def _remedies(setting: Setting, linear: float, batch: int) -> tuple[Remedy, ...]:
    more = max(round(batch / (setting.global_batch or 1)), 1) * setting.accumulate
    own = setting.own
    return (
        Remedy(
            {"optim.lr": float(f"{linear:.3g}"), "optim.lr_scaling": "none"} if own else {},
            f"a learning rate of {linear:.3g}",
        ),
        Remedy({"train.accumulate": more} if own else {}, f"{more} batches for one optimizer step, at the same rate"),
    )
