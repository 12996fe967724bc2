"""From what the command line says to the `Context` of the checks; a broken CONFIG becomes a part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bevctl.config import foreign_facts
from bevctl.config.foreign import ForeignConfig, is_foreign, read_foreign
from bevctl.config.load import Loaded, load
from bevctl.config.schema import Config
from bevctl.config.sources import find
from bevctl.errors import BevctlError
from bevctl.preflight.checks import Context

_OWN_RUNS = "runs"
_FOREIGN_RUNS = "work_dirs"
"""Where mmcv's and mmengine's training scripts write when no work_dir is named."""


def context_of_config(config: Config, **options: Any) -> Context:
    """The context of a config of ours; `options` are further fields."""
    return Context(
        config=config,
        work_dir=Path(config.work_dir or Path(_OWN_RUNS, config.name)),
        precision=config.precision.dtype,
        batch=config.train.batch,
        workers=config.train.workers,
        device=config.device,
        **options,
    )


def build_context(
    source: str | None, given: Mapping[str, object], load_config: Callable[[], Loaded], **options: Any
) -> Context:
    """The context of CONFIG.

    Args:
        source: CONFIG as given; None: the one that `load_config` finds.
        given: values by config key that the command line sets; they stand where CONFIG cannot be read, too.
        load_config: resolves CONFIG with everything that overrides it.
        options: further fields of the context.

    Raises BevctlError for overrides that do not fit a CONFIG that is fine by itself.
    """
    path = _foreign_path(source)
    if path is not None:
        return _foreign_context(path, given, source=source, config_path=path, **options)
    try:
        loaded = load_config()
    except BevctlError as error:
        if _is_sound(source):
            raise
        return _bare_context(given, config_error=error, source=source, **options)
    found = loaded.path
    return context_of_config(loaded.config, source=source, config_path=found, origins=loaded.origins, **options)


def _foreign_path(source: str | None) -> Path | None:
    try:
        path = find(source) if source is not None else None
        return path if path is not None and is_foreign(path) else None
    except BevctlError:
        return None


def _is_sound(source: str | None) -> bool:
    """Whether CONFIG without anything that overrides it can be resolved."""
    try:
        load(source)
    except BevctlError:
        return False
    return True


def _foreign_context(path: Path, given: Mapping[str, object], **options: Any) -> Context:
    try:
        config = read_foreign(path)
    except BevctlError as error:
        return _bare_context(given, config_error=error, **options)
    return context_of_foreign(config, given, **options)


def context_of_foreign(config: ForeignConfig, given: Mapping[str, object], **options: Any) -> Context:
    """The context of another project's config; `given` as for `build_context`, `options` are further fields."""
    half = foreign_facts.half_precision(config)
    told = {
        "precision.dtype": {True: half.dtype, False: "fp32", None: "auto"}[half.on],
        "train.batch": foreign_facts.batch_per_gpu(config),
        "train.workers": foreign_facts.workers_per_gpu(config),
        "work_dir": config.get("work_dir") or _FOREIGN_RUNS,
    }
    asked = given.get("precision.dtype")
    return _bare_context({**told, **given}, foreign=config, asked_precision=asked, **options)


def _bare_context(given: Mapping[str, object], **options: Any) -> Context:
    """A context without a config of ours: what is given, and defaults for the rest."""
    context = Context(config=None, work_dir=Path(str(given.get("work_dir") or _OWN_RUNS)), **options)
    known = {
        name: given[key]
        for key, name in (
            ("precision.dtype", "precision"),
            ("train.batch", "batch"),
            ("train.workers", "workers"),
            ("device", "device"),
        )
        if given.get(key) is not None
    }
    return dataclasses.replace(context, **known)  # type: ignore[arg-type]
