"""Switching mixed precision on and off by each kind of config's own means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_values import Section, Unresolved, lookup, plain
from bevctl.errors import BevctlError
from bevctl.external.trees import Tree

HALF_HOOKS = {
    "OptimizerHook": "Fp16OptimizerHook",
    "GradientCumulativeOptimizerHook": "GradientCumulativeFp16OptimizerHook",
}
"""mmcv's optimizer hook in FP32 → the same in FP16."""
_ONLY_HALF = ("loss_scale", "coalesce", "bucket_size_mb", "distributed", "type")
"""Arguments that a hook in FP16 takes and one in FP32 does not."""
_ONLY_AMP = ("loss_scale", "dtype", "use_fsdp", "type")
"""Arguments that AmpOptimWrapper takes and OptimWrapper does not."""
_TORCHPACK_SCALE = {"fp16.loss_scale.growth_interval": 2000}
"""Dynamic, as mit-bevfusion's own default.yaml has it."""


def precision_changes(
    config: ForeignConfig, tree: Tree, asked: str | None, scale: float | str | None
) -> Mapping[str, Any]:
    """What to change in the config for a number format and a loss scale; nothing where it has them already.

    Raises:
        BevctlError: it cannot be worked out what the config has, or its project cannot do what is asked for.
    """
    now = foreign_facts.half_precision(config)
    if asked is None and scale is None:
        return {}
    if now.on is None:
        raise BevctlError(f"Whether FP16 is on cannot be worked out: {now}.", "Write the value out in the config.")
    wanted = asked or (now.dtype if now.on else "fp32")
    if wanted == "fp32" and scale is not None:
        raise BevctlError("A loss scale belongs to FP16, which is off.", "Add --fp16, or leave --loss-scale out.")
    if wanted == "bf16" and config.kind != "mmengine":
        raise BevctlError(f"{tree.kind.title} has no BF16.", "Use --fp16 or --fp32.")
    if wanted == "bf16" and scale is not None:
        raise BevctlError("BF16 needs no loss scale.", "Leave --loss-scale out.")
    has = now.dtype if now.on else "fp32"
    if wanted == has and scale in (None, now.loss_scale):
        return {}
    switch = Switch(config, tree, wanted, scale, wanted == has)
    return {"torchpack": _block, "mmcv": _hook, "mmengine": _wrapper, "openpcdet": _use_amp}[config.kind](switch)


@dataclass(frozen=True)
class Switch:
    """A number format that a config does not have as it is asked for."""

    config: ForeignConfig
    tree: Tree
    wanted: str
    scale: float | str | None
    """Loss scale; None: the usual one."""
    is_on: bool
    """The format is right, and only the loss scale is not."""


def _block(switch: Switch) -> Mapping[str, Any]:
    """mit-bevfusion: the `fp16:` block."""
    if switch.wanted == "fp32":
        return {"fp16": None}
    return _TORCHPACK_SCALE if switch.scale in (None, "dynamic") else {"fp16.loss_scale": switch.scale}


def _hook(switch: Switch) -> Mapping[str, Any]:
    """mmcv: `fp16 = dict(…)`, or an optimizer hook in FP16; whichever the config or the project uses."""
    values = switch.config.values
    hook = lookup(values, "optimizer_config.type")
    hook = hook.split(".")[-1] if isinstance(hook, str) else hook
    if switch.wanted == "fp32":
        return {"fp16": None} if lookup(values, "fp16") is not None else _hook_in_fp32(switch.config, hook)
    scale = "dynamic" if switch.scale is None else switch.scale
    if switch.is_on:
        return {"optimizer_config.loss_scale" if lookup(values, "fp16") is None else "fp16.loss_scale": scale}
    if isinstance(hook, Unresolved) or (hook is not None and hook not in HALF_HOOKS):
        raise BevctlError(
            f"optimizer_config.type is {hook}, and how it does FP16 is not known.",
            "Write the hook for FP16 into the config.",
        )
    if hook is None and not switch.tree.kind.fp16_by_hook:
        return {"fp16.loss_scale": scale}
    return {"optimizer_config.type": HALF_HOOKS[hook or "OptimizerHook"], "optimizer_config.loss_scale": scale}


def _hook_in_fp32(config: ForeignConfig, hook: str) -> Mapping[str, Any]:
    plain_hook = next(name for name, half in HALF_HOOKS.items() if half == hook)
    kept = _kept(config, "optimizer_config", _ONLY_HALF)
    kind = {} if plain_hook == "OptimizerHook" else {"type": plain_hook}
    return {"optimizer_config": {"_delete_": True, **kind, **kept}}


def _wrapper(switch: Switch) -> Mapping[str, Any]:
    """mmengine: the type of `optim_wrapper`, and its arguments."""
    if switch.is_on:
        return {"optim_wrapper.loss_scale": switch.scale}
    if switch.wanted == "fp32":
        kept = _kept(switch.config, "optim_wrapper", _ONLY_AMP)
        return {"optim_wrapper": {"_delete_": True, "type": "OptimWrapper", **kept}}
    wrapper = lookup(switch.config.values, "optim_wrapper.type")
    name = (wrapper.text if isinstance(wrapper, Unresolved) else str(wrapper or "OptimWrapper")).split(".")[-1]
    if name not in ("OptimWrapper", "AmpOptimWrapper"):
        raise BevctlError(
            f"optim_wrapper.type is {name}, and how it does {switch.wanted.upper()} is not known.",
            "Write the wrapper into the config.",
        )
    scale = "dynamic" if switch.scale is None else switch.scale
    changes = {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.loss_scale": scale}
    if switch.wanted == "bf16" or name == "AmpOptimWrapper":
        changes["optim_wrapper.dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[switch.wanted]
    return changes


def _use_amp(switch: Switch) -> Mapping[str, Any]:
    """OpenPCDet: `--use_amp`, or USE_AMP in the config."""
    if switch.scale not in (None, "dynamic"):
        raise BevctlError("OpenPCDet's loss scale is always dynamic.", "Leave --loss-scale out.")
    if switch.wanted == "fp16" and not switch.tree.script.has("--use_amp"):
        raise BevctlError(
            "This checkout of OpenPCDet has no mixed precision: its tools/train.py does not know --use_amp.",
            "Use a newer checkout, or --fp32.",
        )
    return {"OPTIMIZATION.USE_AMP": switch.wanted == "fp16"}


def _kept(config: ForeignConfig, key: str, without: tuple[str, ...]) -> dict[str, Any]:
    """What a mapping of the config holds besides some keys. Raises BevctlError where part of it is not known."""
    section = lookup(config.values, key)
    kept = (
        {name: value for name, value in section.items() if name not in without} if isinstance(section, Section) else {}
    )
    try:
        return dict(plain(kept))
    except ValueError as error:
        raise BevctlError(f"{key} cannot be worked out: {error}.", "Write it out in the config.") from None
