"""GPUs of this machine as NVML tells of them now; none where there is no driver or no binding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

GIB = 2**30

Value = TypeVar("Value")


@dataclass(frozen=True)
class Gpu:
    """One GPU; None where the card or the driver does not say."""

    index: int
    name: str
    memory_used_gib: float | None = None
    """What nvidia-smi shows, of all processes."""
    memory_total_gib: float | None = None
    utilization: float | None = None
    """Share of the last second in which a kernel ran, %."""
    power_w: float | None = None
    temperature_c: float | None = None
    processes: tuple[tuple[int, float | None], ...] = ()
    """Process id and GPU memory, GiB, of each process that computes."""

    def document(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        processes = [{"pid": pid, "memory_gib": memory} for pid, memory in self.processes]
        return {**self.__dict__, "processes": processes}


def live_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine now; empty where NVML cannot be asked."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[[], Value]) -> Value | None:
        try:
            return question()
        except nvml.NVMLError:
            return None

    name = ask(lambda: nvml.nvmlDeviceGetName(handle)) or "GPU"
    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    running = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_used_gib=memory.used / GIB if memory else None,
        memory_total_gib=memory.total / GIB if memory else None,
        utilization=float(rates.gpu) if rates else None,
        power_w=power / 1000 if power is not None else None,
        temperature_c=ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        processes=tuple((p.pid, p.usedGpuMemory / GIB if p.usedGpuMemory else None) for p in running),
    )
