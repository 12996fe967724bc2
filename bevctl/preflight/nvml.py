"""The only place that talks to NVML: what it says as plain values, and what it does not say as `NotReported`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Value = TypeVar("Value")

_THERMAL = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown"}
_POWER = {0x04: "software power cap", 0x08: "hardware slowdown", 0x80: "power brake"}
SLOWDOWNS = {**_THERMAL, **_POWER}
"""Bits of the clocks' event reasons (nvml.h, nvmlClocksEventReason*) that cost speed."""
POWER_CAP = 0x04
COMPUTE_PROHIBITED = 2
COMPUTE_EXCLUSIVE = 3
_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which pynvml defines as a tuple by mistake."""
_P2P_STATUS = (
    "ok",
    "chipset not supported",
    "GPU not supported",
    "topology not supported",
    "disabled",
    "not supported",
)
_MAX_NVLINKS = 18


@dataclass(frozen=True)
class NotReported:
    """In place of a value that NVML did not give."""

    reason: str
    supported: bool = True
    """False: this card or driver does not have the field at all."""


class NvmlUnavailable(Exception):
    """NVML does not work here.

    `present` tells whether a driver or an NVIDIA device is there nevertheless; `fix` what to do then.
    """

    def __init__(self, reason: str, present: bool, fix: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.present = present
        self.fix = fix


@dataclass(frozen=True)
class Memory:
    """Bytes of GPU memory."""

    total: int
    free: int


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists; `used` bytes are None where the driver does not tell."""

    pid: int
    used: int | None


@dataclass(frozen=True)
class RowRemap:
    """Memory rows replaced by spare ones after errors."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


@dataclass(frozen=True)
class MigInstance:
    """A slice of a GPU in MIG mode."""

    uuid: str
    memory: Memory | NotReported


@dataclass(frozen=True)
class Gpu:
    """One physical GPU, by its NVML index."""

    index: int
    uuid: str
    name: str
    lost: str = ""
    """Why it cannot be used at all; empty: it answers."""
    bus_id: str = ""
    minor: int | NotReported = NotReported("not asked")
    capability: tuple[int, int] | NotReported = NotReported("not asked")
    memory: Memory | NotReported = NotReported("not asked")
    processes: tuple[GpuProcess, ...] | NotReported = NotReported("not asked")
    ecc_uncorrected: int | NotReported = NotReported("not asked")
    """Uncorrected memory errors since the driver was loaded."""
    remap: RowRemap | NotReported = NotReported("not asked")
    retired_pending: bool | NotReported = NotReported("not asked")
    """Whether a page waits for a reboot to be retired; cards before Ampere."""
    clock_events: int | NotReported = NotReported("not asked")
    temperature: int | NotReported = NotReported("not asked")
    """Degrees Celsius."""
    compute_mode: int | NotReported = NotReported("not asked")
    mig: bool | NotReported = NotReported("not asked")
    mig_instances: tuple[MigInstance, ...] = ()
    nvlinks: int | NotReported = NotReported("not asked")
    """Active NVLink connections."""
    peers: Mapping[int, str | NotReported] = field(default_factory=dict)
    """Peer-to-peer access to other GPUs by their index: "ok" or what stands in the way."""

    def __str__(self) -> str:
        return f"GPU {self.index}"


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs, in NVML's order (that of the PCI bus)."""

    version: str | NotReported
    cuda: tuple[int, int] | NotReported
    """The newest CUDA version it runs."""
    gpus: tuple[Gpu, ...]


def device_traces(root: Path = Path("/")) -> list[str]:
    """Signs of an NVIDIA device or driver that do not need NVML: device nodes, the kernel module, PCI devices."""
    found = [str(path) for path in (root / "dev/nvidiactl", root / "proc/driver/nvidia/version") if path.exists()]
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(f"PCI device {device.name}")
    return found


def read_driver(root: Path = Path("/")) -> Driver:
    """Ask NVML for the driver and all GPUs; a GPU or a field that fails does not keep the others from being told.

    Raises NvmlUnavailable.
    """
    nvml = _started(root)
    try:
        count = _ask(nvml, nvml.nvmlDeviceGetCount)
        if isinstance(count, NotReported):
            raise NvmlUnavailable(f"the driver does not list its GPUs: {count.reason}", present=True)
        handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        return Driver(
            _ask(nvml, nvml.nvmlSystemGetDriverVersion),
            _map(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion), lambda v: (v // 1000, v % 1000 // 10)),
            tuple(_gpu(nvml, index, handles) for index in range(count)),
        )
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA shows a process, in its order, by CUDA_VISIBLE_DEVICES.

    As CUDA does, an entry that names no GPU hides itself and everything after it. A MIG instance stands for its GPU.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in text.split(",")):
        match = [gpu for gpu in gpus if _names(word, gpu)]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen


def _names(word: str, gpu: Gpu) -> bool:
    if word.isdigit():
        return int(word) == gpu.index
    if word.startswith("MIG-"):
        return any(instance.uuid.startswith(word) for instance in gpu.mig_instances)
    return word.startswith("GPU-") and gpu.uuid.startswith(word)


