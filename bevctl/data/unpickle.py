"""Reading pickled info files as data: only plain values and NumPy arrays, never code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.errors import BevctlError


class _ArrayType:
    """Stands for numpy.ndarray inside the pickle, so that nothing can call the real constructor on a raw buffer."""


def _empty_array(subtype: object, shape: object, typecode: object) -> NDArray[Any]:
    """The array that the pickle's next instruction fills through `ndarray.__setstate__`."""
    if subtype is not _ArrayType or shape != (0,) or typecode not in (b"b", "b"):
        raise pickle.UnpicklingError(f"unusual array constructor arguments {(subtype, shape, typecode)!r:.80}")
    return np.ndarray((0,), "b")


def _array_from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> NDArray[Any]:
    """Protocol-5 arrays; `frombuffer` itself refuses object types."""
    array = np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order if order in ("C", "F") else "C")
    return array if axis_order is None else array.transpose(axis_order)


def _scalar(dtype: Any, content: Any = None) -> Any:
    """A NumPy scalar from its bytes."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(content, bytes):
        raise pickle.UnpicklingError(f"unusual scalar of type {dtype!r:.80}")
    return np.frombuffer(content, dtype=dtype, count=1)[0]


def _latin1(text: Any, encoding: Any = "utf-8") -> bytes:
    """How Python 2 and old protocols store bytes; no other codec is looked up."""
    if not isinstance(text, str) or str(encoding).replace("-", "").lower() != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r:.40}")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("numpy", "dtype"): np.dtype,
        ("numpy", "ndarray"): _ArrayType,
        ("_codecs", "encode"): _latin1,
        ("collections", "OrderedDict"): OrderedDict,
    }
    for core in ("numpy.core", "numpy._core"):  # the name before and since NumPy 2
        table[f"{core}.multiarray", "_reconstruct"] = _empty_array
        table[f"{core}.multiarray", "scalar"] = _scalar
        table[f"{core}.numeric", "_frombuffer"] = _array_from_buffer
    for builtins in ("builtins", "__builtin__"):
        table[builtins, "set"] = set
        table[builtins, "frozenset"] = frozenset
        table[builtins, "complex"] = complex
    return table


PLAIN_VALUES = _allowed()
"""(module, name) in a pickle → what stands for it here."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in PLAIN_VALUES:
            raise _Refused(f"{module}.{name}")
        found: Callable[..., Any] = PLAIN_VALUES[module, name]
        return found


class _Refused(Exception):
    """A name outside the allow-list; its text is that name."""


def load_pickle(path: Path) -> Any:
    """The plain Python and NumPy values stored in a pickle; code in it is refused by name and never run.

    Raises BevctlError (exit 2) for a file that is missing, broken, or names anything but plain data.
    """
    try:
        with path.open("rb") as file:
            return _DataUnpickler(file).load()
    except _Refused as error:
        raise BevctlError(
            f"{path} asks to run {str(error)!r:.120}, which no info file needs; it was not run.",
            "Use a file that holds plain values and NumPy arrays only, or make one with `bevctl data prepare`.",
        ) from None
    except OSError as error:
        raise BevctlError(f"Cannot read {path}: {error.strerror or error}.", _HINT) from None
    except Exception as error:  # a broken pickle can raise nearly anything
        raise BevctlError(f"{path} is not a readable pickle: {type(error).__name__}: {error!s:.100}.", _HINT) from None


_HINT = (
    "Give an info file (*_infos_*.pkl): `bevctl data prepare` makes one from nuScenes tables, `bevctl data synth` "
    "makes a small set with its own."
)
