"""Checks of section "files": the config, and what belongs to the run beside it; checkpoints are in files_checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bevctl.config import foreign_facts
from bevctl.config.document import display
from bevctl.config.foreign import ForeignConfig
from bevctl.errors import BevctlError
from bevctl.external.script import read_script
from bevctl.external.trees import TRAIN_SCRIPT
from bevctl.preflight import files_checkpoint, half_weights
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, unknown, warned
from bevctl.preflight.environment import read_environment


def config_loads(context: Context) -> Outcome:
    """FILE001: CONFIG can be read, as one of ours or as one of another project."""
    if context.foreign is not None:
        return _foreign_loads(context.foreign)
    if context.config is None:
        error = context.config_error or BevctlError("There is no config.", "Give a path or a name.")
        return failed(error.message, error.hint)
    where = f" ({display(context.config_path)})" if context.config_path else ""
    return passed(context.config.name + where)


def _foreign_loads(config: ForeignConfig) -> Outcome:
    said = f"{config.kind} config, read from {', '.join(display(path) for path in config.files)}"
    if config.notes:
        fix = "What these lines set is not known here, and may differ in the run."
        return warned(f"{said}; {' '.join(config.notes[:3])}", fix)
    return passed(said)


def mixed_precision(context: Context) -> Outcome:
    """FILE002: the precision that was asked for is the one that the config switches on, and which file sets it."""
    if context.foreign is not None:
        return _foreign_precision(context.foreign, context.asked_precision)
    if context.config is None:
        return skipped("the config cannot be read, see FILE001")
    dtype = context.config.precision.dtype
    said = f"precision.dtype is {dtype} ({context.origins.get('precision.dtype', 'default')})"
    if dtype == "fp32":
        return passed(f"{said}: mixed precision is off")
    return passed(said if dtype == "bf16" else f"{said}, loss scale {context.config.precision.loss_scale}")


def _foreign_precision(config: ForeignConfig, asked: str | None) -> Outcome:
    setting = foreign_facts.half_precision(config)
    key = "optim_wrapper=dict(type='AmpOptimWrapper', loss_scale='dynamic', …)"
    fix = f"Set {key if config.kind == 'mmengine' else _fp16_key(config)} in the config that is trained."
    if setting.on is None:
        return unknown(str(setting), "Write the value out, so that it can be read.")
    if asked in (None, "auto"):
        return passed(str(setting)) if setting.on else warned(str(setting), fix)
    if asked == (setting.dtype if setting.on else "fp32"):
        return passed(str(setting))
    fix = "Set it to None in the config that is trained." if asked == "fp32" else fix
    return failed(f"{setting}, and {asked} was asked for", fix)


def _fp16_key(config: ForeignConfig) -> str:
    return "fp16: {loss_scale: dynamic}" if config.kind == "torchpack" else "fp16 = dict(loss_scale='dynamic')"


def launcher(context: Context) -> Outcome:
    """FILE010: what starts a run of another project is there: its train.py, torchpack and mpirun."""
    foreign = context.foreign
    if foreign is None:
        return skipped("bevctl train starts the run itself")
    root = context.repo or project_root(foreign.path)
    missing = list(_missing_of_launcher(context, foreign, root))
    if missing:
        fix = "Run preflight where the project is, with --python of its environment, or install what is missing."
        return failed("; ".join(missing), fix)
    started = "torchpack dist-run" if _by_torchpack(foreign, root) else "tools/train.py"
    return passed(f"{started} in {display(root)}")


def _by_torchpack(config: ForeignConfig, root: Path) -> bool:
    """Whether torchpack starts the processes; forks of mit-bevfusion without it start by torchrun."""
    if config.kind != "torchpack":
        return False
    try:
        return "torchpack" in read_script(root / TRAIN_SCRIPT).imports
    except BevctlError:
        return True


def _missing_of_launcher(context: Context, config: ForeignConfig, root: Path) -> Iterator[str]:
    if not (root / TRAIN_SCRIPT).is_file():
        yield f"no {TRAIN_SCRIPT} in {display(root)}"
    by_hand = context.repo is None and config.kind in ("mmcv", "mmengine") and (context.gpus or 1) > 1
    if by_hand and not (root / "tools" / "dist_train.sh").is_file():
        yield f"no tools/dist_train.sh in {display(root)}"
    if _by_torchpack(config, root):
        environment = context.once(read_environment)
        programs = Path(environment.executable).parent
        if "torchpack" not in environment.packages:
            yield f"torchpack is not installed for {environment.executable}"
        if not environment.programs.get("mpirun") and not os.access(programs / "mpirun", os.X_OK):
            yield "mpirun is not on the PATH"


def project_root(path: Path) -> Path:
    """The folder of the project that a config belongs to: the nearest above it with tools/, setup.py or .git."""
    for folder in path.absolute().parents:
        if any(os.path.exists(folder / name) for name in ("tools", "setup.py", ".git")):
            return folder
    return path.absolute().parent


def no_half_weights(context: Context) -> Outcome:
    """FILE011: nothing in the project's source turns the model's own weights into FP16."""
    foreign = context.foreign
    if foreign is None:
        return skipped("the bundled engine keeps its weights in FP32")
    root = context.repo or project_root(foreign.path)
    calls = half_weights.find(root)
    if not calls:
        return passed(f"no model.half() in the training code below {display(root)}")
    said = ", ".join(f"{display(call.path)}:{call.line}: {call.text}" for call in calls[:5])
    fix = "Take the call out: autocast and the FP16 hook make the copies in half precision themselves."
    on = foreign_facts.half_precision(foreign).on
    return failed(said, fix) if on is not False else warned(f"{said}; FP16 is off in this config", fix)


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec(
        "FILE001",
        "config loads",
        config_loads,
        required="a config of bevctl, torchpack, mmcv or mmengine",
        why="a run whose config cannot be read does not start",
    ),
    CheckSpec(
        "FILE002",
        "mixed precision is on in the config",
        mixed_precision,
        why="FP16 that is not switched on costs the whole speed-up and nobody notices; one that is inherited surprises",
    ),
    *files_checkpoint.CHECKS,
    CheckSpec(
        "FILE010",
        "launcher",
        launcher,
        required="tools/train.py, and torchpack with mpirun for mit-bevfusion",
        why="the start command ends with command not found",
    ),
    CheckSpec(
        "FILE011",
        "weights stay in FP32",
        no_half_weights,
        required="no model.half() in the training code",
        why='a GradScaler refuses half weights: "Attempting to unscale FP16 gradients"',
    ),
)
