"""Which part of a model half precision costs most: each in FP32 by itself, on samples that were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import torch
from torch import nn

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.data.loader import EpochSampler, make_loader
from bevctl.data.split import open_split
from bevctl.engine.checkpoint import Checkpoint, load_state
from bevctl.engine.precision import Precision, keep_fp32
from bevctl.errors import BevctlError
from bevctl.models.build import build_model

SAMPLES = 8
"""Held-out samples that are looked at."""
_SMALL = 1e-6
"""Losses below this are compared as if they were this large."""
_TRAINED_ONLY = ("Dropout", "DropPath", "Norm", "MultiheadAttention")
"""Parts of the names of modules that act differently in training."""


@dataclass(frozen=True)
class Deviation:
    """How far the held-out losses are from those of FP32."""

    part: str
    """What runs in FP32; "" for nothing."""
    relative: float
    """Root mean square of (loss − FP32 loss) / FP32 loss over samples and losses; infinite for a loss that is not
    finite."""


def deviations(
    config: Config,
    checkpoint: Checkpoint,
    half: Precision,
    device: torch.device,
    say: Callable[[str], None],
    samples: int = SAMPLES,
) -> list[Deviation]:
    """The deviation of the whole model in `half`, then with each part in FP32, the most helpful part first.

    Raises:
        BevctlError: the evaluation data are missing, the checkpoint does not fit, or is not finite in FP32.
    """
    batches = list(_held_out(config, samples))
    single = Precision("fp32", device.type)
    exact = _losses(_model(config, checkpoint, [], device), batches, single)
    if not all(sample and all(map(math.isfinite, sample.values())) for sample in exact):
        raise BevctlError("The losses of held-out samples are not finite in FP32.", "Ask diagnose nan first.")
    model = _model(config, checkpoint, [], device)
    whole = Deviation("", _deviation(_losses(model, batches, half), exact))
    found = []
    for part in parts_of(model):
        found.append(
            Deviation(part, _deviation(_losses(_model(config, checkpoint, [part], device), batches, half), exact))
        )
        say(f"  {part} in FP32: the losses deviate by {found[-1].relative:.2e}, {whole.relative:.2e} without")
    return [whole, *sorted(found, key=lambda deviation: deviation.relative)]


def parts_of(model: nn.Module) -> list[str]:
    """Names of the parts to try by themselves: the children, those of dicts of modules, and the stages of encoders."""
    parts: list[str] = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            parts += [
                f"{name}.{inner}" for key, part in child.items() for inner in _stages(key, part, name == "encoders")
            ]
        elif _has_weights(child):
            parts.append(name)
    return parts


def _stages(key: str, part: nn.Module, split: bool) -> list[str]:
    stages = [f"{key}.{name}" for name, child in part.named_children() if _has_weights(child)]
    return stages if split and len(stages) > 1 else [key]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _held_out(config: Config, samples: int) -> Iterable[AnyBatch]:
    dataset = open_split(config, "val")
    sampler = EpochSampler(len(dataset), 1, shuffle=False, drop_last=False)
    return islice((batch for batch in make_loader(dataset, sampler, workers=0) if batch.size), samples)


def _model(config: Config, checkpoint: Checkpoint, parts: Sequence[str], device: torch.device) -> nn.Module:
    """The model that gives losses, with dropout and statistics as in evaluation."""
    model = build_model(config)
    load_state(model, checkpoint)
    keep_fp32(model, [*config.precision.fp32_modules, *parts], device.type)
    model.to(device).train()
    for module in model.modules():
        if any(word in type(module).__name__ for word in _TRAINED_ONLY):
            module.eval()
    return model


def _losses(model: nn.Module, batches: Iterable[AnyBatch], precision: Precision) -> list[dict[str, float]]:
    """The losses of each batch."""
    device = next(model.parameters()).device
    found = []
    for batch in batches:
        with torch.no_grad(), precision.autocast():
            losses = model(batch.to(device))
        found.append({name: float(value) for name, value in losses.items() if name.startswith("loss/")})
    return found


def _deviation(losses: Sequence[dict[str, float]], exact: Sequence[dict[str, float]]) -> float:
    """Infinite where a loss is not finite."""
    pairs = [
        (sample[name], value)
        for sample, reference in zip(losses, exact, strict=True)
        for name, value in reference.items()
    ]
    if not all(math.isfinite(loss) for loss, _ in pairs):
        return math.inf
    return math.sqrt(fmean(((loss - value) / max(abs(value), _SMALL)) ** 2 for loss, value in pairs))
