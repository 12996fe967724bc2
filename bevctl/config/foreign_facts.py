"""What a config of another project asks for: precision, batch, rate and schedule, heads, data, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_keys import KEYS, numbers
from bevctl.config.foreign_values import Section, Unresolved, lookup
from bevctl.config.layers import Origin

_HOOKS = ("Fp16OptimizerHook", "GradientCumulativeFp16OptimizerHook")
_DEFAULT_SCALE: dict[str, float | str] = {"mmcv": 512.0, "torchpack": 512.0, "mmengine": "dynamic"}
"""Loss scale of the hook or wrapper that is given none."""


@dataclass(frozen=True)
class HalfPrecision:
    """Whether a config switches mixed precision on."""

    on: bool | None
    """None: the value that decides could not be worked out."""
    sentence: str
    origin: Origin | None = None
    """Where it is set."""
    loss_scale: float | str | None = None
    """"dynamic", a fixed number, or None where it is not known or not on."""
    dtype: str = "fp16"

    def __str__(self) -> str:
        return f"{self.sentence} ({self.origin})" if self.origin else self.sentence


def half_precision(config: ForeignConfig) -> HalfPrecision:
    """Whether, by what key, and in which file and line a config switches mixed precision on.

    mmcv and mit-bevfusion: the top-level `fp16`, or an optimizer hook with Fp16 in its name. mmengine: only
    `optim_wrapper.type`; a top-level `fp16` is ignored there. OpenPCDet: `OPTIMIZATION.USE_AMP` (or `--use_amp`).
    """
    if config.kind == "openpcdet":
        return _pcdet_precision(config)
    return _mmengine_precision(config) if config.kind == "mmengine" else _hook_precision(config)


def _pcdet_precision(config: ForeignConfig) -> HalfPrecision:
    origin = config.origin("OPTIMIZATION.USE_AMP")
    if config.get("OPTIMIZATION.USE_AMP"):
        return HalfPrecision(True, "FP16 is on: OPTIMIZATION.USE_AMP is set, loss scale dynamic", origin, "dynamic")
    return HalfPrecision(False, "FP16 is off: neither OPTIMIZATION.USE_AMP nor --use_amp switches it on", origin)


def _hook_precision(config: ForeignConfig) -> HalfPrecision:
    value = lookup(config.values, "fp16")
    origin = config.origin("fp16")
    if isinstance(value, Unresolved):
        return HalfPrecision(None, f"fp16 = {value}", origin)
    if value is not None and value is not False:
        scale = _scale(value.get("loss_scale") if isinstance(value, Section) else None, config.kind)
        return HalfPrecision(True, f"FP16 is on: fp16 is set, loss scale {_told(scale)}", origin, scale)
    hook = config.get("optimizer_config.type")
    if isinstance(hook, str) and hook.split(".")[-1] in _HOOKS:
        scale = _scale(config.get("optimizer_config.loss_scale"), config.kind)
        said = f"FP16 is on: optimizer_config is a {hook}, loss scale {_told(scale)}"
        return HalfPrecision(True, said, config.origin("optimizer_config.type"), scale)
    said = "FP16 is off: fp16 is null" if "fp16" in config.values else "FP16 is off: nothing sets fp16"
    return HalfPrecision(False, said, origin)


def _mmengine_precision(config: ForeignConfig) -> HalfPrecision:
    wrapper = lookup(config.values, "optim_wrapper.type")
    name = wrapper.text if isinstance(wrapper, Unresolved) else str(wrapper or "OptimWrapper")
    origin = config.origin("optim_wrapper.type")
    if name.split(".")[-1] == "AmpOptimWrapper":
        scale = _scale(config.get("optim_wrapper.loss_scale"), "mmengine")
        dtype = "bf16" if "bf" in str(config.get("optim_wrapper.dtype") or "").lower() else "fp16"
        said = f"{dtype.upper()} is on: optim_wrapper is an AmpOptimWrapper, loss scale {_told(scale)}"
        return HalfPrecision(True, said, origin, scale, dtype)
    if isinstance(wrapper, Unresolved) and wrapper.reason != "imported":
        return HalfPrecision(None, f"optim_wrapper.type = {wrapper}", origin)
    if config.get("fp16"):
        return HalfPrecision(False, "FP16 is off: mmengine ignores a top-level fp16", config.origin("fp16"))
    return HalfPrecision(False, f"FP16 is off: optim_wrapper is an {name.split('.')[-1]}", origin)


def _scale(given: Any, kind: str) -> float | str | None:
    """The loss scale that a hook makes of its setting: a mapping are arguments of GradScaler, which is dynamic."""
    if given is None:
        return _DEFAULT_SCALE[kind]
    if isinstance(given, Section):
        return "dynamic"
    return given if isinstance(given, str) else float(given) if isinstance(given, int | float) else None


def _told(scale: float | str | None) -> str:
    return "not known" if scale is None else scale if isinstance(scale, str) else f"fixed at {scale:g}"


def batch_per_gpu(config: ForeignConfig) -> int | None:
    """Samples a GPU and step."""
    return _count(config, KEYS[config.kind].batch)


def workers_per_gpu(config: ForeignConfig) -> int | None:
    """Loading processes a GPU."""
    return _count(config, KEYS[config.kind].workers)


def epochs(config: ForeignConfig) -> int | None:
    """Epochs of the run."""
    return _count(config, KEYS[config.kind].epochs)


def learning_rate(config: ForeignConfig) -> float | None:
    """Peak learning rate of the (first) optimizer."""
    return next(map(float, numbers(config, KEYS[config.kind].lr)), None)


def schedule(config: ForeignConfig) -> str:
    """The course of the learning rate in the config's own words; empty where it names none."""
    if config.kind == "openpcdet":
        return str(config.get("OPTIMIZATION.OPTIMIZER") or "")
    policy, warmup = config.get("lr_config.policy"), config.get("lr_config.warmup_iters")
    steps = lookup(config.values, "param_scheduler")
    parts = [str(policy)] if policy else []
    for step in steps if isinstance(steps, list | tuple) else [steps]:
        if isinstance(step, Section) and "Momentum" not in str(step.get("type")):
            parts.append(str(getattr(step.get("type"), "text", step.get("type"))).split(".")[-1])
    parts += [f"{config.get('lr_config.warmup') or 'no'} warm-up of {warmup} iterations"] if warmup else []
    return ", ".join(parts)


