"""What an mmengine config asks for, by our keys: a finished config as plain data in, values and a report out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bevctl.config.schema import DataConfig

OWN = {
    "default_hooks": "bevctl logs and saves by itself",
    "custom_hooks": "hooks belong to mmengine's runner",
    "val_evaluator": "bevctl scores nuScenes by itself",
    "test_evaluator": "bevctl scores nuScenes by itself",
    "visualizer": "bevctl draws by itself",
    "vis_backends": "bevctl writes its own logs; --tensorboard adds event files",
    "log_processor": "bevctl writes its own logs",
    "env_cfg": "processes and NCCL are set up by bevctl",
    "resume": "use --resume auto",
    "find_unused_parameters": "several GPUs find them in the first step, see train.static_graph",
}
"""Keys of an mmengine config that mean nothing here, and why."""
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_WARMUP_START = 1 / 3
"""mmengine's start_factor where the config names none."""


@dataclass
class Translation:
    """Values by our dotted keys, where each comes from, and what was left behind."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Their dotted key, by ours."""
    left: list[str] = field(default_factory=list)
    """What is not taken, with the reason."""

    def take(self, ours: str, value: Any, theirs: str) -> None:
        """Notes a value, unless there is none."""
        if value is not None:
            self.values[ours] = value
            self.sources[ours] = theirs

    def sentences(self, where: str) -> list[str]:
        """What a user should read about it, once."""
        taken = [f"  {ours} = {_shown(value)} ({self.sources[ours]})" for ours, value in self.values.items()]
        told = [f"{where}: model and data set as they are there; taken over:", *taken]
        return [*told, f"{where}: not taken over: {'; '.join(self.left)}."] if self.left else told


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def translate(config: Mapping[str, Any]) -> Translation:
    """Everything of an mmengine config that bevctl has a key for."""
    found = Translation()
    _run(config, found)
    _data(config, found)
    length = _loop(_mapping(config.get("train_cfg")), found)
    wrapper = _mapping(config.get("optim_wrapper"))
    lr = _optimizer(_mapping(wrapper.get("optimizer")), found)
    _wrapper(wrapper, found)
    _paramwise(_mapping(wrapper.get("paramwise_cfg")), found)
    scaling = _mapping(config.get("auto_scale_lr"))
    if lr is not None and scaling.get("base_batch_size"):
        found.take("optim.base_batch", scaling["base_batch_size"], "auto_scale_lr.base_batch_size")
        found.take("optim.base_lr", lr, "auto_scale_lr.base_batch_size")
        found.take("optim.lr_scaling", "linear" if scaling.get("enable") else None, "auto_scale_lr.enable")
    _schedule(_list(config.get("param_scheduler")), lr, length, found)
    found.left += [f"{key} ({why})" for key, why in OWN.items() if config.get(key)]
    return found


def _run(config: Mapping[str, Any], found: Translation) -> None:
    found.take("work_dir", config.get("work_dir"), "work_dir")
    load_from = config.get("load_from")
    if isinstance(load_from, str) and "://" in load_from:
        found.left.append(f"load_from ({load_from}: download it, and give the file with --load-from)")
    else:
        found.take("model.load_from", [load_from] if load_from else None, "load_from")
    randomness = _mapping(config.get("randomness"))
    found.take("seed", randomness.get("seed"), "randomness.seed")
    found.take("train.deterministic", randomness.get("deterministic") or None, "randomness.deterministic")
    hooks = _mapping(config.get("default_hooks"))
    found.take("train.log_interval", _mapping(hooks.get("logger")).get("interval"), "default_hooks.logger.interval")
    keep = _mapping(hooks.get("checkpoint")).get("max_keep_ckpts")
    found.take("train.keep", keep if keep and keep > 0 else None, "default_hooks.checkpoint.max_keep_ckpts")
    if config.get("sync_bn"):
        found.left.append("sync_bn (statistics stay each GPU's own)")


def inner_data_set(dataset: Any) -> Mapping[str, Any]:
    """The data set inside the wrappers that repeat, balance or join: the first where there are several."""
    dataset = _mapping(dataset)
    while "dataset" in dataset or "datasets" in dataset:
        dataset = _mapping(dataset["dataset"] if "dataset" in dataset else _list(dataset["datasets"])[0])
    return dataset


