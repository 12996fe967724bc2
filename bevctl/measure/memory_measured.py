"""The memory of real training steps on a GPU: its peak, and whose tensors made it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.engine.cuda_graphs import recordings
from bevctl.engine.determinism import algorithms
from bevctl.engine.graph_memory import graph_pools
from bevctl.engine.stand_in import Report
from bevctl.engine.step import TrainStep
from bevctl.measure.memory_allocator import tensor_bytes
from bevctl.measure.memory_places import INPUTS, part_of, watch
from bevctl.measure.memory_timeline import Timeline
from bevctl.measure.timing import build_step, step_seconds

CONTEXT = "CUDA context"
_EVENTS = 1_000_000
"""Allocations and frees that are recorded at most; a step has some ten thousand."""


@dataclass(frozen=True)
class Measured:
    """Bytes of training steps in their steady state."""

    components: dict[str, int]
    """What the peak consisted of, under the names of `bevctl.measure.memory.Need`."""
    pools: dict[str, int]
    """Of that, the pool of each recorded module."""
    allocated: int
    """In tensors and in the pools of CUDA graphs."""
    reserved: int
    device: int
    """Of the whole card, as nvidia-smi shows it: other processes are included."""
    start_reserved: int
    """Reserved by the first steps, in which parts are proven and recorded and cuDNN tries its algorithms."""
    step_s: float
    """Median."""


def measure_memory(
    config: Config, precision: str, batches: Sequence[AnyBatch], device: torch.device, steps: int, report: Report
) -> Measured:
    """Trains for a few steps as `config` says in `precision` (fp16, bf16 or fp32), and looks at the allocator.

    Args:
        batches: in host memory; they come in turn.
        steps: steps timed, after each batch was there twice.
        report: gets what `build_step` reports.

    Raises:
        BevctlError: the device cannot do the precision.
        torch.cuda.OutOfMemoryError: the memory of the GPU does not suffice.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with algorithms(config.train.deterministic):
        step = build_step(config, precision, device, report)
        step_seconds(step, batches, 2 * len(batches))
        start_reserved = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = step_seconds(step, batches, steps)
        pools = graph_pools(device)
        allocated = torch.cuda.max_memory_allocated(device) + sum(pool.unused for pool in pools.values())
        reserved = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        recorded = {name: pools[r.pool].size for name, r in recordings(step.state.model).items() if r.pool in pools}
        context = {CONTEXT: max(total - free - torch.cuda.memory_reserved(device), 0)}
        components = _components(step, batches) | context
    return Measured(components, recorded, allocated, reserved, total - free, start_reserved, statistics.median(seconds))


def _components(step: TrainStep, batches: Sequence[AnyBatch]) -> dict[str, int]:
    """What the peak of a step with each of `batches` consists of: states, recordings, and tensors by part."""
    states = _states(step)
    recorded: Counter[str] = Counter()
    copies = in_pools = 0
    pools = graph_pools(step.device)
    for name, recording in recordings(step.state.model).items():
        copied = sum(map(tensor_bytes, recording.copies))
        pool = pools.get(recording.pool)
        recorded[part_of(name)] += copied + (pool.size if pool is not None else 0)
        copies += copied
    in_pools = sum(pool.size - pool.unused for pool in pools.values())
    alive = _alive(step, batches, outside=sum(states.values()) + copies + in_pools)
    parts = dict(sorted((alive + recorded).items(), key=lambda item: -item[1]))
    return {**states, **parts}


def _states(step: TrainStep) -> dict[str, int]:
    state = step.state
    average = sum(map(tensor_bytes, state.average.state_dict().values())) if state.average is not None else 0
    return {
        "parameters": sum(map(tensor_bytes, state.model.parameters())),
        "optimizer": sum(map(tensor_bytes, _optimizer_tensors(state.optimizer))),
        "buffers": sum(map(tensor_bytes, state.model.buffers())),
        **({"weight average": average} if average else {}),
    }


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.is_cuda)


def _alive(step: TrainStep, batches: Sequence[AnyBatch], outside: int) -> Counter[str]:
    """Tensors at the peak, by the part that made them, without `outside` bytes that are known otherwise."""
    timeline = Timeline()
    watch(step.state.model, timeline, ())
    torch.cuda.synchronize(step.device)
    before = torch.cuda.memory_allocated(step.device)
    torch.cuda.memory._record_memory_history(context=None, max_entries=_EVENTS)
    try:
        for number, batch in enumerate(batches):
            timeline.enter(INPUTS)
            step.run([batch], number)
        torch.cuda.synchronize(step.device)
        index = torch.cuda.current_device() if step.device.index is None else step.device.index
        events = torch.cuda.memory._snapshot()["device_traces"][index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return timeline.peak(events, max(before - outside, 0))
