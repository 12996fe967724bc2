"""A simulated NVML: cards whose answers replace those of pynvml's own functions, with its constants and errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 2**30
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
LOST = pynvml.NVML_ERROR_GPU_IS_LOST


@dataclass(frozen=True)
class Refusal:
    """In place of an answer: the NVML error code that the call raises."""

    code: int


ABSENT = Refusal(NOT_SUPPORTED)
_DETAILS = ("processes", "ecc_uncorrected", "remapped", "clock_events", "temperature", "compute_mode", "peer")


@dataclass
class FakeInstance:
    """A MIG instance."""

    uuid: str
    total: int
    free: int


@dataclass
class FakeCard:
    """What one GPU answers, by pynvml's function; a `Refusal` is raised."""

    name: Any
    capability: Any
    total: Any
    free: Any = None
    """None: all but half a GiB."""
    uuid: str = ""
    processes: Any = field(default_factory=list)
    """(pid, bytes or None) of each."""
    ecc_uncorrected: Any = 0
    remapped: Any = (0, 0, 0, 0)
    retired_pending: Any = ABSENT
    clock_events: Any = 1
    temperature: Any = 41
    compute_mode: Any = 0
    mig_mode: Any = ABSENT
    instances: list[FakeInstance] = field(default_factory=list)
    nvlinks: Any = ABSENT
    peer: Any = 0
    handle: Any = None
    """A `Refusal` here: not even the handle is given."""


def v100s(**changes: Any) -> FakeCard:
    """Volta: page retirement instead of row remapping."""
    card = FakeCard("Tesla V100S-PCIE-32GB", (7, 0), 32 * GIB, remapped=ABSENT, retired_pending=0)
    return _changed(card, changes)


def t4(**changes: Any) -> FakeCard:
    return _changed(FakeCard("Tesla T4", (7, 5), 15 * GIB, remapped=ABSENT, retired_pending=0), changes)


def a100_mig(**changes: Any) -> FakeCard:
    """Ampere in MIG mode with two instances."""
    instances = [FakeInstance("MIG-aaaa", 20 * GIB, 19 * GIB), FakeInstance("MIG-bbbb", 10 * GIB, 9 * GIB)]
    card = FakeCard("NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB, mig_mode=[1, 1], instances=instances)
    return _changed(card, changes)


def h200(**changes: Any) -> FakeCard:
    return _changed(FakeCard("NVIDIA H200", (9, 0), 140 * GIB, mig_mode=[0, 0], nvlinks=18), changes)


def silent(**changes: Any) -> FakeCard:
    """A card that reports its name, capability and memory, and answers NotSupported to the rest."""
    card = _changed(FakeCard("NVIDIA GeForce", (8, 6), 24 * GIB), dict.fromkeys(_DETAILS, ABSENT))
    return _changed(card, changes)


def lost(**changes: Any) -> FakeCard:
    """A card that fell off the bus: every call on it fails."""
    gone = Refusal(LOST)
    card = _changed(FakeCard(gone, gone, gone, handle=gone), dict.fromkeys(_DETAILS, gone))
    return _changed(card, changes)


def _changed(card: FakeCard, changes: dict[str, Any]) -> FakeCard:
    for name, value in changes.items():
        assert hasattr(card, name), name
        setattr(card, name, value)
    return card


def install(
    monkeypatch: pytest.MonkeyPatch, *cards: FakeCard, init: int = 0, driver: str = "570.86", cuda: int = 12080
) -> list[FakeCard]:
    """Put the cards in place of the machine's; `init` is what nvmlInit fails with. Returns the cards, to be changed."""
    shown = list(cards)
    for index, card in enumerate(shown):
        card.uuid = card.uuid or f"GPU-{index:08d}"
    fake = _Functions(shown, init, driver, cuda)
    for name in (name for name in dir(fake) if name.startswith("nvml")):
        assert hasattr(pynvml, name), f"pynvml has no {name}"
        monkeypatch.setattr(pynvml, name, getattr(fake, name))
    return shown


def answer(value: Any) -> Any:
    """The value, or the error that stands for it."""
    if isinstance(value, Refusal):
        raise pynvml.NVMLError(value.code)
    return value


@dataclass
class _Functions:
    """The pynvml functions that bevctl calls; a handle is the card or the instance itself."""

    cards: list[FakeCard]
    init: int
    driver: str
    cuda: int

    def nvmlInit(self) -> None:
        if self.init:
            raise pynvml.NVMLError(self.init)

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        answer(self.cards[index].handle)
        return self.cards[index]

    def nvmlDeviceGetName(self, card: FakeCard) -> Any:
        return answer(card.name)

    def nvmlDeviceGetUUID(self, card: FakeCard | FakeInstance) -> Any:
        return card.uuid

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x3B + self.cards.index(card):02X}:00.0")

    def nvmlDeviceGetMinorNumber(self, card: FakeCard) -> int:
        return self.cards.index(card)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> Any:
        return answer(card.capability)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard | FakeInstance) -> Any:
        total = answer(card.total)
        return SimpleNamespace(total=total, free=total - GIB // 2 if card.free is None else answer(card.free))

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in answer(card.processes)]

    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses

    def nvmlDeviceGetTotalEccErrors(self, card: FakeCard, kind: int, counter: int) -> Any:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return answer(card.ecc_uncorrected)

    def nvmlDeviceGetRemappedRows(self, card: FakeCard) -> Any:
        return answer(card.remapped)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, card: FakeCard) -> Any:
        return answer(card.retired_pending)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> Any:
        return answer(card.clock_events)

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return answer(card.temperature)

    def nvmlDeviceGetComputeMode(self, card: FakeCard) -> Any:
        return answer(card.compute_mode)

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> Any:
        return answer(card.mig_mode)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return max(7, len(card.instances))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeInstance:
        if index >= len(card.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.instances[index]

    def nvmlDeviceGetNvLinkState(self, card: FakeCard, link: int) -> int:
        return int(link < answer(card.nvlinks))

    def nvmlDeviceGetP2PStatus(self, card: FakeCard, other: FakeCard, kind: int) -> Any:
        assert kind == 0
        assert other in self.cards
        return answer(card.peer)
