"""What a run of another project is asked for, and the values of its config that this changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_keys import KEYS, to_set
from bevctl.config.foreign_values import lookup, plain
from bevctl.errors import BevctlError
from bevctl.external.precision import precision_changes
from bevctl.external.trees import Tree

Changes = dict[str, Any]
"""Values of the config by dotted key; a mapping with `_delete_: True` replaces what is there."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; None: as the config has it."""

    gpus: int = 1
    precision: str | None = None
    """fp16, bf16 or fp32."""
    loss_scale: float | str | None = None
    """A fixed number, or "dynamic"."""
    batch: int | None = None
    """Samples a GPU."""
    workers: int | None = None
    epochs: int | None = None
    accumulate: int | None = None
    lr: float | None = None
    lr_scaling: str | None = None
    """none, linear or sqrt."""
    warmup: int | None = None
    clip: float | None = None
    seed: int | None = None
    deterministic: bool = False
    load_from: str | None = None
    overrides: tuple[tuple[str, Any], ...] = field(default=())
    """Values by the config's own dotted keys, which rank above everything else; later ones win."""


def changes_of(config: ForeignConfig, tree: Tree, wanted: Wanted) -> tuple[Changes, list[str]]:
    """The values to change, and what to say about them.

    Raises:
        BevctlError: this kind of config, or this one, has no way to what is asked for.
    """
    _check_numbers(wanted)
    changes = dict(precision_changes(config, tree, wanted.precision, wanted.loss_scale))
    notes: list[str] = []
    for key, value in (*_sizes(config, wanted), *_rate(config, tree, wanted, notes)):
        if config.get(key) != value:
            changes[key] = value
    if wanted.epochs is not None and config.kind == "mmengine" and config.get("param_scheduler"):
        notes.append("param_scheduler keeps its own lengths: --epochs does not stretch it")
    return changes, notes


def _check_numbers(wanted: Wanted) -> None:
    least: dict[str, tuple[float | None, float]] = {
        "--batch": (wanted.batch, 1),
        "--workers": (wanted.workers, 0),
        "--epochs": (wanted.epochs, 1),
        "--accumulate": (wanted.accumulate, 1),
        "--warmup": (wanted.warmup, 0),
        "--grad-clip": (wanted.clip, 0),
        "--lr": (wanted.lr, 0),
    }
    for option, (value, bound) in least.items():
        if value is not None and not (math.isfinite(value) and value >= bound):
            raise BevctlError(f"{option} {value:g} is below {bound:g}.", f"Give at least {bound:g}.")


