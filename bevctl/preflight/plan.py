"""What a run asks for, read from a config of ours or of another project, in one form for the checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig
from bevctl.config.schema import VEHICLE, Config
from bevctl.preflight.checks import Context, Outcome, skipped


class NoPlan(Exception):
    """CONFIG cannot be read."""


@dataclass(frozen=True)
class Plan:
    """The numbers and files of a run; None or empty where the config does not tell."""

    data_root: Path
    info_files: Mapping[str, Path]
    """Split (train, val) → path."""
    classes: tuple[str, ...]
    needs_map: bool
    uses_cameras: bool
    uses_points: bool
    batch: int
    """Samples a GPU and step."""
    gpus: int
    accumulate: int
    epochs: int | None
    lr: float | None
    base_batch: int | None
    base_lr: float | None
    loss_scale: float | str | None
    half: bool | None
    """Whether FP16 is on, and with it a loss scale."""

    @property
    def global_batch(self) -> int:
        return self.batch * self.gpus * self.accumulate


def is_foreign_run(context: Context) -> bool:
    """Whether another project's program will train, and not the bundled engine in this interpreter."""
    return context.foreign is not None or context.python is not None


def read_plan(context: Context) -> Plan:
    """The run's plan. Raises NoPlan where CONFIG cannot be read."""
    if context.foreign is not None:
        return _foreign_plan(context.foreign, context)
    if context.config is None:
        raise NoPlan
    return _own_plan(context.config, context)


def of_plan(judge: Callable[[Context, Plan], Outcome]) -> Callable[[Context], Outcome]:
    """A check that needs the run's plan, and is skipped where there is none."""

    @functools.wraps(judge)
    def check(context: Context) -> Outcome:
        try:
            plan = context.once(read_plan)
        except NoPlan:
            return skipped("the config cannot be read, see FILE001")
        return judge(context, plan)

    return check


def _own_plan(config: Config, context: Context) -> Plan:
    root = Path(config.data.root)
    camera = config.model.camera
    return Plan(
        data_root=root,
        info_files={"train": root / config.data.info_train, "val": root / config.data.info_val},
        classes=config.data.classes,
        needs_map=config.model.map is not None and config.data.map_classes != (VEHICLE,),
        uses_cameras=camera is not None,
        uses_points=config.model.reads_points,
        batch=context.batch,
        gpus=context.gpus or 1,
        accumulate=config.train.accumulate,
        epochs=config.train.epochs,
        lr=config.optim.lr,
        base_batch=config.optim.base_batch,
        base_lr=config.optim.base_lr,
        loss_scale=config.precision.loss_scale,
        half={"fp16": True, "auto": None}.get(config.precision.dtype, False),
    )


def _foreign_plan(config: ForeignConfig, context: Context) -> Plan:
    precision = foreign_facts.half_precision(config)
    named = foreign_facts.base_batch(config) or foreign_facts.base_batch_of_name(config.path)
    return Plan(
        data_root=context.base / foreign_facts.data_root(config),
        info_files={split: context.base / path for split, path in foreign_facts.info_files(config).items()},
        classes=foreign_facts.class_names(config),
        needs_map=foreign_facts.has_map_head(config),
        uses_cameras=True,
        uses_points=True,
        batch=context.batch,
        gpus=context.gpus or 1,
        accumulate=1,
        epochs=foreign_facts.epochs(config),
        lr=foreign_facts.learning_rate(config),
        base_batch=named,
        base_lr=foreign_facts.learning_rate(config) if named else None,
        loss_scale=precision.loss_scale,
        half=precision.on and precision.dtype == "fp16",
    )
