"""Which remedies are worth a try for which cause, the narrowest change first."""

from __future__ import annotations

from collections.abc import Sequence

from bevctl.config.schema import Config
from bevctl.diagnose.trials import Idea

_SCALES = (1024.0, 512.0, 128.0)
_RATES = (0.75, 0.5, 0.1, 0.01)
_NORMS = (35.0, 10.0, 1.0)
_WARMUP = 1000

Ladder = Sequence[Idea]
"""Ideas of one kind, the mildest first: the first that cures is enough."""


def for_range(config: Config, precision: str, scopes: Sequence[str]) -> list[Ladder]:
    """An operation leaves the range of a half-precision format.

    Args:
        precision: fp16 or bf16, as the run resolved it.
        scopes: the module of the operation and what it lies in, innermost first.
    """
    ladders: list[Ladder] = [_in_fp32(config, precision, scopes)]
    if precision == "fp16":
        ladders.append([Idea({"precision.dtype": "bf16"}, "BF16, which has FP32's range and needs no loss scale")])
    ladders.append([Idea({"precision.dtype": "fp32"}, "FP32 everywhere")])
    return ladders


def for_divergence(config: Config, iteration: int) -> list[Ladder]:
    """The weights run away: the steps before the incident's, which is number `iteration`, must be taken otherwise."""
    optim = config.optim
    if iteration < 2:
        return []
    rates = [
        Idea(_rate(config, factor), f"{factor:g} times the learning rate, {optim.lr * factor:.3g}", from_earlier=True)
        for factor in _RATES
    ]
    norms = [
        Idea({"optim.clip": norm}, f"gradients clipped to a norm of {norm:g}", from_earlier=True)
        for norm in _NORMS
        if optim.clip is None or norm < optim.clip
    ]
    longer = max(_WARMUP, 2 * optim.warmup)
    warmup = [Idea({"optim.warmup": longer}, f"a warm-up of {longer} iterations", from_earlier=True)]
    return [rates, norms, warmup if iteration <= longer else []]


def for_samples(config: Config, tokens: Sequence[str]) -> list[Ladder]:
    """One sample of the step is to blame; `tokens`: the most suspect first."""
    skipped = config.data.skip_samples
    return [[Idea({"data.skip_samples": [*skipped, token]}, f"without sample {token}") for token in tokens]]


def _in_fp32(config: Config, precision: str, scopes: Sequence[str]) -> Ladder:
    present = config.precision.fp32_modules
    return [
        Idea({"precision.fp32_modules": [*present, scope]}, f"{scope} in FP32, the rest in {precision.upper()}")
        for scope in scopes
    ]


def fixed_scales(loss_scale: float) -> Ladder:
    """Fixed loss scales below the one that the step was made with."""
    return [
        Idea({"precision.loss_scale": scale}, f"a fixed loss scale of {scale:g}")
        for scale in _SCALES
        if scale < loss_scale
    ]


def _rate(config: Config, factor: float) -> dict[str, object]:
    """The settings that give `factor` times the run's learning rate, with its scaling rule or without."""
    optim = config.optim
    if optim.lr_scaling != "none" and optim.base_lr is not None:
        return {"optim.base_lr": optim.base_lr * factor}
    return {"optim.lr": optim.lr * factor}
