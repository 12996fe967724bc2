"""How long a training step takes here."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time

import torch

from bevctl.config.schema import Config
from bevctl.engine.dist import World
from bevctl.engine.run import build_parts


def time_steps(config: Config, dtype: str, device: torch.device, steps: int) -> float:
    """Median seconds of `steps` training steps in `dtype` (fp16, bf16 or fp32), each on a batch of its own.

    Point clouds differ in size, and some libraries prepare anew for each size. A first step warms up and is not
    counted. Data loading is not part of it.
    """
    config = dataclasses.replace(
        config,
        precision=dataclasses.replace(config.precision, dtype=dtype),
        train=dataclasses.replace(config.train, workers=0),
    )
    parts = build_parts(config, World(), device)
    batches = [batch.to(device) for batch in itertools.islice(parts.loader(0, 0), steps + 1)]
    model, optimizer = parts.state.model.train(), parts.state.optimizer
    seconds = []
    for batch in batches:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with parts.precision.autocast():
            losses = model(batch)
        torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
