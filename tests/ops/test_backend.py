"""The choice between Triton and torch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bevctl.errors import BevctlError
from bevctl.ops import backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    backend._choose.cache_clear()


def test_a_cpu_runs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not backend.use_triton(torch.zeros(1))
    assert backend.reason(CPU).startswith("torch operations")


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_capability_decides_on_cuda(capability: tuple[int, int], expected: bool) -> None:
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch("importlib.metadata.version", return_value="3.6.0"),
    ):
        assert backend._choose("auto", CUDA)[0] is expected


def test_triton_must_be_installed() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert backend._choose("auto", CUDA) == (False, "Triton is not installed")


@pytest.mark.parametrize(
    ("version", "expected"), [("3.0.0", False), ("3.2.1", False), ("3.3.1", True), ("4.0.0", True)]
)
def test_triton_must_be_recent(version: str, expected: bool) -> None:
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch("importlib.metadata.version", return_value=version),
    ):
        chosen, why = backend._choose("auto", CUDA)
    assert chosen is expected
    assert expected or version in why


def test_the_variable_and_the_block_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(backend.VARIABLE, "triton")
    with (
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch("importlib.metadata.version", return_value="3.6.0"),
    ):
        assert backend.use_triton(torch.zeros(1))
        with backend.forced("torch"):
            assert not backend.use_triton(torch.zeros(1))
        assert backend.use_triton(torch.zeros(1))


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with (
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch("importlib.metadata.version", return_value="3.6.0"),
        backend.forced("triton"),
        pytest.raises(BevctlError, match="no kernels for cpu"),
    ):
        backend.use_triton(torch.zeros(1))


def test_an_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "tritn")
    with pytest.raises(BevctlError, match="'tritn'") as raised:
        backend.use_triton(torch.zeros(1))
    assert "triton" in raised.value.hint