def _sizes(config: ForeignConfig, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    keys = KEYS[config.kind]
    asked = {
        "--batch": (keys.batch, wanted.batch),
        "--workers": (keys.workers or ("workers",), wanted.workers),
        "--epochs": (keys.epochs, wanted.epochs),
        "--grad-clip": (keys.clip, wanted.clip),
        "--warmup": (keys.warmup, wanted.warmup),
        "--accumulate": (keys.accumulate if config.kind == "mmengine" else (), wanted.accumulate),
        "--seed": (_SEEDS.get(config.kind, ()), wanted.seed),
        "--deterministic": (_DETERMINISTIC.get(config.kind, ()), wanted.deterministic or None),
        "--load-from": (keys.load_from or ("load_from",), wanted.load_from),
    }
    for option, (places, value) in asked.items():
        if value is None:
            continue
        if not places:
            raise BevctlError(
                f"{option} has no place in a config of kind {config.kind}.", "Change its config with --set KEY=VALUE."
            )
        if option == "--epochs" and any(config.get(key) is not None for key in _COUNTS_ITERATIONS):
            raise BevctlError("--epochs: the config counts iterations, not epochs.", "Set its max_iters with --set.")
        if option == "--warmup" and config.get(places[0]) is None:
            raise BevctlError("--warmup: the config has no warm-up.", f"Set {places[0]} and its kind with --set.")
        yield from ((key, value) for key in to_set(config, places))
    if wanted.workers == 0 and config.kind == "mmengine":
        yield "train_dataloader.persistent_workers", False


_COUNTS_ITERATIONS = ("runner.max_iters", "train_cfg.max_iters")
_SEEDS = {"torchpack": ("seed",), "mmcv": ("seed",), "mmengine": ("randomness.seed",)}
_DETERMINISTIC = {
    "torchpack": ("deterministic",),
    "mmcv": ("deterministic",),
    "mmengine": ("randomness.deterministic",),
}


def base_batch(config: ForeignConfig, tree: Tree) -> int | None:
    """The global batch that the config's learning rate was made for: named in it or in its file's name, else that of
    the project's recipes, its samples a GPU on `TreeKind.gpus` GPUs.
    """
    named = foreign_facts.base_batch(config) or foreign_facts.base_batch_of_name(config.path)
    batch = foreign_facts.batch_per_gpu(config)
    return named or (None if batch is None else batch * tree.kind.gpus)


def global_batch(config: ForeignConfig, wanted: Wanted) -> int | None:
    """Samples of an optimizer step over all GPUs."""
    batch = wanted.batch or foreign_facts.batch_per_gpu(config)
    return None if batch is None else batch * wanted.gpus * (wanted.accumulate or 1)


def _rate(config: ForeignConfig, tree: Tree, wanted: Wanted, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """The learning rate, and what of the schedule is written as a rate and not as a share of it."""
    given = foreign_facts.learning_rate(config)
    rate = wanted.lr if wanted.lr is not None else _by_rule(config, tree, wanted, given, notes)
    if rate is None:
        return
    yield from ((key, rate) for key in to_set(config, KEYS[config.kind].lr))
    if not given:
        return
    least = config.get("lr_config.min_lr")
    if isinstance(least, int | float) and least:
        yield "lr_config.min_lr", least * rate / given
    steps = lookup(config.values, "param_scheduler")
    if isinstance(steps, list) and any(_ends_at_a_rate(step) for step in steps):
        yield "param_scheduler", _scaled(steps, rate / given)


def _ends_at_a_rate(step: Any) -> bool:
    """Whether one of mmengine's schedulers has a final rate (`eta_min`), which is absolute."""
    return isinstance(step, dict) and bool(step.get("eta_min")) and "Momentum" not in str(step.get("type"))


def _scaled(steps: list[Any], factor: float) -> list[Any]:
    """Schedulers with every final rate times `factor`."""
    try:
        copies = plain(steps)
    except ValueError as error:
        raise BevctlError(
            f"The config's param_scheduler cannot be worked out: {error}.", "Write it out, or leave the rate as it is."
        ) from None
    return [step | {"eta_min": step["eta_min"] * factor} if _ends_at_a_rate(step) else step for step in copies]


def _by_rule(config: ForeignConfig, tree: Tree, wanted: Wanted, given: float | None, notes: list[str]) -> float | None:
    base, now = base_batch(config, tree), global_batch(config, wanted)
    rule = wanted.lr_scaling or "none"
    if given is None or base is None or now is None:
        if rule != "none":
            raise BevctlError(
                f"--lr-scaling {rule}: the config's learning rate or batch cannot be worked out.", "Give --lr instead."
            )
        return None
    ratio = now / base
    rates = {"linear": given * ratio, "sqrt": given * math.sqrt(ratio)}
    if rule != "none":
        notes.append(f"lr {rates[rule]:.4g}: {given:g} at batch {base}, {rule} rule to batch {now}")
        return float(f"{rates[rule]:.6g}")
    if ratio != 1:
        notes.append(
            f"lr stays {given:g}, made for a global batch of {base}; this run has {now}: --lr-scaling linear gives "
            f"{rates['linear']:.3g}, sqrt {rates['sqrt']:.3g}"
        )
    return None
