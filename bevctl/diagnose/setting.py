"""How a run trains, as far as its config, its log and its environment tell; of bevctl or of another project."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig, is_foreign, read_foreign, read_foreign_dump
from bevctl.config.load import load, to_dict
from bevctl.config.sources import find
from bevctl.diagnose.gpu_models import gpu_model
from bevctl.errors import BevctlError
from bevctl.monitor.facts import fixed_scale, fp16_of, last_segment
from bevctl.runs.records import RunLog

RECIPES: dict[str, tuple[str, int, float]] = {
    r"petr": ("PETR", 8, 2e-4),
    r"bevfusion|transfusion": ("BEVFusion", 32, 2e-4),
}
"""Pattern of a model's type → (name, global batch, peak learning rate) that its authors train with."""


@dataclass(frozen=True)
class Setting:
    """What is known of a run's set-up; None or empty for what nothing tells."""

    where: str = ""
    """The file that tells most of it."""
    own: bool = False
    """A run of bevctl, whose config takes a remedy's settings."""
    precision: str | None = None
    """fp16, bf16 or fp32."""
    asked: str | None = None
    """What the config asks for, whatever the run did."""
    precision_told: str = ""
    """The sentence for it, with file and line."""
    loss_scale: float | str | None = None
    """A fixed number, or "dynamic"."""
    batch: int | None = None
    """Samples per GPU and step."""
    gpus: int | None = None
    accumulate: int = 1
    lr: float | None = None
    """Peak."""
    reference: tuple[str, int, float] | None = None
    """Who says so, and the global batch and peak learning rate that belong together."""
    warmup: int | None = None
    """Iterations."""
    clip: float | None = None
    tasks: tuple[str, ...] = ()
    """Heads that the config builds: object, map."""
    fp32_modules: tuple[str, ...] = ()
    workers: int | None = None
    """Loading processes a GPU."""
    checkpointing: bool | None = None
    """Whether activations of a part are recomputed."""
    gpu_names: tuple[str, ...] = ()
    config: ForeignConfig | None = None
    """The config of another project."""
    notes: tuple[str, ...] = field(default=())

    @property
    def half(self) -> bool:
        """Whether it is known to train in FP16."""
        return self.precision == "fp16"

    @property
    def may_use_bf16(self) -> bool:
        """Whether no card of the run is known to lack it."""
        return all(model is None or model.has_bf16 for model in map(gpu_model, self.gpu_names))

    @property
    def global_batch(self) -> int | None:
        """Samples of an optimizer step over all GPUs."""
        return None if self.batch is None or self.gpus is None else self.batch * self.gpus * self.accumulate


def setting_of(log: RunLog | None, config: str | None) -> Setting:
    """What `config` (a path or a packaged name) and the log say; the log's own config where `config` is None.

    Raises:
        BevctlError: `config` cannot be read.
    """
    logged = _of_log_config(log)
    known = _of_config(config) if config is not None else logged
    if config is not None and logged.precision is not None:
        known = dataclasses.replace(known, precision=logged.precision, precision_told=logged.precision_told)
    return known if log is None else _with_log(known, log)


def _of_config(source: str) -> Setting:
    path = Path(source)
    if path.suffix and is_foreign(path):
        return _foreign(read_foreign(path), source)
    return _own(to_dict(load(source).config), str(find(source)))


def _of_log_config(log: RunLog | None) -> Setting:
    text = log.header.get("config") if log is not None else None
    if log is None or not isinstance(text, str):
        return Setting()
    if log.format == "bevctl":
        folder = Path(log.header.get("work_dir") or log.path)
        try:
            return _own(to_dict(load(folder / "config.yaml").config), str(folder / "config.yaml"))
        except BevctlError as error:
            return Setting(notes=(f"The run's config was not read: {error.message}",))
    where = f"{log.path} (its config)"
    try:
        return _foreign(read_foreign_dump(text, Path(where)), where)
    except BevctlError as error:
        return Setting(notes=(f"The config in the log was not worked out: {error.message}",))


