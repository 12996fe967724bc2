from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from bevctl.monitor.gpus import GIB, Gpu, live_gpus


class NVMLError(Exception):
    """As the binding raises it."""


def fake_nvml(**answers: object) -> ModuleType:
    """A binding whose functions give `answers`, or raise those that are exceptions; NVML itself starts and stops."""
    module = ModuleType("pynvml")
    module.NVMLError, module.NVML_TEMPERATURE_GPU = NVMLError, 0  # type: ignore[attr-defined]
    for name, answer in {"Init": None, "Shutdown": None, **answers}.items():

        def call(*_: object, answer: object = answer) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        setattr(module, f"nvml{name}", call)
    return module


WHOLE = {
    "DeviceGetCount": 1,
    "DeviceGetHandleByIndex": "handle",
    "DeviceGetName": b"Tesla V100S",
    "DeviceGetMemoryInfo": SimpleNamespace(used=18 * GIB, total=32 * GIB),
    "DeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "DeviceGetPowerUsage": 231_000,
    "DeviceGetTemperature": 68,
    "DeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=7, usedGpuMemory=17 * GIB),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ],
}


def test_what_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**WHOLE))
    (gpu,) = live_gpus()
    assert gpu == Gpu(0, "Tesla V100S", 18.0, 32.0, 97.0, 231.0, 68.0, ((7, 17.0), (8, None)))
    assert gpu.document()["processes"] == [{"pid": 7, "memory_gib": 17.0}, {"pid": 8, "memory_gib": None}]


@pytest.mark.parametrize("silent", sorted(set(WHOLE) - {"DeviceGetCount", "DeviceGetHandleByIndex"}))
def test_a_field_that_a_card_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{**WHOLE, silent: NVMLError()}))
    (gpu,) = live_gpus()
    told = [gpu.memory_used_gib, gpu.utilization, gpu.power_w, gpu.temperature_c]
    assert told.count(None) == (silent not in ("DeviceGetName", "DeviceGetComputeRunningProcesses"))


@pytest.mark.parametrize("broken", ["Init", "DeviceGetCount", "DeviceGetHandleByIndex"])
def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{**WHOLE, broken: NVMLError()}))
    assert live_gpus() == ()


def test_without_the_binding_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert live_gpus() == ()
