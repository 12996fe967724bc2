"""Time: waiting for data, iterations that get slower, and ones that are slow throughout; memory that grows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.history import Column
from bevctl.monitor.view import Trouble, View

DATA_SHARE = 0.25
"""Share of an iteration spent waiting for data above which the loader is the bottleneck."""
SLOWER = 1.25
LEAST_RECORDS = 20
CHUNKS = 10
SLOW_S = 6.0
"""Seconds of computing an iteration; the models of this field take 0.5 to 2.7 on the GPUs they are trained on."""
PAUSE = 8.0
"""Factor over the median at which an iteration is a pause, such as an evaluation that a timer counted in."""
LEAK = 0.03
LEAST_LEAK_GIB = 0.2


def waiting_for_data(view: View) -> Iterator[Trouble]:
    """A large share of the time goes to waiting for the data loader."""
    history = view.warm
    data, total = history.column("data_time_s"), history.column("iter_time_s")
    kept = np.isfinite(data) & np.isfinite(total) & (total > 0)
    if kept.sum() < 3:
        return
    shares = data[kept] / total[kept]
    share = float(np.median(shares[-100:]))
    if share < DATA_SHARE:
        return
    yield Trouble(
        Severity.WARN,
        f"{share:.0%} of the time is spent waiting for data",
        (
            Evidence("data_time_s", f"median {np.median(data[kept][-100:]):.3g} s"),
            Evidence("iter_time_s", f"median {np.median(total[kept][-100:]):.3g} s"),
        ),
        "The loading processes cannot keep up with the GPU: too few of them, slow storage, or too few cores.",
        "Raise --workers (train.workers), move the data to faster storage, or give the job more cores.",
        history.iters[kept][0],
    )


def _chunks(values: Column) -> Column:
    """Medians of CHUNKS parts in order."""
    return np.array([np.median(part) for part in np.array_split(values, CHUNKS)])


def slowing(view: View) -> Iterator[Trouble]:
    """Iterations take longer and longer."""
    iters, times = view.warm.finite("iter_time_s")
    kept = times <= PAUSE * np.median(times) if len(times) else times > 0
    iters, times = iters[kept], times[kept]
    if len(times) < LEAST_RECORDS:
        return
    levels = _chunks(times)
    early, late = float(np.median(levels[: CHUNKS // 2])), float(np.median(levels[-2:]))
    scatter = 1.4826 * float(np.median(np.abs(np.diff(times))))
    if late < SLOWER * early or late < early + 4 * scatter or levels[-2:].min() <= levels[: CHUNKS // 2].max():
        return
    first = iters[np.array_split(np.arange(len(times)), CHUNKS)[int(np.argmax(levels > (early + late) / 2))][0]]
    data = view.warm.column("data_time_s")
    yield Trouble(
        Severity.WARN,
        f"Iterations became slower: {early:.3g} s at first, {late:.3g} s now",
        (
            Evidence("iter_time_s", "medians of ten parts: " + ", ".join(f"{level:.3g}" for level in levels)),
            *_data_grew(data[np.isfinite(data)], late - early),
        ),
        "A leak, a neighbour on the machine, throttling by heat, or storage that slows down.",
        "Look at temperature, clocks and other processes of the GPU, at the host's memory and at the storage.",
        first,
    )


def _data_grew(data: Column, slower: float) -> Iterator[Evidence]:
    if len(data) >= LEAST_RECORDS:
        grown = float(np.median(data[-len(data) // 5 :]) - np.median(data[: len(data) // 2]))
        who = "the loader" if grown > slower / 2 else "computing, not the loader"
        yield Evidence("data_time_s", f"{grown:+.3g} s of {slower:+.3g} s: it is {who}")


def slow(view: View) -> Iterator[Trouble]:
    """Iterations take far longer than those of models of this kind, and not for want of data."""
    history = view.warm
    data, total = history.column("data_time_s"), history.column("iter_time_s")
    computing = total - np.where(np.isfinite(data), data, 0.0)
    kept = np.isfinite(computing)
    if kept.sum() < 2 or float(np.median(computing[kept])) < SLOW_S:
        return
    seconds = float(np.median(computing[kept]))
    eta = view.progress.eta_s
    yield Trouble(
        Severity.WARN,
        f"An iteration takes {np.median(total[kept]):.3g} s",
        (
            Evidence("iter_time_s", f"{seconds:.3g} s of it are computing, so that more loading processes do not help"),
            *([Evidence("eta", f"{eta / 86400:.1f} days")] if eta else []),
        ),
        "Known models of this kind take 0.5 to 2.7 s. Usual reasons: a GPU shared with other jobs, layers that fell "
        "back to the CPU, cuDNN choosing anew for every shape, a debugging switch (CUDA_LAUNCH_BLOCKING, anomaly "
        "detection).",
        "Look at the GPU's use with nvidia-smi, and profile a few iterations.",
        history.iters[kept][0],
    )


def timer(view: View) -> Iterator[Trouble]:
    """Single records right after an evaluation whose time includes it."""
    iters, times = view.warm.finite("iter_time_s")
    if len(times) < LEAST_RECORDS:
        return
    pauses = iters[times >= PAUSE * np.median(times)]
    evaluations = [v.iter for v in view.log.validations if v.iter is not None]
    near = [i for i in pauses if any(0 < i - e <= 2 * view.history.interval for e in evaluations)]
    if not near:
        return
    yield Trouble(
        Severity.INFO,
        f"The iteration time right after {len(near)} of {len(evaluations)} evaluations includes the evaluation",
        (Evidence(view.where(near[0]), f"{times[iters == near[0]][0]:.3g} s; median {np.median(times):.3g} s"),),
        "The timer of this framework runs on while it evaluates. Speed and ETA shown here leave these records out.",
        None,
        near[0],
    )


def memory_growth(view: View) -> Iterator[Trouble]:
    """GPU memory grows steadily; a peak that rises now and then, as rare large batches come, is none of it."""
    start = view.starts[-1] if view.starts else 0.0
    iters, memory = view.warm.after(start).finite("memory_gib")
    if len(memory) < LEAST_RECORDS:
        return
    half = memory[len(memory) // 2 :]
    levels = _chunks(memory)
    growth = float(levels[-1] - levels[CHUNKS // 2])
    steady = (np.diff(levels) > 0).sum() >= CHUNKS - 2 and np.diff(levels)[-3:].min() > 0
    linear = growth > 0.35 * (levels[-1] - levels[0])
    many = (np.diff(half) > 0).sum() >= min(10, len(half) // 3)
    if not (steady and linear and many) or growth < max(LEAK * levels[0], LEAST_LEAK_GIB):
        return
    rate = growth / (iters[-1] - iters[len(memory) // 2])
    yield Trouble(
        Severity.WARN,
        f"GPU memory grows steadily: {levels[0]:.3g} GiB at first, {levels[-1]:.3g} GiB now",
        (
            Evidence("memory_gib", "medians of ten parts: " + ", ".join(f"{level:.3g}" for level in levels)),
            *_end_of_memory(view, float(levels[-1]), rate),
        ),
        "Something keeps tensors alive from iteration to iteration: a loss kept with its graph, a list of outputs.",
        "Keep numbers, not tensors (item(), detach()); memory_summary() of PyTorch shows what grows.",
        iters[0],
    )


def _end_of_memory(view: View, now: float, rate: float) -> Iterator[Evidence]:
    totals = [gpu.memory_total_gib for gpu in view.gpus if gpu.memory_total_gib]
    if totals and rate > 0:
        yield Evidence(
            "memory_gib", f"at this rate the GPU is full after {(min(totals) - now) / rate:.0f} more iterations"
        )
