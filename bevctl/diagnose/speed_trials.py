"""Remedies for slow steps, tried on the spot: what each really gives here."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bevctl.batch import AnyBatch
from bevctl.config.schema import Config
from bevctl.diagnose.rehearsal import changed
from bevctl.diagnose.report import Remedy, Table
from bevctl.engine.determinism import algorithms
from bevctl.errors import BevctlError
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.timing import build_step, float32_products, step_seconds
from bevctl.ops import backend

HELPS = 0.97
"""Time of a sample over that before, below which a remedy counts as one."""
_WARM_UP = 2
_LOADED = 6
"""Batches that are awaited from more loading processes."""


@dataclass(frozen=True)
class Attempt:
    """A change to try on the config's own step."""

    why: str
    set: Mapping[str, Any] = field(default_factory=dict)
    """As `train --set` takes it; empty where it is no setting."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """What the steps run in."""
    prepare: Callable[[nn.Module], object] = lambda _: None
    """What is done to the model first."""


@dataclass(frozen=True)
class Tried:
    """What became of it."""

    attempt: Attempt
    seconds: float | None
    """Of a sample; None where it did not run."""
    ratio: float | None
    """Over that without the change."""
    said: str = ""
    """Why it did not run."""

    def remedy(self) -> Remedy:
        verified = None if self.ratio is None else self.ratio < HELPS
        return Remedy(self.attempt.set, self.attempt.why, verified, self.ratio)


def attempts(config: Config, device: torch.device) -> list[Attempt]:
    """What is worth a try on `device`."""
    train = config.train
    found = [
        Attempt(f"batch {2 * train.batch} instead of {train.batch}", {"train.batch": 2 * train.batch}),
        Attempt("weights with channels last", prepare=_channels_last),
    ]
    if device.type != "cuda":
        return found
    graphs = not train.cuda_graphs
    kernels = "torch" if backend.reason(device).startswith("Triton") else "triton"
    return [
        *found,
        Attempt(f"CUDA graphs {'on' if graphs else 'off'}", {"train.cuda_graphs": graphs}),
        Attempt("TF32 for what stays FP32", around=lambda: float32_products(tf32=True)),
        Attempt("without cuDNN's search for the fastest algorithm", around=_without_search),
        Attempt(f"BEVCTL_KERNELS={kernels}", around=lambda: backend.forced(kernels)),
        Attempt("torch.compile", {"train.compile": True}),  # takes longest: with it the others would find no time
    ]


def try_remedies(
    config: Config, precision: str, device: torch.device, steps: int, limit_s: float, say: Callable[[str], None]
) -> tuple[float, list[Tried]]:
    """Seconds of a sample as the config is, and with each change.

    Args:
        limit_s: nothing more is begun after so many seconds.
        say: told what became of each.
    """
    ends = time.monotonic() + limit_s
    base = _seconds(config, precision, device, steps, Attempt("as it is"))
    tried = []
    for attempt in attempts(config, device):
        if time.monotonic() > ends:
            tried.append(Tried(attempt, None, None, "no time was left"))
            continue
        tried.append(_try(config, precision, device, steps, attempt, base))
        outcome = f"{tried[-1].ratio:.2f} × the time" if tried[-1].ratio is not None else tried[-1].said
        say(f"  {attempt.why}: {outcome}")
    return base, tried


def try_workers(config: Config, load: Callable[[Config], Iterator[object]], step_s: float, iteration_s: float) -> Tried:
    """More loading processes: what becomes of an iteration that waits for its data.

    Args:
        load: batches of a config's own loader.
        step_s: seconds of a step with its batch at hand, for which the loader is left to itself.
        iteration_s: seconds of an iteration as the config is.
    """
    workers = max(2 * config.train.workers, 4)
    attempt = Attempt(f"{workers} instead of {config.train.workers} loading processes", {"train.workers": workers})
    batches = load(changed(config, attempt.set))
    waits = []
    try:
        for _ in range(_LOADED):
            started = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - started)
            time.sleep(step_s)
    except (BevctlError, RuntimeError, OSError) as error:
        return Tried(attempt, None, None, f"it does not run here: {str(error).splitlines()[0][:120]}")
    seconds = step_s + statistics.median(waits[1:])
    return Tried(attempt, seconds / config.train.batch, seconds / iteration_s, "of an iteration with its data")


def _try(config: Config, precision: str, device: torch.device, steps: int, attempt: Attempt, base: float) -> Tried:
    try:
        seconds = _seconds(changed(config, attempt.set), precision, device, steps, attempt)
        return Tried(attempt, seconds, seconds / base)
    except torch.cuda.OutOfMemoryError:
        return Tried(attempt, None, None, "the memory does not suffice")
    except (BevctlError, RuntimeError) as error:
        return Tried(attempt, None, None, f"it does not run here: {str(error).splitlines()[0][:120]}")


def _seconds(config: Config, precision: str, device: torch.device, steps: int, attempt: Attempt) -> float:
    """Median time of a step over its samples."""
    batches: Sequence[AnyBatch] = make_inputs(config, 1, pin=device.type == "cuda").batches
    try:
        with algorithms(config.train.deterministic), attempt.around():
            step = build_step(dataclasses.replace(config, device=device.type), precision, device)
            attempt.prepare(step.state.model)
            step_seconds(step, batches, _WARM_UP)
            return statistics.median(step_seconds(step, batches, steps)) / config.train.batch
    finally:
        gc.collect()  # a recorded part and its module refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _channels_last(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def table(base: float, tried: Sequence[Tried]) -> Table:
    """Everything that was tried."""
    rows: list[tuple[str, float | None, float | None, str]] = [("as it is", 1e3 * base, 1.0, "")]
    rows += [(t.attempt.why, None if t.seconds is None else 1e3 * t.seconds, t.ratio, t.said) for t in tried]
    return Table("tried", "Remedies that were tried here", ("what", "ms_a_sample", "ratio", "note"), rows)
