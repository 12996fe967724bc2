"""How long a training step takes here."""

from __future__ import annotations

import dataclasses
import time

import torch

from bevctl.config.schema import Config
from bevctl.engine.dist import World
from bevctl.engine.run import build_parts


def time_steps(config: Config, dtype: str, device: torch.device, steps: int) -> float:
    """Seconds of the fastest of `steps` training steps in `dtype` (fp16, bf16 or fp32), on one real batch.

    A first step warms up and is not counted. Data loading is not part of it.
    """
    config = dataclasses.replace(
        config,
        precision=dataclasses.replace(config.precision, dtype=dtype),
        train=dataclasses.replace(config.train, workers=0),
    )
    parts = build_parts(config, World(), device)
    batch = next(iter(parts.loader(0, 0))).to(device)
    model, optimizer = parts.state.model.train(), parts.state.optimizer
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with parts.precision.autocast():
            losses = model(batch)
        torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
