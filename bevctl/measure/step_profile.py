"""One training step under instruments: time by part, the device's work, number formats, waits with file and line."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from bevctl.measure.kernel_record import COPY, KERNEL, PART, WAIT, KernelRecord, Span, summarise
from bevctl.measure.part_clock import PartClock
from bevctl.measure.profiler import profiled
from bevctl.numerics.census import Census

_PART = "bevctl part: "
_PRODUCTS = ("mm", "conv", "attention", "linear", "einsum")
_WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_LOADED = 6
"""Batches that are awaited to see how long loading takes."""


@dataclass(frozen=True)
class Workload:
    """A training step that can be run again and again.

    The model takes a batch and returns losses under `loss/<task>/…`.
    """

    model: nn.Module
    parts: Sequence[str]
    """Names of submodules to tell apart."""
    device: torch.device
    step: Callable[[], object]
    """One whole step on a batch that is at hand."""
    forward: Callable[[], object]
    """Its forward pass with the losses, under the step's autocast, without recorded or compiled parts."""
    precision: str
    batch: int
    load: Callable[[], object] | None = None
    """Waits for the next batch of the loader; None where there is no data set."""


@dataclass(frozen=True)
class StepProfile:
    """What was seen, in seconds a step."""

    precision: str
    batch: int
    seconds: float
    """Of a step whose batch is at hand."""
    split: Mapping[str, float]
    """By the names of `PartClock`; they add up to the step."""
    products: float
    """In matrix products, convolutions and attention."""
    idle: float
    """Without any operation: on a GPU without a kernel, on a CPU in Python."""
    census: Census
    waits: Sequence[tuple[str, int]] = ()
    """Lines of code (file:line) at which the host waits for the device, and how often."""
    kernels: KernelRecord | None = None
    """None on a CPU."""
    data_wait: float | None = None
    """Wait for the next batch while steps run; None without a loader."""

    @property
    def iteration(self) -> float:
        """Seconds of a step with the wait for its batch."""
        return self.seconds + (self.data_wait or 0.0)

    @property
    def optimizer(self) -> float:
        return self.split.get("optimizer", 0.0)

    def of_part(self, part: str) -> float:
        """Forward and backward pass of a part of the model."""
        return sum(self.split.get(f"{phase}/{part}", 0.0) for phase in ("forward", "backward"))

    def parts(self) -> Counter[str]:
        """Forward and backward seconds by part."""
        found: Counter[str] = Counter()
        for name, seconds in self.split.items():
            part = name.partition("/")[2]
            if part:
                found[part] += seconds  # type: ignore[assignment]
        return found


def profile_step(work: Workload, steps: int) -> StepProfile:
    """Runs a few steps plain, then some under each instrument; the first two warm up."""
    for _ in range(2):
        work.step()
    clock = PartClock(work.model, work.parts, work.device)
    with clock.attached():
        for _ in range(steps):
            with clock.step():
                work.step()
    seconds = _plain_seconds(work, steps)
    marked = _medians(clock.seconds())
    # The marks themselves take time, which counts on a CPU.
    split = {name: value * seconds / max(sum(marked.values()), 1e-9) for name, value in marked.items()}
    with Census(work.model, work.device.type) as census, torch.no_grad():
        work.forward()
    kernels = _kernels(work, steps) if work.device.type == "cuda" else None
    products, idle = _on_cpu(work, seconds) if kernels is None else (kernels.products, max(seconds - kernels.busy, 0.0))
    waits = _sites_on_gpu(work) if kernels is not None else ()
    return StepProfile(
        precision=work.precision,
        batch=work.batch,
        seconds=seconds,
        split=split,
        products=products,
        idle=idle,
        census=census,
        waits=waits or [(str(place), group.waits) for place, group in census.places() if group.waits],
        kernels=kernels,
        data_wait=_data_wait(work),
    )


def _medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for times in measured for name in times)
    return {name: statistics.median(times.get(name, 0.0) for times in measured) for name in names}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _plain_seconds(work: Workload, steps: int) -> float:
    _synchronise(work.device)
    started = time.perf_counter()
    for _ in range(steps):
        work.step()
    _synchronise(work.device)
    return (time.perf_counter() - started) / steps


def _data_wait(work: Workload) -> float | None:
    if work.load is None:
        return None
    waits = []
    for _ in range(_LOADED):
        started = time.perf_counter()
        work.load()
        waits.append(time.perf_counter() - started)
        work.step()
        _synchronise(work.device)
    return statistics.median(waits[1:])


def _on_cpu(work: Workload, seconds: float) -> tuple[float, float]:
    """Seconds of products, and those outside of operations, as far as the profiler's own time lets one tell."""
    with profiled(ProfilerActivity.CPU) as profiler:
        started = time.perf_counter()
        work.step()
        whole = time.perf_counter() - started
    operations = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
    busy = sum(event.self_cpu_time_total for event in operations) / 1e6
    products = sum(e.self_cpu_time_total for e in operations if any(word in e.key for word in _PRODUCTS)) / 1e6
    scale = seconds / max(whole, busy, 1e-9)
    return products * scale, max(seconds - busy * scale, 0.0)


def _kernels(work: Workload, steps: int) -> KernelRecord:
    with _named_parts(work):
        work.step()
        _synchronise(work.device)
        with profiled(ProfilerActivity.CPU, ProfilerActivity.CUDA) as profiler:
            started = time.perf_counter()
            for _ in range(steps):
                work.step()
            _synchronise(work.device)
            seconds = time.perf_counter() - started
    events: Any = profiler.profiler
    return summarise(list(_spans(events.kineto_results.events())), steps, seconds)


def _spans(events: Sequence[Any]) -> Iterator[Span]:
    """What of the profiler's events matters here."""
    for event in events:
        name, start = event.name(), event.start_ns() / 1e9
        end = start + event.duration_ns() / 1e9
        if event.device_type() == DeviceType.CUDA:
            if not name.startswith((_PART, "Optimizer.", "ProfilerStep")):  # annotations, which are drawn there too
                yield Span(COPY if name.startswith(("Memcpy", "Memset")) else KERNEL, name, start, end)
        elif name.startswith(_PART):
            yield Span(PART, name.removeprefix(_PART), start, end)
        elif name.startswith(_WAITING) and not name.startswith("cudaMemcpyAsync"):
            yield Span(WAIT, name, start, end)


@contextlib.contextmanager
def _named_parts(work: Workload) -> Iterator[None]:
    """Ranges in the profiler's record for each part's forward pass, and for the losses."""
    open_ranges: list[Any] = []

    def enter(name: str) -> None:
        open_ranges.append(record_function(f"{_PART}{name}").__enter__())

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles: list[Any] = [
        work.model.register_forward_pre_hook(lambda *_: enter("forward")),
        work.model.register_forward_hook(leave),
    ]
    for part in work.parts:
        module = work.model.get_submodule(part)
        handles.append(module.register_forward_pre_hook(lambda *_, part=part: enter(part)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sites_on_gpu(work: Workload) -> list[tuple[str, int]]:
    """Lines at which a whole step waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    _synchronise(work.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    told = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    return Counter(f"{warning.filename}:{warning.lineno}" for warning in told).most_common()