def _data(config: Mapping[str, Any], found: Translation) -> None:
    loader = _mapping(config.get("train_dataloader"))
    found.take("train.batch", loader.get("batch_size"), "train_dataloader.batch_size")
    found.take("train.workers", loader.get("num_workers"), "train_dataloader.num_workers")
    train = inner_data_set(loader.get("dataset"))
    found.take("data.root", train.get("data_root") or None, "train_dataloader.dataset.data_root")
    found.take("data.info_train", train.get("ann_file"), "train_dataloader.dataset.ann_file")
    val = inner_data_set(_mapping(config.get("val_dataloader")).get("dataset"))
    found.take("data.info_val", val.get("ann_file"), "val_dataloader.dataset.ann_file")
    classes = _mapping(train.get("metainfo")).get("classes")
    if classes and set(classes) <= set(DataConfig().classes):
        found.take("data.classes", list(classes), "train_dataloader.dataset.metainfo.classes")
    found.take("model.point_cloud_range", _floats(config.get("point_cloud_range")), "point_cloud_range")
    if "NuScenes" not in type_name(val):
        found.take("train.eval_interval", 0, "val_dataloader, which is no nuScenes")


def _loop(loop: Mapping[str, Any], found: Translation) -> tuple[int | None, bool]:
    """Epochs or iterations of the run, and whether they are epochs."""
    by_epoch = bool(loop.get("by_epoch", "max_epochs" in loop))
    length = loop.get("max_epochs" if by_epoch else "max_iters")
    found.take("train.epochs" if by_epoch else "train.schedule_iters", length, "train_cfg")
    if by_epoch and "train.eval_interval" not in found.values:
        found.take("train.eval_interval", loop.get("val_interval"), "train_cfg.val_interval")
    return length, by_epoch


def _optimizer(optimizer: Mapping[str, Any], found: Translation) -> float | None:
    """Values of an Adam; returns its learning rate."""
    name, decay = type_name(optimizer), optimizer.get("weight_decay")
    if name != "AdamW" and not (name == "Adam" and not decay):
        if optimizer:
            found.left.append(
                f"optim_wrapper.optimizer ({name}: bevctl trains with AdamW, whose learning rates are others; "
                "choose one with --lr)"
            )
        return None
    place = "optim_wrapper.optimizer"
    lr = float(optimizer.get("lr", 1e-3))
    found.take("optim.lr", lr, f"{place}.lr")
    # torch's own defaults, where the config names none.
    found.take("optim.weight_decay", float(decay if decay is not None else 0.01 * (name == "AdamW")), place)
    found.take("optim.betas", _floats(optimizer.get("betas")), f"{place}.betas")
    rest = sorted(set(optimizer) - {"type", "lr", "weight_decay", "betas", "_scope_"})
    found.left += [f"{place}.{key}" for key in rest]
    return lr


def _wrapper(wrapper: Mapping[str, Any], found: Translation) -> None:
    place = "optim_wrapper"
    clip = _mapping(wrapper.get("clip_grad"))
    norm = clip.get("max_norm") if float(clip.get("norm_type", 2)) == 2 else None
    if clip and norm is None:
        found.left.append(f"{place}.clip_grad (only L2 norms are clipped here)")
    found.values["optim.clip"], found.sources["optim.clip"] = norm, f"{place}.clip_grad"
    found.take("train.accumulate", wrapper.get("accumulative_counts"), f"{place}.accumulative_counts")
    if type_name(wrapper) != "AmpOptimWrapper":
        found.take("precision.dtype", "fp32" if wrapper else None, f"{place}.type")
        return
    dtype = str(wrapper.get("dtype") or "float16").rpartition(".")[2]
    found.take("precision.dtype", _DTYPES.get(dtype), f"{place}.dtype")
    scale = wrapper.get("loss_scale", "dynamic")
    if isinstance(scale, Mapping):
        for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
            found.take(f"precision.{name}", scale.get(name), f"{place}.loss_scale.{name}")
    else:
        found.take("precision.loss_scale", scale, f"{place}.loss_scale")


