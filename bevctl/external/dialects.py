"""How each kind of training script is told things: which changes have an option of their own, and all its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_values import Section, lookup
from bevctl.errors import BevctlError
from bevctl.external.overlay import Overlay, python_overlay, yaml_overlay
from bevctl.external.trees import Tree
from bevctl.external.wanted import Changes, Wanted


@dataclass(frozen=True)
class Job:
    """What the training script is told, apart from the checkpoint to resume."""

    tree: Tree
    config: str
    """The config file, as seen from where the script runs."""
    work_dir: Path
    """Absolute."""
    wanted: Wanted
    distributed: bool = False
    """Whether a launcher of torch starts one process a GPU."""
    flags: tuple[str, ...] = ()
    """Options with their values."""
    options: tuple[tuple[str, Any], ...] = ()
    """Values by dotted key that the command line overrides."""
    overlay: Overlay | None = field(default=None)


Speller = Callable[[ForeignConfig, Changes, Job], Job]
Words = Callable[[Job, Path | None], list[str]]


def spelled(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    """The job with every change as an option, an override on the command line, or in an overlay.

    Raises BevctlError for a change that this script cannot be told.
    """
    job = _SPELL[config.kind](config, dict(changes), job)
    return replace(job, options=(*job.options, *job.wanted.overrides))


def words(job: Job, resume: Path | None) -> list[str]:
    """The words after the script's name; `resume` is an absolute path.

    Raises BevctlError for an option that the script does not define.
    """
    kind, script = job.tree.kind.config_kind, job.tree.script
    said = _WORDS[kind](job, resume)
    for word in said:
        known = kind == "torchpack" or not script.options or script.has(word)
        if word.startswith("--") and not known:
            raise BevctlError(
                f"{script.path} has no option {word}.", "Use a newer checkout, or change its config with --set."
            )
    return said


# mmcv: mmdet3d 0.x and 1.0, PETR


def _spell_mmcv(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    flags: list[str] = []
    if "seed" in changes:
        flags += ["--seed", str(changes.pop("seed"))]
    if changes.pop("deterministic", False):
        flags.append("--deterministic")
    return _over_python(config, changes, replace(job, flags=tuple(flags)))


def _over_python(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    if config.get("plugin") and not config.get("plugin_dir") and changes:
        # Without plugin_dir the script imports the folder that its config lies in.
        changes["plugin_dir"] = f"{Path(job.config).parent}/"
    if not changes:
        return job
    overlay = python_overlay(config, changes, job.work_dir)
    return replace(job, overlay=overlay, config=str(overlay.path))


def _words_mmcv(job: Job, resume: Path | None) -> list[str]:
    said = [job.config, "--work-dir", str(job.work_dir), *job.flags]
    said += ["--resume-from", str(resume)] if resume else []
    return [*said, "--launcher", "pytorch" if job.distributed else "none", *_cfg_options(job.options)]


def _cfg_options(options: tuple[tuple[str, Any], ...]) -> list[str]:
    """All of them behind one `--cfg-options`: argparse keeps the last one only."""
    return ["--cfg-options", *(f"{key}={_value(value)}" for key, value in options)] if options else []


def _value(value: Any) -> str:
    """A value as DictAction and torchpack read it; no spaces, which their shells split at."""
    return value if isinstance(value, str) else repr(value).replace(", ", ",").replace(": ", ":")


# mmengine: mmdet3d 1.1 and newer


def _spell_mmengine(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    flags: tuple[str, ...] = ()
    amp = {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.loss_scale": "dynamic"}
    asked = {key: value for key, value in changes.items() if key.startswith("optim_wrapper.") and key.count(".") == 1}
    if asked == amp and config.get("optim_wrapper.type") == "OptimWrapper" and job.tree.script.has("--amp"):
        flags = ("--amp",)
        changes = {key: value for key, value in changes.items() if key not in amp}
    job = replace(job, flags=flags)
    if not config.lazy:
        return _over_python(config, changes, job)
    if any(isinstance(value, dict) for value in changes.values()):
        raise BevctlError(
            f"{config.path} imports its bases, and no file can be laid over such a config.",
            f"Write the change into a copy of it: {', '.join(changes)}.",
        )
    return replace(job, options=tuple(changes.items()))


def _words_mmengine(job: Job, resume: Path | None) -> list[str]:
    said = [job.config, "--work-dir", str(job.work_dir), *job.flags]
    options = job.options
    if resume and job.tree.script.options.get("--resume"):
        said += ["--resume", str(resume)]
    elif resume:  # before 1.1.1 it is a switch, and the file is the one that load_from names
        said, options = [*said, "--resume"], (*options, ("load_from", str(resume)))
    return [*said, "--launcher", "pytorch" if job.distributed else "none", *_cfg_options(options)]


# torchpack: mit-bevfusion


def _spell_torchpack(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    options: dict[str, Any] = {}
    for key, value in changes.items():
        parents = key.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            parent = ".".join(parents[:depth])
            if _is_no_mapping(config, parent):  # torchpack cannot set a key below a null or a number
                options.setdefault(parent, {})
        options[key] = value
    return replace(job, options=tuple(options.items()))


def _is_no_mapping(config: ForeignConfig, key: str) -> bool:
    above, _, name = key.rpartition(".")
    holder = lookup(config.values, above) if above else config.values
    return isinstance(holder, Section) and name in holder and not isinstance(holder[name], Section)


def _words_torchpack(job: Job, resume: Path | None) -> list[str]:
    options = (*job.options, ("resume_from", str(resume))) if resume else job.options
    pairs = [word for key, value in options for word in (f"--{key}", _value(value))]
    return [job.config, "--run-dir", str(job.work_dir), *pairs]


# OpenPCDet


def _spell_openpcdet(config: ForeignConfig, changes: Changes, job: Job) -> Job:
    flags: list[str] = []
    if changes.pop("OPTIMIZATION.BATCH_SIZE_PER_GPU", None) is not None:
        flags += ["--batch_size", str((job.wanted.batch or 0) * job.wanted.gpus)]  # it takes the sum over all GPUs
    if "OPTIMIZATION.NUM_EPOCHS" in changes:
        flags += ["--epochs", str(changes.pop("OPTIMIZATION.NUM_EPOCHS"))]
    for key, option in (("workers", "--workers"), ("load_from", "--pretrained_model")):
        if key in changes:
            flags += [option, str(changes.pop(key))]
    if changes.get("OPTIMIZATION.USE_AMP"):
        flags.append("--use_amp")
        del changes["OPTIMIZATION.USE_AMP"]
    # --set takes a value of the same type as the config's alone, and comes too late for USE_AMP.
    settable = {key: value for key, value in changes.items() if type(config.get(key)) is type(value)}
    settable.pop("OPTIMIZATION.USE_AMP", None)
    job = replace(job, flags=tuple(flags), options=tuple(settable.items()))
    rest = {key: value for key, value in changes.items() if key not in settable}
    if not rest:
        return job
    overlay = yaml_overlay(config, rest, job.work_dir)
    return replace(job, overlay=overlay, config=str(overlay.path))


def _words_openpcdet(job: Job, resume: Path | None) -> list[str]:
    # An absolute tag is where the run goes: what pathlib joins before an absolute path does not count.
    said = ["--cfg_file", job.config, "--extra_tag", str(job.work_dir), *job.flags]
    said += ["--ckpt", str(resume)] if resume else []
    said += ["--launcher", "pytorch" if job.distributed else "none"]
    pairs = [word for key, value in job.options for word in (key, _value(value))]
    return [*said, *(["--set", *pairs] if pairs else [])]


_SPELL: Mapping[str, Speller] = {
    "mmcv": _spell_mmcv,
    "mmengine": _spell_mmengine,
    "torchpack": _spell_torchpack,
    "openpcdet": _spell_openpcdet,
}
_WORDS: Mapping[str, Words] = {
    "mmcv": _words_mmcv,
    "mmengine": _words_mmengine,
    "torchpack": _words_torchpack,
    "openpcdet": _words_openpcdet,
}
