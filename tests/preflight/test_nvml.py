"""What NVML says becomes plain values; what it does not say becomes `NotReported`, for that field of that card."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from bevctl.preflight.nvml import Memory, NotReported, NvmlUnavailable, RowRemap, device_traces, read_driver, visible
from tests.preflight import fake_nvml
from tests.preflight.fake_nvml import GIB, FakeCard, Refusal


def gpus(monkeypatch: pytest.MonkeyPatch, *cards: FakeCard):  # type: ignore[no-untyped-def]
    fake_nvml.install(monkeypatch, *cards)
    return read_driver().gpus


def test_a_card_that_answers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    card = fake_nvml.h200(free=100 * GIB, processes=[(41, 2 * GIB), (42, None)], remapped=(1, 2, 1, 0), clock_events=64)
    fake_nvml.install(monkeypatch, card, driver="570.86.10", cuda=12080)
    driver = read_driver()
    (gpu,) = driver.gpus
    assert (driver.version, driver.cuda) == ("570.86.10", (12, 8))
    assert (gpu.name, gpu.capability, gpu.lost) == ("NVIDIA H200", (9, 0), "")
    assert gpu.memory == Memory(140 * GIB, 100 * GIB)
    assert [(p.pid, p.used) for p in gpu.processes] == [(41, 2 * GIB), (42, None)]  # type: ignore[union-attr]
    assert gpu.remap == RowRemap(1, 2, pending=True, failed=False)
    assert (gpu.mig, gpu.nvlinks, gpu.clock_events) == (False, 18, 64)


def test_a_field_that_a_card_does_not_have_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = gpus(monkeypatch, fake_nvml.silent())
    assert gpu.lost == ""
    assert gpu.memory == Memory(24 * GIB, 24 * GIB - GIB // 2)
    for value in (gpu.processes, gpu.ecc_uncorrected, gpu.remap, gpu.clock_events, gpu.compute_mode, gpu.mig):
        assert isinstance(value, NotReported)
        assert not value.supported
        assert "Not Supported" in value.reason


def test_a_field_that_fails_is_told_from_one_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = gpus(monkeypatch, fake_nvml.h200(ecc_uncorrected=Refusal(pynvml.NVML_ERROR_UNKNOWN)))
    assert isinstance(gpu.ecc_uncorrected, NotReported)
    assert gpu.ecc_uncorrected.supported


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = gpus(monkeypatch, fake_nvml.h200(), fake_nvml.lost(), fake_nvml.h200())
    assert "lost" in second.lost.lower()
    assert isinstance(second.capability, NotReported)
    assert (first.lost, third.lost) == ("", "")
    assert first.peers[2] == "ok"
    assert isinstance(first.peers[1], NotReported)


def test_the_instances_of_a_gpu_in_mig_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = gpus(monkeypatch, fake_nvml.a100_mig())
    assert gpu.mig is True
    assert [(i.uuid, i.memory) for i in gpu.mig_instances] == [
        ("MIG-aaaa", Memory(20 * GIB, 19 * GIB)),
        ("MIG-bbbb", Memory(10 * GIB, 9 * GIB)),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("0,7,1", [0]),
        ("-1", []),
        ("GPU-00000002", [2]),
        ("GPU-0000000", []),
        ("MIG-bbbb", [1]),
        ("none", []),
    ],
)
def test_the_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: list[int]) -> None:
    three = gpus(monkeypatch, fake_nvml.h200(), fake_nvml.a100_mig(), fake_nvml.h200())
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert [gpu.index for gpu in visible(three, environ)] == expected


def pci_device(root: Path, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_traces_of_a_device_without_nvml(tmp_path: Path) -> None:
    assert device_traces(tmp_path) == []
    pci_device(tmp_path, "0x10de", "0x030200")
    assert device_traces(tmp_path) == ["PCI device 0000:3b:00.0"]


@pytest.mark.parametrize(("vendor", "kind"), [("0x8086", "0x030000"), ("0x10de", "0x040300"), ("0x10de", "0x020000")])
def test_other_devices_are_no_gpu(tmp_path: Path, vendor: str, kind: str) -> None:
    pci_device(tmp_path, vendor, kind)
    assert device_traces(tmp_path) == []


def unavailable(monkeypatch: pytest.MonkeyPatch, code: int, root: Path) -> NvmlUnavailable:
    fake_nvml.install(monkeypatch, init=code)
    with pytest.raises(NvmlUnavailable) as caught:
        read_driver(root)
    return caught.value


def test_no_driver_and_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = unavailable(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, tmp_path)
    assert not error.present
    assert "no NVIDIA driver and no NVIDIA device" in error.reason


def test_a_device_without_a_driver_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pci_device(tmp_path, "0x10de", "0x030200")
    error = unavailable(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, tmp_path)
    assert error.present
    assert "0000:3b:00.0" in error.reason
    assert "--gpus all" in error.fix


@pytest.mark.parametrize(
    ("code", "reason", "fix"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions", "Reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_work_is_present(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, reason: str, fix: str
) -> None:
    error = unavailable(monkeypatch, code, tmp_path)
    assert error.present
    assert reason in error.reason
    assert fix in error.fix
