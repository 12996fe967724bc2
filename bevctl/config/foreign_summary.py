"""What a config of another project asks for, as a list of facts and the file and line of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_keys import KEYS
from bevctl.config.layers import Origin


@dataclass(frozen=True)
class Fact:
    """One thing that is known of a config."""

    name: str
    """What it is; of a checkpoint its dotted key."""
    value: Any
    origin: Origin | None = None

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, dict):
            value = ", ".join(f"{name} {item}" for name, item in value.items())
        elif isinstance(value, tuple | list):
            value = ", ".join(value)
        return f"{self.name}: {value}{f'  ({self.origin})' if self.origin else ''}"


def summary(config: ForeignConfig) -> list[Fact]:
    """Everything that is known, in the order in which one asks for it."""
    return [fact for fact in _facts(config) if fact.value not in (None, "", {}, ())]


def _facts(config: ForeignConfig) -> Iterator[Fact]:
    keys, half = KEYS[config.kind], foreign_facts.half_precision(config)
    yield Fact("kind", config.kind)
    yield Fact("precision", half.sentence, half.origin)
    yield Fact("batch_per_gpu", foreign_facts.batch_per_gpu(config), _first(config, keys.batch))
    yield Fact("workers_per_gpu", foreign_facts.workers_per_gpu(config), _first(config, keys.workers))
    yield Fact("lr", foreign_facts.learning_rate(config), _first(config, keys.lr))
    base = foreign_facts.base_batch(config) or foreign_facts.base_batch_of_name(config.path)
    yield Fact("lr_made_for_batch", base, config.origin("auto_scale_lr.base_batch_size"))
    schedule = ("lr_config.policy", "param_scheduler", "OPTIMIZATION.OPTIMIZER")
    yield Fact("schedule", foreign_facts.schedule(config), _first(config, schedule))
    yield Fact("epochs", foreign_facts.epochs(config), _first(config, keys.epochs))
    heads = ("model.heads" if config.kind == "torchpack" else "model", "MODEL")
    yield Fact("heads", foreign_facts.heads(config), _first(config, heads))
    yield Fact("data", str(foreign_facts.data_root(config)), _first(config, keys.data_root))
    infos = {split: str(path) for split, path in foreign_facts.info_files(config).items()}
    yield Fact("info_files", infos)
    yield Fact("classes", foreign_facts.class_names(config))
    for key, (name, origin) in foreign_facts.checkpoints(config).items():
        yield Fact(key, name, origin)


def _first(config: ForeignConfig, keys: tuple[str, ...]) -> Origin | None:
    return next((config.origin(key) for key in keys if config.get(key) is not None), None)