def _started(root: Path) -> ModuleType:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable(
            f"pynvml cannot be imported ({error})", bool(device_traces(root)), "Install it: pip install nvidia-ml-py."
        ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _unavailable(nvml, error.value, str(error), device_traces(root)) from error
    return nvml


def _unavailable(nvml: ModuleType, code: int, text: str, traces: list[str]) -> NvmlUnavailable:
    if code == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        if not traces:
            return NvmlUnavailable("no NVIDIA driver and no NVIDIA device on this machine", present=False)
        reason = f"an NVIDIA device is here ({traces[0]}), but the driver's library libnvidia-ml.so.1 is not"
        return NvmlUnavailable(
            reason, True, "Install the NVIDIA driver; in a container, start it with the NVIDIA runtime (--gpus all)."
        )
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        reason = "the driver in the kernel and the driver's library are of different versions"
        return NvmlUnavailable(reason, True, "Reboot, or reload the nvidia kernel modules: the driver was updated.")
    if code == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        reason = "the NVIDIA driver is installed, but not loaded"
        return NvmlUnavailable(reason, True, "Load it (modprobe nvidia), or say --device cpu.")
    return NvmlUnavailable(f"the NVIDIA driver does not answer: {text}", True, "See what nvidia-smi says.")


def _ask(nvml: ModuleType, call: Callable[..., Any], *arguments: Any) -> Any:
    """The call's value, or NotReported; a handle that is NotReported is passed on."""
    for argument in arguments:
        if isinstance(argument, NotReported):
            return argument
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        missing = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return NotReported(str(error), supported=error.value not in missing)


def _map(value: Value | NotReported, function: Callable[[Value], Any]) -> Any:
    return value if isinstance(value, NotReported) else function(value)


def _gpu(nvml: ModuleType, index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]

    def ask(name: str, *arguments: Any) -> Any:
        return _ask(nvml, getattr(nvml, name), handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo")
    uuid, name, bus = ask("nvmlDeviceGetUUID"), ask("nvmlDeviceGetName"), ask("nvmlDeviceGetPciInfo")
    mig = _map(ask("nvmlDeviceGetMigMode"), lambda modes: bool(modes[0]))
    return Gpu(
        index,
        uuid=uuid if isinstance(uuid, str) else "",
        name=name if isinstance(name, str) else "unknown model",
        lost=_lost(handle, memory),
        bus_id="" if isinstance(bus, NotReported) else bus.busId,
        minor=ask("nvmlDeviceGetMinorNumber"),
        capability=ask("nvmlDeviceGetCudaComputeCapability"),
        memory=_map(memory, lambda m: Memory(m.total, m.free)),
        processes=_processes(nvml, handle),
        ecc_uncorrected=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap=_map(ask("nvmlDeviceGetRemappedRows"), lambda r: RowRemap(r[0], r[1], bool(r[2]), bool(r[3]))),
        retired_pending=_map(ask("nvmlDeviceGetRetiredPagesPendingStatus"), bool),
        clock_events=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        temperature=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        compute_mode=ask("nvmlDeviceGetComputeMode"),
        mig=mig,
        mig_instances=_mig_instances(nvml, handle) if mig is True else (),
        nvlinks=_nvlinks(nvml, handle),
        peers={other: _peer(nvml, handle, handles[other]) for other in range(len(handles)) if other != index},
    )


def _lost(handle: Any, memory: Any) -> str:
    """Why the GPU cannot be used: it has no handle, or it has the field of its memory's size and does not tell it."""
    refused = next((v for v in (handle, memory) if isinstance(v, NotReported) and v.supported), None)
    return refused.reason if refused else ""


def _processes(nvml: ModuleType, handle: Any) -> tuple[GpuProcess, ...] | NotReported:
    found = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if isinstance(found, NotReported) and not found.supported:
        found = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return _map(found, lambda entries: tuple(GpuProcess(entry.pid, entry.usedGpuMemory) for entry in entries))


def _mig_instances(nvml: ModuleType, handle: Any) -> tuple[MigInstance, ...]:
    count = _ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    instances = []
    for index in range(0 if isinstance(count, NotReported) else count):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        uuid = _ask(nvml, nvml.nvmlDeviceGetUUID, instance)
        if isinstance(uuid, str):
            memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, instance)
            instances.append(MigInstance(uuid, _map(memory, lambda m: Memory(m.total, m.free))))
    return tuple(instances)


def _nvlinks(nvml: ModuleType, handle: Any) -> int | NotReported:
    states = [_ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_NVLINKS)]
    told = [state for state in states if not isinstance(state, NotReported)]
    return sum(told) if told else states[0]


def _peer(nvml: ModuleType, handle: Any, other: Any) -> str | NotReported:
    status = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handle, other, _P2P_READ)
    return _map(status, lambda s: _P2P_STATUS[s] if s < len(_P2P_STATUS) else "unknown")