def heads(config: ForeignConfig) -> dict[str, str]:
    """Name → type of each head that the model gets; a head that is null is none."""
    upper = config.kind == "openpcdet"
    holder = lookup(config.values, {"torchpack": "model.heads", "openpcdet": "MODEL"}.get(config.kind, "model"))
    found = {}
    for name, value in holder.items() if isinstance(holder, Section) else ():
        if config.kind != "torchpack" and not name.lower().endswith("head"):
            continue
        if isinstance(value, Section):
            kind = value.get("NAME" if upper else "type")
            found[name] = str(getattr(kind, "text", kind)).split(".")[-1]
    return found


def base_batch(config: ForeignConfig) -> int | None:
    """The global batch that the learning rate belongs to, where the config names it."""
    return _count(config, ("auto_scale_lr.base_batch_size",))


def base_batch_of_name(path: Path) -> int | None:
    """The global batch in a file name of the OpenMMLab kind: "8xb4" means 8 GPUs with 4 samples each."""
    match = re.search(r"_(\d{1,3})xb(\d{1,3})(?=[-_.])", path.name)
    return int(match[1]) * int(match[2]) if match else None


def _count(config: ForeignConfig, keys: tuple[str, ...]) -> int | None:
    return next((value for value in numbers(config, keys) if isinstance(value, int)), None)


def info_files(config: ForeignConfig) -> dict[str, Path]:
    """Split (train, val) → its info file, where the config names one.

    mmengine looks for it below the dataset's `data_root`; mmcv takes it as it stands. OpenPCDet's have a layout of
    their own, below DATA_PATH and the version's folder: none of them is given here.
    """
    found: dict[str, Path] = {}
    for split in ("train", "val"):
        modern = config.kind == "mmengine"
        section = f"{split}_dataloader.dataset" if modern else f"data.{split}"
        for dataset in _datasets(config, section):
            folder = str(dataset.get("data_root") or "") if modern else ""
            found[split] = Path(folder, str(dataset["ann_file"]))
    return found


def _datasets(config: ForeignConfig, section: str) -> Iterator[Section]:
    """The dataset of a section and those inside its wrappers, if they name an info file."""
    holder = lookup(config.values, section)
    while isinstance(holder, Section):
        if isinstance(holder.get("ann_file"), str):
            yield holder
        holder = holder.get("dataset")


def data_root(config: ForeignConfig) -> Path:
    """Folder of the data set; the working directory where the config names none."""
    for section in ("train_dataloader.dataset", "data.train"):
        for value in config.find("data_root", section):
            return Path(str(value))
        for value in config.find("dataset_root", section):
            return Path(str(value))
    return next((Path(str(config.get(key))) for key in KEYS[config.kind].data_root if config.get(key)), Path("."))


def class_names(config: ForeignConfig) -> tuple[str, ...]:
    """Object classes in the order of the network's outputs; empty where they are not known."""
    for key in ("class_names", "object_classes", "metainfo.classes", "CLASS_NAMES"):
        value = config.get(key)
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return tuple(value)
    return ()


def has_map_head(config: ForeignConfig) -> bool:
    """Whether a map is segmented, which needs the map expansion."""
    if config.kind == "torchpack":
        return isinstance(config.get("model.heads.map"), Section)
    return any(str(kind).endswith("LoadBEVSegmentation") for kind in config.find("type", "train_pipeline"))


def checkpoints(config: ForeignConfig) -> dict[str, tuple[str, Origin | None]]:
    """Dotted key → file name (and origin) of every checkpoint that the run starts from."""
    found: dict[str, tuple[str, Origin | None]] = {}
    for key in ("load_from", "resume_from"):
        if isinstance(config.get(key), str) and config.get(key):
            found[key] = str(config.get(key)), config.origin(key)
    for key in _keys_ending(config.values, ("init_cfg.checkpoint", "pretrained")):
        value = config.get(key)
        if isinstance(value, str) and value:
            found[key] = value, config.origin(key)
    return found


def _keys_ending(values: Section, endings: tuple[str, ...], prefix: str = "", depth: int = 0) -> Iterator[str]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if dotted.endswith(endings):
            yield dotted
        elif isinstance(value, Section) and depth < 20:
            yield from _keys_ending(value, endings, f"{dotted}.", depth + 1)
