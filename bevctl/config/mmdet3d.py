"""Configs of mmdet3d that are run, not only read: the one place where such a file's code is executed.

An mmengine config is Python, and names modules to import. It is run when somebody has asked for that with
`--engine mmdet3d`, and never otherwise: see `allow`. bevctl.config.foreign reads such files without running them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bevctl.config.layers import Layer
from bevctl.config.mmdet3d_keys import translate
from bevctl.config.sections import sections_of
from bevctl.config.sources import Given, data_layer, value_layer
from bevctl.errors import BevctlError

INSTALL = "pip install 'bevctl[mmdet3d]' as docs/mmdet3d.md says (mmcv is built, with ops)."
_allowed: list[bool] = []


def allow() -> None:
    """From now on this process may run the code of mmdet3d configs."""
    _allowed.append(True)


def check_allowed(path: str) -> None:
    """Raises BevctlError (exit code 2) unless `allow` was called."""
    if not _allowed:
        raise BevctlError(
            f"{path} is a config of mmdet3d, whose code would run.", "If you trust it, say so: --engine mmdet3d."
        )


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Turns a missing or broken installation of OpenMMLab's packages into one sentence (exit code 2)."""
    try:
        yield
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root not in ("mmengine", "mmcv", "mmdet", "mmdet3d"):
            raise
        what = "mmcv is installed without its ops" if error.name == "mmcv._ext" else f"{root} is not installed"
        raise BevctlError(f"--engine mmdet3d: {what} here.", INSTALL) from None


@functools.lru_cache(maxsize=4)
def run_config(path: str) -> Any:
    """The mmengine Config of a file, whose code is run, with the modules that it names imported.

    Raises:
        BevctlError: nobody asked for it, mmengine is not installed, or the file's code fails.
    """
    check_allowed(path)
    with installed(), quiet():
        from mmengine.config import Config
        from mmengine.registry import init_default_scope

        try:
            config = Config.fromfile(path)
        except ModuleNotFoundError as error:
            raise BevctlError(
                f"{path} imports {error.name}, which is not here.", "Add its folder to PYTHONPATH, or install it."
            ) from error
        except Exception as error:  # the file is code, which can fail in any way
            reason = " ".join(str(error).split())[:200]
            raise BevctlError(f"{path} fails: {type(error).__name__}: {reason}.", "Correct the config.") from error
        init_default_scope(config.get("default_scope") or "mmdet3d")
    missing = [key for key in ("model", "train_dataloader") if key not in config]
    if missing:
        raise BevctlError(f"{path} has no {missing[0]}.", "Give a config that mmdet3d's tools/train.py takes.")
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What OpenMMLab's packages print goes to stderr, and only from warnings on: stdout carries results."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setuptools' deprecations, among others
        from mmengine.logging import MMLogger

        MMLogger.get_current_instance().setLevel(logging.WARNING)
        yield


def read_mmdet3d(path: Path) -> tuple[list[Layer], list[str]]:
    """The layers of an mmdet3d config, which is run, and sentences on what of it counts.

    Raises:
        BevctlError: as `run_config`.
    """
    config = run_config(str(path.resolve()))
    try:
        found = translate(config.to_dict())
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise BevctlError(
            f"{path}: optimizer, schedule or loaders are not as mmengine has them: {reason}.",
            "Compare them with a config that mmdet3d's tools/train.py takes.",
        ) from error
    parts = dict.fromkeys(("camera", "lidar", "object", "map"))
    model = {"type": "mmdet3d", **parts, "mmdet3d": {"config": str(path.resolve())}}
    values = sections_of(found.values)
    values["model"] = {**values.get("model", {}), **model}
    layers = [value_layer("name", Given(path.stem, str(path)), "file"), data_layer(values, str(path))]
    return layers, found.sentences(path.name)
