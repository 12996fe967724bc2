"""Reading checkpoints, ours and other projects', as data: nothing that a file names is ever executed.

Ours load with torch's own weights-only reader. Files of mmengine also hold objects of its classes; those become inert
stand-ins. A name outside the allow-list is refused.
"""

from __future__ import annotations

import collections
import pickle
import struct
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from bevctl.data.unpickle import PLAIN_VALUES
from bevctl.errors import BevctlError

_INERT_PACKAGES = ("mmcv", "mmengine", "mmdet", "mmdet3d", "mmseg")
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
    OverflowError,
    MemoryError,
    AssertionError,
)
"""What a truncated or garbled file makes the readers raise."""


class Inert(dict[Any, Any]):
    """Stands in for an object of another project's class: takes its state, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.arguments = (args, kwargs)

    def __setstate__(self, state: object) -> None:
        self.state = state


_ALLOWED: dict[tuple[str, str], Any] = {
    **PLAIN_VALUES,
    ("collections", "defaultdict"): collections.defaultdict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class ForbiddenName(Exception):
    """A pickle asks for something outside the allow-list."""


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves the names in the allow-list; classes of the OpenMMLab projects become `Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module.split(".")[0] in _INERT_PACKAGES:
            return type(name.rpartition(".")[2], (Inert,), {"__module__": module})
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return getattr(torch.storage if module == "torch.storage" else torch, name)
        raise ForbiddenName(f"{module}.{name}")


def _restricted_pickle() -> types.ModuleType:
    """What torch.load takes for the pickle module."""
    module = types.ModuleType("bevctl_restricted_pickle")
    module.Unpickler = RestrictedUnpickler  # type: ignore[attr-defined]
    module.load = lambda file, **options: RestrictedUnpickler(file, **options).load()  # type: ignore[attr-defined]
    return module


def read_pickle(path: Path) -> Any:
    """The content of a file that torch.save wrote, tensors on the CPU.

    The CRC-32 of every record is checked first (torch.load itself does not), so that a truncated or damaged file is
    told before anything in it is interpreted.

    Raises:
        BevctlError: no such file, not a checkpoint, truncated, damaged, or it names a callable that is not allowed.
    """
    try:
        _check_records(path)
        return _load(path)
    except OSError as error:
        raise BevctlError(
            f"Cannot read the checkpoint {path}: {error.strerror or error}.", "Check the path."
        ) from error
    except ForbiddenName as error:
        raise BevctlError(
            f"{path} names {error}, which is not data; nothing of the file was executed.",
            "Do not load it elsewhere either, unless you trust where it comes from.",
        ) from error
    except _DAMAGE as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise BevctlError(
            f"{path} is not a readable checkpoint, it is truncated or damaged: {reason[:200]}.",
            "Use an older checkpoint, or copy the file again.",
        ) from error


def _check_records(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"PK\x03\x04":
        return  # torch's format before 1.6 has no checksums; reading it shows whether it is whole
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"checksum of {damaged} does not match")


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_restricted_pickle())