def _paramwise(paramwise: Mapping[str, Any], found: Translation) -> None:
    custom = _mapping(paramwise.get("custom_keys"))
    # mmengine tries the longest name first, and equal lengths by alphabet.
    names = sorted(sorted(custom), key=len, reverse=True)
    groups = [
        {"match": n, "lr": float(custom[n].get("lr_mult", 1.0)), "decay": float(custom[n].get("decay_mult", 1.0))}
        for n in names
    ]
    found.take("optim.groups", groups or None, "optim_wrapper.paramwise_cfg.custom_keys")
    found.left += [f"optim_wrapper.paramwise_cfg.{key}" for key in sorted(set(paramwise) - {"custom_keys"})]


def _schedule(schedulers: Sequence[Any], lr: float | None, length: tuple[int | None, bool], found: Translation) -> None:
    """Warm-up, and one of the shapes that bevctl has; any other is named and the rate stays constant."""
    named = [(type_name(s), _mapping(s)) for s in schedulers]
    momentum = [name for name, _ in named if name.endswith("Momentum")]
    rates = [(name, s) for name, s in named if not name.endswith("Momentum")]
    warmups = [s for name, s in rates if name == "LinearLR" and not s.get("by_epoch", True) and not s.get("begin", 0)]
    shapes = [(name, s) for name, s in rates if s not in warmups]
    found.values["optim.warmup"], found.sources["optim.warmup"] = 0, "param_scheduler"
    if warmups:
        # mmengine is at the full rate in the last iteration of the span, bevctl in the first one after it.
        found.take("optim.warmup", max(int(warmups[0].get("end", 1)) - 1, 0), "param_scheduler")
        found.take("optim.warmup_ratio", float(warmups[0].get("start_factor", _WARMUP_START)), "param_scheduler")
    values = _shape(shapes, lr, length)
    if values is None:
        names = ", ".join(name for name, _ in shapes)
        found.left.append(f"param_scheduler ({names}: no such schedule here; the rate stays constant after warm-up)")
    values = values or {"schedule": "constant"}
    if momentum and values["schedule"] == "cyclic":
        values["cyclic_momentum"] = True
    for key, value in values.items():
        found.take(f"optim.{key}", value, "param_scheduler")


def _shape(
    shapes: Sequence[tuple[str, Mapping[str, Any]]], lr: float | None, length: tuple[int | None, bool]
) -> dict[str, Any] | None:
    """Our schedule of theirs; None where there is none."""
    total, by_epoch = length
    kinds = [name for name, _ in shapes]
    parts = [s for _, s in shapes]
    if not shapes:
        return {"schedule": "constant"}
    if not total:
        return None
    if kinds == ["CosineAnnealingLR"]:
        steps = None if parts[0].get("convert_to_iter_based") or not by_epoch else parts[0].get("T_max", total)
        return {"schedule": "cosine", "min_ratio": _end(parts[0], lr), "cosine_steps": steps}
    if kinds == ["CosineAnnealingLR"] * 2:
        peak, end = (_end(part, lr) for part in parts)
        up = float(parts[0].get("end", parts[0].get("T_max", 0))) / total
        if peak is None or end is None or not 0 < up < 1:
            return None
        return {"schedule": "cyclic", "cyclic_peak": peak, "cyclic_end": end, "cyclic_up": up}
    if kinds in (["MultiStepLR"], ["StepLR"]):
        step = parts[0].get("step_size")
        milestones = parts[0].get("milestones") or (range(step, total, step) if step else ())
        shares = [float(m) / total for m in milestones if 0 < m < total]
        return {"schedule": "steps", "steps": shares, "step_factor": float(parts[0].get("gamma", 0.1))}
    return None


def _end(cosine: Mapping[str, Any], lr: float | None) -> float | None:
    """Last learning rate of a cosine over its first of the run."""
    if cosine.get("eta_min_ratio") is not None:
        return float(cosine["eta_min_ratio"])
    return float(cosine.get("eta_min") or 0.0) / lr if lr else None


def type_name(item: Any) -> str:
    """Name of what a `type` stands for, which may be text, a dotted path or the class itself."""
    kind = _mapping(item).get("type", "")
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


def _floats(values: Any) -> list[float] | None:
    return [float(v) for v in values] if values else None