def _own(config: Mapping[str, Any], where: str) -> Setting:
    optim, precision, model = config["optim"], config["precision"], config["model"]
    dtype = precision["dtype"]
    base = (optim["base_batch"], optim["base_lr"])
    return Setting(
        where=where,
        own=True,
        precision=None if dtype == "auto" else dtype,
        asked=None if dtype == "auto" else dtype,
        precision_told=f"precision.dtype is {dtype} ({where})",
        loss_scale=precision["loss_scale"],
        batch=config["train"]["batch"],
        accumulate=config["train"]["accumulate"],
        lr=optim["lr"],
        reference=(f"optim.base_batch ({where})", *base) if all(base) else None,
        warmup=optim["warmup"],
        clip=optim["clip"],
        tasks=tuple(task for task in ("object", "map") if model.get(task) is not None),
        fp32_modules=tuple(precision["fp32_modules"]),
        workers=config["train"]["workers"],
        checkpointing=bool(model["checkpointing"]),
    )


def _foreign(config: ForeignConfig, where: str) -> Setting:
    half = foreign_facts.half_precision(config)
    precision = {True: half.dtype, False: "fp32", None: None}[half.on]
    clip = config.get("optimizer_config.grad_clip.max_norm") or config.get("optim_wrapper.clip_grad.max_norm")
    accumulate = config.get("optimizer_config.cumulative_iters") or config.get("optim_wrapper.accumulative_counts")
    warmup = config.get("lr_config.warmup_iters")
    return Setting(
        where=where,
        precision=precision,
        asked=precision,
        precision_told=str(half),
        loss_scale=half.loss_scale,
        batch=foreign_facts.batch_per_gpu(config),
        gpus=_count(config.get("num_gpus")),
        accumulate=_count(accumulate) or 1,
        lr=foreign_facts.learning_rate(config),
        reference=_reference(config),
        warmup=_count(warmup),
        clip=float(clip) if isinstance(clip, int | float) else None,
        tasks=("map",) if foreign_facts.has_map_head(config) else (),
        workers=foreign_facts.workers_per_gpu(config),
        checkpointing=any(value is True for value in config.find("with_cp", "model")),
        config=config,
        notes=config.notes,
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _reference(config: ForeignConfig) -> tuple[str, int, float] | None:
    """The batch that the learning rate was made for: as the config says, else as the model's authors train it."""
    base, lr = foreign_facts.base_batch(config), foreign_facts.learning_rate(config)
    if base is not None and lr is not None:
        return f"auto_scale_lr.base_batch_size ({config.path})", base, lr
    kinds = [str(kind).lower() for kind in config.find("type", "model")]
    for pattern, (name, batch, rate) in RECIPES.items():
        if any(re.search(pattern, kind) for kind in kinds):
            return f"the authors' recipe for {name}", batch, rate
    return None


def _with_log(known: Setting, log: RunLog) -> Setting:
    """What the log itself says of the run goes before what its config asks for."""
    env, segment = log.header.get("env") or {}, last_segment(log)
    listed = {str(key)[4:]: str(name) for key, name in env.items() if str(key).startswith("GPU ")}
    told: dict[str, Any] = {"own": log.format == "bevctl", "where": known.where or str(log.path)}
    told["gpu_names"] = tuple(listed.values()) or ((str(env["device"]),) if "device" in env else ())
    if listed:
        told["gpus"] = sum(len(indices.split(",")) for indices in listed)
    for name, key in (("batch", "batch"), ("gpus", "world"), ("accumulate", "accumulate"), ("lr", "lr")):
        if isinstance(segment.get(key), int | float):
            told[name] = segment[key]
    told |= _precision_of_log(known, log, segment)
    return dataclasses.replace(known, **told)


def _precision_of_log(known: Setting, log: RunLog, segment: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    precision = segment.get("precision")
    if isinstance(precision, str) and "launched" not in log.header:
        told["precision"] = precision
        told["precision_told"] = f"the run trained in {precision.upper()} (run.json)"
    elif isinstance(precision, str) and known.precision is None:
        told["precision"] = precision
        told["precision_told"] = f"the run was started in {precision.upper()} (run.json)"
    elif known.precision is None and (half := fp16_of(log)) is not None:
        told["precision"] = "fp16" if half else "fp32"
        told["precision_told"] = f"the log says that FP16 is {'on' if half else 'off'}"
    if (scale := fixed_scale(log)) is not None and known.loss_scale is None:
        told["loss_scale"] = scale
    return told
