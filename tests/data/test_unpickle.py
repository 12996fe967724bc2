from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bevctl.data.unpickle import load_pickle
from bevctl.errors import BevctlError, ExitCode


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_values_and_arrays_come_back(tmp_path: Path, protocol: int) -> None:
    value: dict[str, Any] = {
        "array": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "names": np.array(["car", "bus"]),
        "objects": np.array(["car", None], dtype=object),
        "scalar": np.float32(1.5),
        "flag": np.bool_(True),
        "plain": [1, 2.5, "text", b"bytes", None, (True, {3, 4}), frozenset({5}), OrderedDict(a=1)],
    }
    loaded = load_pickle(_write(tmp_path / "a.pkl", pickle.dumps(value, protocol=protocol)))
    for key in ("array", "fortran", "names", "objects"):
        np.testing.assert_array_equal(loaded[key], value[key])
    assert loaded["scalar"] == 1.5
    assert isinstance(loaded["scalar"], np.float32)
    assert loaded["flag"]
    assert loaded["plain"] == value["plain"]


def test_arrays_under_the_module_names_of_numpy_2(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.int64)
    # protocol 0 spells module names out as lines of text
    data = pickle.dumps([array, np.float64(2.5)], protocol=0).replace(b"numpy.core.", b"numpy._core.")
    assert b"numpy._core.multiarray" in data
    loaded = load_pickle(_write(tmp_path / "a.pkl", data))
    np.testing.assert_array_equal(loaded[0], array)
    assert loaded[1] == 2.5


class _Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, np.load, np.frombuffer, __import__])
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, function: Any) -> None:
    argument = str(tmp_path / "made") if function is os.mkdir else "1"
    path = _write(tmp_path / "a.pkl", pickle.dumps({"infos": [_Call(function, argument)]}))
    with pytest.raises(BevctlError, match=f"asks to run '.*{function.__name__}'") as caught:
        load_pickle(path)
    assert caught.value.code == ExitCode.USAGE
    assert not (tmp_path / "made").exists()


def test_the_array_constructor_itself_cannot_be_called(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.pkl", pickle.dumps(_Call(np.ndarray, (10**9,))))
    with pytest.raises(BevctlError, match="not a readable pickle"):
        load_pickle(path)


def test_other_text_codecs_are_refused(tmp_path: Path) -> None:
    import _codecs

    path = _write(tmp_path / "a.pkl", pickle.dumps(_Call(_codecs.encode, "text", "rot13")))
    with pytest.raises(BevctlError, match="rot13"):
        load_pickle(path)


def test_object_scalars_are_refused(tmp_path: Path) -> None:
    scalar = np.float64(0).__reduce__()[0]
    path = _write(tmp_path / "a.pkl", pickle.dumps(_Call(scalar, np.dtype(object), b"x")))
    with pytest.raises(BevctlError, match="unusual scalar"):
        load_pickle(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_truncated_files_are_an_error(tmp_path: Path, share: float) -> None:
    data = pickle.dumps({"infos": [np.arange(100)] * 5})
    path = _write(tmp_path / "a.pkl", data[: int(len(data) * share)])
    with pytest.raises(BevctlError, match="not a readable pickle"):
        load_pickle(path)


def test_missing_files_and_folders_are_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pkl", tmp_path):
        with pytest.raises(BevctlError, match="Cannot read"):
            load_pickle(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=60))
def test_noise_raises_nothing_else(tmp_path: Path, data: bytes) -> None:
    path = _write(tmp_path / "noise.pkl", data)
    with suppress(BevctlError):
        load_pickle(path)
