"""Settings to choose from: precision, batch and checkpointing, each with its memory and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bevctl.config.rules import PARTS
from bevctl.config.schema import Config
from bevctl.measure.memory import Predictor

MARGIN = 0.1
"""Share of a card that a plan leaves free: the prediction's error, and fragments."""
_BATCHES = (1, 2, 4, 8)
_HALF, _FULL = "fp16", "fp32"


@dataclass(frozen=True)
class Plan:
    """One setting on one GPU."""

    name: str
    precision: str
    batch: int
    checkpointing: tuple[str, ...]
    allocated: int
    device: int
    """Bytes that nvidia-smi would show."""
    lr: float
    """By the square-root rule from the config's own batch and learning rate."""
    risk: str

    def settings(self) -> dict[str, Any]:
        """The plan as a config for `train --set`."""
        return {
            "model": {"checkpointing": list(self.checkpointing)},
            "train": {"batch": self.batch},
            "optim": {"lr": self.lr},
            "precision": {"dtype": self.precision},
        }

    def document(self) -> Mapping[str, Any]:
        """As in the JSON of `bevctl memory`; time needs a measurement."""
        return {
            "name": self.name,
            "precision": self.precision,
            "batch": self.batch,
            "checkpointing": list(self.checkpointing),
            "allocated_bytes": self.allocated,
            "device_bytes": self.device,
            "s_per_iter": None,
            "total_s": None,
            "lr": self.lr,
            "risk": self.risk,
        }


def plans(config: Config, predictor: Predictor) -> list[Plan]:
    """Every plan: FP16 and FP32, with and without checkpointing, by batch."""
    return [_plan(config, predictor, *setting) for setting in _settings()]


def _settings() -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for precision in (_HALF, _FULL):
        for checkpointing in ((), PARTS):
            for batch in _BATCHES:
                yield precision, batch, checkpointing


def _plan(config: Config, predictor: Predictor, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Plan:
    need = predictor.need(precision, batch, checkpointing)
    name = precision + (f"_batch{batch}" if batch > 1 else "") + ("_checkpoint" if checkpointing else "")
    lr = float(f"{config.optim.lr * math.sqrt(batch / config.train.batch):.3g}")
    risk = "; ".join(_risks(config, precision, batch, checkpointing))
    return Plan(name, precision, batch, checkpointing, need.allocated, need.device, lr, risk)


def _risks(config: Config, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Iterator[str]:
    if precision == _HALF:
        yield "loss scale can overflow"
    if batch > config.train.batch:
        yield "larger step: warm up longer, check accuracy"
    if checkpointing:
        yield "slower: a second forward pass"


def best_fit(candidates: list[Plan], card: int) -> Plan | None:
    """The plan to prefer on a card of `card` bytes: half precision, no checkpointing, the largest batch, in this order.

    None where nothing fits with `MARGIN` to spare.
    """
    fitting = [plan for plan in candidates if plan.device <= card * (1 - MARGIN)]
    return max(fitting, key=lambda p: (p.precision == _HALF, not p.checkpointing, p.batch), default=None)
