"""What guard and recorder cost a training step: python tests/bench/bench_guard.py [--config bevfusion_det].

Runs blocks of steps in turn: bare ones (forward, backward, clip, AdamW: nothing is checked, kept or undone) and those
of the trainer (found_inf on the device, BatchNorm statistics kept, outcome read a step late, random states, ring,
classifier, records made, heartbeat written). Prints both medians, the paired difference with its spread, and how often
each makes the host wait for the GPU. Exits 1 where the difference is above 1 % of a step, or the trainer waits more
often than once a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bevctl.batch import AnyBatch
from bevctl.config.load import load
from bevctl.config.schema import Config
from bevctl.engine.determinism import algorithms
from bevctl.engine.dist import World
from bevctl.engine.guard import NonfiniteGuard, Policy
from bevctl.engine.nonfinite import Classifier
from bevctl.engine.recorder import Recorder
from bevctl.engine.signals import StopRequest
from bevctl.engine.step import TrainStep, total_loss
from bevctl.engine.trainer import Plan, Trainer
from bevctl.measure.bench_inputs import make_inputs
from bevctl.measure.timing import build_step
from bevctl.runs.heartbeat import Heartbeat

LIMIT = 0.01
_ENDLESS = 10**9


class _Silence:
    """A journal that keeps nothing."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda *_, **__: None


def trainer_of(step: TrainStep, config: Config, batches: Sequence[AnyBatch], folder: Path) -> Trainer:
    """The trainer over `batches` again and again; only its heartbeat is written, to `folder`."""
    return Trainer(
        step=step,
        plan=Plan(iters_per_epoch=_ENDLESS, stop_at=_ENDLESS),
        world=World(),
        loader_for=lambda _, __: itertools.cycle(batches),
        recorder=Recorder(World(), step.device, config.train.batch, _ENDLESS, 0),
        classifier=Classifier.of(step.state, fresh=True),
        guard=NonfiniteGuard(Policy.of(config.train), step.state.scaler.dynamic),
        journal=_Silence(),
        heartbeat=Heartbeat(folder, 0, time.time(), print),
        stop=StopRequest(),
    )


def bare_step(step: TrainStep, batch: AnyBatch, nothing_found: torch.Tensor) -> None:
    """A step that trusts its numbers."""
    step.state.optimizer.zero_grad(set_to_none=True)
    total = total_loss(step._forward(step._feed(batch)))
    step.state.scaler.scale(total).backward()
    if not step._kernels.prepare():
        raise RuntimeError("the optimizer does not run in one pass here, so that there is nothing to compare with")
    inverse = step.state.scaler.inverse
    norm = torch.linalg.vector_norm(step._kernels.norms(inverse))
    step._kernels.step(inverse * step._clip_factor(norm), nothing_found)


def timed(run: Callable[[], object], steps: int) -> float:
    """Seconds a step of `steps` calls, from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def waits(run: Callable[[], object], steps: int) -> float:
    """How often the host waits for the device in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught) / steps


def runs_of(config: Config, batches: Sequence[AnyBatch], dtype: str, folder: Path) -> dict[str, Callable[[], object]]:
    """A bare step and one of the trainer, on the same model."""
    step = build_step(config, dtype, torch.device("cuda"))
    trainer, cycle = trainer_of(step, config, batches, folder), itertools.cycle(batches)
    groups = trainer._groups(0, 0)
    nothing_found = torch.zeros((), device="cuda")
    return {
        "trainer": lambda: trainer._train_step(*trainer._next(groups)),
        "bare": lambda: bare_step(step, next(cycle), nothing_found),
    }


def main(arguments: Sequence[str] | None = None, batches: Sequence[AnyBatch] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bevfusion_det")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--block", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each kind")
    options = parser.parse_args(arguments)
    # A scale that holds from the first step: nothing keeps a bare step from overflowing.
    scale = {"precision.init_scale": 1024.0}
    config = load(options.config, options={"train.batch": options.batch, **scale}).config
    batches = make_inputs(config, 2, pin=True).batches if batches is None else batches
    seconds: dict[str, list[float]] = {"trainer": [], "bare": []}
    with algorithms(deterministic=False), tempfile.TemporaryDirectory() as folder:
        runs = runs_of(config, batches, options.dtype, Path(folder))
        for run in runs.values():
            timed(run, 6)
        for number in range(options.blocks):
            for name in sorted(runs, reverse=number % 2 == 1):
                seconds[name].append(timed(runs[name], options.block))
        waited = {name: waits(run, 4) for name, run in runs.items()}
    bare, whole = (statistics.median(seconds[name]) for name in ("bare", "trainer"))
    shares = [t / b - 1 for t, b in zip(seconds["trainer"], seconds["bare"], strict=True)]
    share = statistics.median(shares)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{config.name}, {options.dtype}, batch {options.batch}")
    print(f"bare {1e3 * bare:.2f} ms, with guard and recorder {1e3 * whole:.2f} ms a step")
    print(f"difference {share:+.2%} of a step (pairs from {min(shares):+.2%} to {max(shares):+.2%})")
    print(f"the host waits {waited['bare']:.1f} times in a bare step, {waited['trainer']:.1f} times in the trainer's")
    return int(share > LIMIT or waited["trainer"] > waited["bare"] + 1)


if __name__ == "__main__":
    sys.exit(main())
